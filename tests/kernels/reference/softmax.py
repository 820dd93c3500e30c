"""Softmax, its gradient, and masks."""

from __future__ import annotations

import math

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, out, reference


def slope(head: int, n_head: int, max_bias: float) -> float:
    if max_bias <= 0:
        return 1.0
    log2 = 1 << math.floor(math.log2(n_head))
    m0, m1 = 2.0 ** (-max_bias / log2), 2.0 ** (-max_bias / 2 / log2)
    return m0 ** (head + 1) if head < log2 else m1 ** (2 * (head - log2) + 1)


@reference("soft_max")
def soft_max(spec: KernelSpec, x: Array, mask: Array | None = None, sinks: Array | None = None) -> Array:
    p = dict(spec.params)
    y = np.empty(x.shape)
    n3, n2, n1, _ = x.shape
    for i3, i2, i1 in np.ndindex(n3, n2, n1):
        row = x[i3, i2, i1].astype(np.float64) * p["scale"]
        if mask is not None:
            row = row + slope(i2, n2, p["max_bias"]) * mask[i3 % mask.shape[0], i2 % mask.shape[1], i1].astype(
                np.float64
            )
        top = row.max()
        if sinks is not None:
            top = max(top, sinks[0, 0, 0, i2])
        e = np.exp(row - top)
        y[i3, i2, i1] = e / (e.sum() + (0 if sinks is None else np.exp(sinks[0, 0, 0, i2] - top)))
    return out(spec, y)


example("soft_max", inputs=("(33,4,3,2)", "(33,5,1,2)", "(3,1,1,1)"), scale=0.3, max_bias=8.0)


@reference("soft_max_back")
def soft_max_back(spec: KernelSpec, grad: Array, y: Array) -> Array:
    dy, y = grad.astype(np.float64), y.astype(np.float64)
    dot = (y * dy).sum(axis=3, keepdims=True)
    return out(spec, (dy - dot) * y * dict(spec.params)["scale"])


example("soft_max_back", inputs=("(33,4,3,2)", "(33,4,3,2)"), scale=0.3)


@reference("diag_mask_inf", "diag_mask_zero")
def diag_mask(spec: KernelSpec, x: Array) -> Array:
    n_past = int(dict(spec.params)["n_past"])
    y = x.copy()
    for j, i in np.ndindex(y.shape[2:]):
        if i > n_past + j:
            y[:, :, j, i] = -np.inf if spec.op == "diag_mask_inf" else 0
    return out(spec, y)


example("diag_mask_inf", "diag_mask_zero", inputs=("(9,4,3,2)",), n_past=3)
