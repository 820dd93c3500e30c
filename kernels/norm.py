"""Sums and norms of rows (ggml's dimension 0). All take and return [ne3, ne2, ne1, ne0], and compute in float32."""

import numpy as np
from jax import Array, lax

from kernelgen.emitter import emitter

from .common import f32, per_row, result


def _sum(x: Array) -> Array:
    return lax.reduce_sum(x, (3,))


def _mean(x: Array) -> Array:
    return _sum(x) * np.float32(1 / x.shape[3])


@emitter("sum_rows", types="float")
def sum_rows(x, *, out):
    """The sum of each row, [ne3, ne2, ne1, 1]."""
    return result(_sum(f32(x)), out)


@emitter("norm", types="float")
def norm(x, *, eps: float, out):
    """`(x - mean) / sqrt(variance + eps)` of each row."""
    x = f32(x)
    x = x - per_row(_mean(x), x)
    return result(x * per_row(lax.rsqrt(_mean(x * x) + np.float32(eps)), x), out)


@emitter("rms_norm", types="float")
def rms_norm(x, *, eps: float, out):
    """`x / sqrt(mean of squares + eps)` of each row."""
    x = f32(x)
    return result(x * per_row(lax.rsqrt(_mean(x * x) + np.float32(eps)), x), out)


@emitter("l2_norm", types="float")
def l2_norm(x, *, eps: float, out):
    """`x / max(sqrt(sum of squares), eps)` of each row."""
    x = f32(x)
    return result(x / per_row(lax.max(lax.sqrt(_sum(x * x)), np.float32(eps)), x), out)
