"""Pooling: the largest element of each window, or the mean. All take f32 or f16 and return f32."""

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import f32, result
from .windows import overlap_add, windows

_MAX = 0
"""`GGML_OP_POOL_MAX`; 1 is the mean."""

_LOWEST = np.finfo(np.float32).min
"""The initial value of maxima in ggml's CPU backend, and so the result if no element is larger."""


def _pool(
    x: Array, pool: int, k: tuple[int, int], s: tuple[int, int], p: tuple[int, int], out: tuple[int, ...]
) -> Array:
    """Returns the maximum or the sum of each window of x [N, C, H, W], f32, in the shape `out`; k, s, p along H, W."""
    x = f32(x)
    # ggml's padding may be a fraction, whose integer part is in op_params. Windows may reach further, over more padding.
    edges = [(p[i], max(0, (out[2 + i] - 1) * s[i] + k[i] - p[i] - x.shape[2 + i])) for i in range(2)]
    window = ((1, 1, *k), (1, 1, *s), [(0, 0), (0, 0), *edges])
    if pool == _MAX:
        y = lax.max(lax.reduce_window(x, np.float32(-np.inf), lax.max, *window), _LOWEST)
    else:
        y = lax.reduce_window(x, np.float32(0), lax.add, *window)
    return lax.slice(y, (0, 0, 0, 0), out)


@emitter("pool_1d", types="f32 f16")
def pool_1d(x, *, pool: int, k0: int, s0: int, p0: int, out):
    """Windows along W of x [N, C, H, W]. The mean is over the elements inside of `x`, 0 if there are none."""
    y = _pool(x, pool, (1, k0), (1, s0), (0, p0), out.shape)
    if pool == _MAX:
        return result(y, out)
    begin = lax.iota(np.int32, out.ne[0]) * np.int32(s0) - np.int32(p0)
    count = lax.min(begin + np.int32(k0), np.int32(x.shape[3])) - lax.max(begin, np.int32(0))
    return result(y / lax.broadcast_in_dim(f32(lax.max(count, np.int32(1))), y.shape, (3,)), out)


@emitter("pool_2d", types="f32 f16")
def pool_2d(x, *, pool: int, k0: int, k1: int, s0: int, s1: int, p0: int, p1: int, out):
    """Windows along H and W of x [N, C, H, W]. The mean is over the whole window, with zeros outside of `x`."""
    y = _pool(x, pool, (k1, k0), (s1, s0), (p1, p0), out.shape)
    return result(y if pool == _MAX else y / np.float32(k0 * k1), out)


@emitter("pool_2d_back", types="f32, f32 f16")
def pool_2d_back(gradient, x, *, pool: int, k0: int, k1: int, s0: int, s1: int, p0: int, p1: int, out):
    """The gradient of pool_2d's input: a window's gradient goes to its first largest element, or evenly to all elements.

    gradient: [N, C, OH, OW] f32; x: [N, C, H, W], the input. Returns [N, C, H, W].
    """
    oh, ow = gradient.shape[2:]
    shape = (*gradient.shape[:2], k1, oh, k0, ow)
    share = lax.broadcast_in_dim(gradient, shape, (0, 1, 3, 5))
    if pool == _MAX:
        y = windows(f32(x), 2, oh, k1, s1, p1, 1, fill=_LOWEST)
        y = windows(y, 4, ow, k0, s0, p0, 1, fill=_LOWEST)
        largest = lax.broadcast_in_dim(lax.reduce_max(y, (2, 4)), shape, (0, 1, 3, 5))
        number = lax.broadcasted_iota(np.int32, shape, 2) * np.int32(k0) + lax.broadcasted_iota(np.int32, shape, 4)
        # A window without an element above the lowest has no largest one.
        number = lax.select((y == largest) & (y > _LOWEST), number, lax.full_like(number, k0 * k1))
        first = lax.broadcast_in_dim(lax.reduce_min(number, (2, 4)), shape, (0, 1, 3, 5))
        share = lax.select((number == first) & (first < k0 * k1), share, lax.full_like(share, 0))
    else:
        share = share / np.float32(k0 * k1)
    y = overlap_add(share, 4, x.shape[3], s0, p0, 1)
    return result(overlap_add(y, 2, x.shape[2], s1, p1, 1), out)
