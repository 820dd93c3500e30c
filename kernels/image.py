"""Ops of vision and diffusion models besides convolution: resizing, padding, rolling, windows, embeddings of positions and times.

Images are [N, C, H, W]. Ops that only move elements support all types except quantized ones.
"""

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import Unsupported, result
from .windows import windows

# --- resizing -------------------------------------------------------------------------------------------------------------

_NEAREST, _BILINEAR, _BICUBIC = range(3)
_ALIGN_CORNERS, _ANTIALIAS = 1 << 8, 1 << 9


@emitter("upscale", types="f32")
def upscale(x, *, mode: int, out):
    """`x` resized to the result's shape, by ggml's `mode`: nearest, bilinear or bicubic, plus flags.

    Batches and channels are resized to the nearest in all modes. The positions and weights of the source's elements are constants,
    computed in float32 in the order of ggml's CPU backend: the last bit can decide which element is nearest.
    """
    kind = mode & 0xFF
    for axis in (0, 1):
        x = _take(
            x, axis, _nearest(out.shape[axis], x.shape[axis], np.float32(out.shape[axis]) / np.float32(x.shape[axis]))
        )
    for axis in (3, 2):
        n, m = out.shape[axis], x.shape[axis]
        factor = np.float32(n) / np.float32(m)
        offset = np.float32(0.5)
        if mode & _ALIGN_CORNERS:
            offset = np.float32(0)
            if n > 1 and m > 1:
                factor = np.float32(n - 1) / np.float32(m - 1)
        if kind == _NEAREST:
            x = _take(x, axis, _nearest(n, m, factor))
        elif mode & _ANTIALIAS:
            x = _blend(x, axis, *_triangle(n, m, factor, offset))
        else:
            x = _blend(x, axis, *(_linear if kind == _BILINEAR else _cubic)(n, m, factor, offset))
    return result(x, out)


def _nearest(n: int, m: int, factor: np.float32) -> np.ndarray:
    """Returns the position of the nearest of `m` elements for each of `n` positions, [n] i32."""
    return np.minimum((np.arange(n, dtype=np.float32) / factor).astype(np.int32), np.int32(m - 1))


def _linear(n: int, m: int, factor: np.float32, offset: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions [n, 2] i32 and weights [n, 2] f32 of linear interpolation."""
    at = (np.arange(n, dtype=np.float32) + offset) / factor - offset
    low = np.floor(at).astype(np.int32)
    index = np.clip(np.stack([low, low + 1], axis=1), 0, m - 1)
    weight = np.clip(at - index[:, 0].astype(np.float32), np.float32(0), np.float32(1))
    return index, np.stack([np.float32(1) - weight, weight], axis=1)


def _cubic(n: int, m: int, factor: np.float32, offset: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions [n, 4] i32 and weights [n, 4] f32 of cubic convolution with alpha = -0.75."""
    a = np.float32(-0.75)
    one, two = np.float32(1), np.float32(2)

    def near(x):
        return ((a + two) * x - (a + np.float32(3))) * x * x + one

    def far(x):
        return ((a * x - np.float32(5) * a) * x + np.float32(8) * a) * x - np.float32(4) * a

    at = (np.arange(n, dtype=np.float32) + offset) / factor - offset
    low = np.floor(at)
    x = at - low
    index = np.clip(low.astype(np.int32)[:, None] + np.arange(-1, 3, dtype=np.int32), 0, m - 1)
    return index, np.stack([far(x + one), near(x), near(one - x), far(two - x)], axis=1)


def _triangle(n: int, m: int, factor: np.float32, offset: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and weights, [n, taps] each, of linear interpolation over all elements that a result's element covers."""
    support = np.maximum(np.float32(1), np.float32(1) / factor)
    at = (np.arange(n, dtype=np.float32) + offset) / factor
    begin = np.maximum((at - support + offset).astype(np.int32), 0)
    end = np.minimum((at + support + offset).astype(np.int32), m)
    index = begin[:, None] + np.arange(max(1, int((end - begin).max())), dtype=np.int32)
    distance = (index.astype(np.float32) - at[:, None] + offset) * (np.float32(1) / support)
    weight = np.maximum(np.float32(1) - np.abs(distance), np.float32(0))
    weight[index >= end[:, None]] = 0
    total = weight.sum(axis=1, keepdims=True, dtype=np.float32)
    return np.minimum(index, m - 1), np.divide(weight, total, out=np.zeros_like(weight), where=total > 0)


def _take(x: Array, axis: int, index: np.ndarray) -> Array:
    """Returns the elements of an axis at the positions `index`, [n] or [n, taps] i32; taps become the last axis."""
    if index.ndim == 1 and np.array_equal(index, np.arange(x.shape[axis])):
        return x
    offsets = [i for i in range(x.ndim) if i != axis]
    numbers = lax.GatherDimensionNumbers(tuple(offsets), (axis,), (axis,))
    sizes = [1 if i == axis else n for i, n in enumerate(x.shape)]
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, index[..., None], numbers, sizes, mode=mode)


def _blend(x: Array, axis: int, index: np.ndarray, weight: np.ndarray) -> Array:
    """Returns sums of elements of an axis, weighted by `weight`: for each row of `index`, the elements at its positions."""
    taken = _take(x, axis, index)
    return lax.reduce_sum(taken * lax.broadcast_in_dim(weight, taken.shape, (axis, x.ndim)), (x.ndim,))


# --- padding and rolling --------------------------------------------------------------------------------------------------


@emitter("pad", types="number")
def pad(
    x,
    *,
    lp0: int,
    rp0: int,
    lp1: int,
    rp1: int,
    lp2: int,
    rp2: int,
    lp3: int,
    rp3: int,
    circular: bool,
    out,
):
    """`x` with `lp` elements before and `rp` elements after each of ggml's dimensions: zeros, or repeats of `x`."""
    edges = ((lp3, rp3), (lp2, rp2), (lp1, rp1), (lp0, rp0))
    if not circular:
        return result(lax.pad(x, x.dtype.type(0), [(*edge, 0) for edge in edges]), out)
    for axis, (left, right) in enumerate(edges):
        x = _wrap(x, axis, -left, x.shape[axis] + left + right)
    return result(x, out)


def _wrap(x: Array, axis: int, start: int, n: int) -> Array:
    """Returns `n` elements of an axis from `start` on, which may be outside of it: the axis repeats."""
    length = x.shape[axis]
    start %= length
    if (start, n) == (0, length):
        return x
    copies = -(-(start + n) // length)
    return lax.slice_in_dim(lax.concatenate([x] * copies, axis), start, start + n, axis=axis)


@emitter("pad_reflect_1d", types="f32")
def pad_reflect_1d(x, *, p0: int, p1: int, out):
    """Rows of `x` with `p0` elements before and `p1` after them, mirrored at the first and the last element."""
    n = x.shape[3]
    left = lax.rev(lax.slice_in_dim(x, 1, 1 + p0, axis=3), (3,))
    right = lax.rev(lax.slice_in_dim(x, n - 1 - p1, n - 1, axis=3), (3,))
    return result(lax.concatenate([left, x, right], 3), out)


@emitter("roll", types="number")
def roll(x, *, shift0: int, shift1: int, shift2: int, shift3: int, out):
    """`x` with each of ggml's dimensions rotated: elements that leave at one end enter at the other."""
    for axis, shift in enumerate((shift3, shift2, shift1, shift0)):
        x = _wrap(x, axis, -shift, x.shape[axis])
    return result(x, out)


# --- embeddings -----------------------------------------------------------------------------------------------------------


@emitter("timestep_embedding", types="f32")
def timestep_embedding(timesteps, *, dim: int, max_period: int, out):
    """Cosines and sines of each timestep at `dim / 2` frequencies, from 1 down to 1 / `max_period`.

    timesteps: [1, 1, 1, n] f32. Returns [1, 1, n, dim]; the last column of an odd `dim` is 0.
    """
    half = dim // 2
    numbers = np.arange(half, dtype=np.float32)
    frequencies = np.exp(-np.log(np.float32(max_period)) * numbers / np.float32(max(half, 1)))
    n = timesteps.shape[3]
    angles = lax.broadcast_in_dim(lax.reshape(timesteps, (n,)), (n, half), (0,)) * lax.broadcast_in_dim(
        frequencies, (n, half), (1,)
    )
    parts = [lax.cos(angles), lax.sin(angles)]
    if dim % 2:
        parts.append(lax.full((n, 1), 0, np.float32))
    return result(lax.concatenate(parts, 1), out)


# --- attention in windows (Segment Anything) ------------------------------------------------------------------------------


@emitter("win_part", types="f32")
def win_part(x, *, npx: int, npy: int, w: int, out):
    """`x` cut into windows of `w` by `w`, filled up with zeros: [1, H, W, C] to [npy * npx, w, w, C]."""
    _, high, wide, c = x.shape
    x = lax.pad(x, np.float32(0), [(0, 0, 0), (0, npy * w - high, 0), (0, npx * w - wide, 0), (0, 0, 0)])
    return result(lax.transpose(lax.reshape(x, (npy, w, npx, w, c)), (0, 2, 1, 3, 4)), out)


@emitter("win_unpart", types="f32")
def win_unpart(x, *, w: int, out):
    """The image of windows that win_part cut: [windows, w, w, C] to the result's [1, H, W, C]."""
    c, wide, high = out.ne[:3]
    npx, npy = -(-wide // w), -(-high // w)
    x = lax.slice_in_dim(lax.reshape(x, (x.shape[0], w, w, c)), 0, npy * npx, axis=0)
    x = lax.transpose(lax.reshape(x, (npy, npx, w, w, c)), (0, 2, 1, 3, 4))
    return result(lax.slice(lax.reshape(x, (npy * w, npx * w, c)), (0, 0, 0), (high, wide, c)), out)


@emitter("get_rel_pos", types="f16")
def get_rel_pos(x, *, out):
    """The row of `x` for the distance of each query and key: [1, 1, 2 * n - 1, C] to [1, n, n, C], y[q, k] = x[n - 1 - k + q]."""
    n = out.ne[1]
    y = windows(lax.reshape(x, x.shape[2:]), 0, n, n, 1, 0, 1)  # [i, q, C], x[q + i]
    return result(lax.transpose(lax.rev(y, (0,)), (1, 0, 2)), out)


@emitter("add_rel_pos", types="f32, f32, f32")
def add_rel_pos(x, pw, ph, *, inplace: bool = False, out):
    """Attention scores plus a summand for the distance along each axis.

    x: [1, B, H * W, h * w]; pw, ph: [B, H, W, w], for keys along w and along h, h being w. Returns the shape of `x`.
    """
    del inplace
    if x.shape[0] != 1:
        raise Unsupported(f"ne3 of src0 is 1, not {x.shape[0]}")
    b, high, wide, n = pw.shape
    shape = (b, high, wide, n, n)
    y = lax.reshape(x, shape) + lax.broadcast_in_dim(ph, shape, (0, 1, 2, 3))
    return result(y + lax.broadcast_in_dim(pw, shape, (0, 1, 2, 4)), out)
