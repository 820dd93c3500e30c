"""What kernels in NumPy import besides NumPy itself: docs/reference/kernels-in-numpy.md.

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
from kernelgen.languages.numpy.marking import trace

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
