"""The imports of kernels in NumPy besides NumPy itself: docs/reference/kernels-in-numpy.md.

    import numpy as np

    from kernelgen.languages.numpy import knob, trace

    @trace
    def add(a, b):
        return np.add(a, b)

Outside kernelgen such a function computes with NumPy. Under a trace, a `TracedArray` (`tensor`) replaces each array whose values
are not available yet; NumPy's functions dispatch on it to jax.numpy's, except those in `functions`. kernelgen calls `tracing`.
"""

from __future__ import annotations

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
from kernelgen.languages.numpy.tracing import LANGUAGE

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
