"""What kernels in NumPy import besides NumPy itself: docs/kernels-in-numpy.md.

    import numpy as np

    from kernelgen.languages.numpy import knob, trace

    @trace
    def add(a, b):
        return np.add(a, b)

Outside of kernelgen such a function computes with NumPy. While a kernel is traced, a `Tensor` (`tensor`) stands for an array that
is not known yet; NumPy's functions dispatch on it (`functions`), and what they compute becomes JAX operations. `adapter` is what
kernelgen calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from kernelgen.languages.numpy.adapter import LANGUAGE
from kernelgen.languages.numpy.apis import (
    all_gather,
    all_reduce,
    all_to_all,
    constant,
    conv2d,
    conv3d,
    full,
    reduce_scatter,
    rms_norm,
    softmax,
    topk,
    zeros,
)
from kernelgen.languages.numpy.knobs import knob
from kernelgen.languages.numpy.loops import fori_loop

__all__ = [
    "LANGUAGE",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "constant",
    "conv2d",
    "conv3d",
    "fori_loop",
    "full",
    "knob",
    "reduce_scatter",
    "rms_norm",
    "softmax",
    "topk",
    "trace",
    "zeros",
]


def trace(
    function: Callable[..., Any] | None = None,
    *,
    input_specs: Sequence[tuple[Sequence[int], str]] | None = None,
    name: str | None = None,
) -> Any:
    """Marks a function as a kernel in NumPy. Called from Python it computes as it is written.

    Args:
        function: the function, when the decorator is written without parentheses.
        input_specs: shape and dtype (`((128, 512), "f32")`) of each argument, for `kernelgen run` without a manifest.
        name: another name than the function's, for readers.
    """

    def mark(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            return kernel(*args, **kwargs)

        run.input_specs = input_specs  # type: ignore[attr-defined]
        run.language = "numpy"  # type: ignore[attr-defined]
        return run

    return mark if function is None else mark(function)
