"""Sorting rows, and finding their largest elements."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, out, reference


@reference("argsort")
def argsort(spec: KernelSpec, x: Array) -> Array:
    """Keeps the order of equal elements; ggml does not specify it."""
    sign = -1 if dict(spec.params)["order"] else 1
    rows = x.reshape(-1, x.shape[3])
    return out(spec, np.array([sorted(range(len(row)), key=lambda i: (sign * row[i], i)) for row in rows]))


@reference("top_k")
def top_k(spec: KernelSpec, x: Array) -> Array:
    """Takes the first of equal elements, in their order; ggml specifies neither the order of the result nor which are taken."""
    k = spec.output.ne[0]
    rows = x.reshape(-1, x.shape[3])
    return out(spec, np.array([sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]) for row in rows]))


example("argsort", inputs=("(33,4,3,2)",), order=1)
example("top_k", inputs=("(33,4,3,2)",), output="(5,4,3,2)", dtype="i32")
