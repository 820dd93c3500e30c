"""`trace`, which marks a function as a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any


def trace(
    function: Callable[..., Any] | None = None,
    *,
    input_specs: Sequence[tuple[Sequence[int], str]] | None = None,
    name: str | None = None,
) -> Any:
    """Marks a function as a kernel in NumPy. A call from Python computes with NumPy.

    Args:
        function: the function, if the decorator has no parentheses.
        input_specs: shape and dtype (`((128, 512), "f32")`) of each argument, for `kernelgen run` without a manifest.
        name: another name than the function's, for people.
    """

    def mark(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            return kernel(*args, **kwargs)

        run.input_specs = input_specs  # type: ignore[attr-defined]
        run.language = "numpy"  # type: ignore[attr-defined]
        return run

    return mark if function is None else mark(function)
