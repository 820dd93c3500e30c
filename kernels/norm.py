"""Sums and norms of rows (ggml's dimension 0), and of groups of channels. All take and return [ne3, ne2, ne1, ne0], in float32."""

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

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


@emitter("group_norm", types="f32")
def group_norm(x, *, n_groups: int, eps: float, out):
    """`(x - mean) / sqrt(variance + eps)` of each group of channels of x [N, C, H, W].

    A group has C / n_groups channels, rounded up; the last group with channels has the rest, and groups after it are empty.
    """
    n, c, h, w = x.shape
    channels = -(-c // n_groups)
    groups = -(-c // channels)
    missing = groups * channels - c
    count = np.full((1, groups), channels * h * w, np.float32)
    count[0, -1] -= missing * h * w

    def mean(x: Array) -> Array:
        """Returns the mean of the group of each element of x, in the shape of x."""
        if missing:
            x = lax.pad(x, np.float32(0), [(0, 0, 0), (0, missing, 0), (0, 0, 0), (0, 0, 0)])
        y = lax.reduce_sum(lax.reshape(x, (n, groups, channels * h * w)), (2,)) / count
        y = lax.reshape(lax.broadcast_in_dim(y, (n, groups, channels), (0, 1)), (n, groups * channels))
        return lax.broadcast_in_dim(lax.slice_in_dim(y, 0, c, axis=1), (n, c, h, w), (0, 1))

    x = x - mean(x)
    return result(x * lax.rsqrt(mean(x * x) + np.float32(eps)), out)
