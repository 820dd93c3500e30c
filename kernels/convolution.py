"""Convolutions, and the im2col that turns a convolution into a matrix product.

Images are [N, C, H, W], kernels [OC, IC, KH, KW]; a third dimension is D, before H. ggml numbers from the innermost: `s0`, `p0` and
`d0` are stride, padding and dilation along W. All accumulate in float32.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import f32, result
from .windows import n_windows, overlap_add, windows


def _convolve(x: Array, kernel: Array, s: Sequence[int], p: Sequence[int], d: Sequence[int], groups: int = 1) -> Array:
    """Returns [N, OC, …] f32 of x [N, IC, …] and kernel [OC, IC / groups, …], of one type; s, p, d outermost first."""
    padding = []
    for i, (length, k) in enumerate(zip(x.shape[2:], kernel.shape[2:], strict=True)):
        last = (n_windows(length, k, s[i], p[i], d[i]) - 1) * s[i] + (k - 1) * d[i] + 1
        padding.append((p[i], max(p[i], last - length - p[i])))
    return _product(x, kernel, window_strides=s, padding=padding, rhs_dilation=d, feature_group_count=groups)


def _product(x: Array, kernel: Array, **steps) -> Array:
    return lax.conv_general_dilated(x, kernel, preferred_element_type=jnp.float32, **steps)


def _columns(x: Array, k: Sequence[int], s: Sequence[int], p: Sequence[int], d: Sequence[int]) -> Array:
    """Returns [N, O…, C, K…]: the elements of x [N, C, …] that the kernel covers at each place; all outermost first."""
    rank = len(k)
    for i in range(rank):
        axis = 2 + 2 * i
        x = windows(x, axis, n_windows(x.shape[axis], k[i], s[i], p[i], d[i]), k[i], s[i], p[i], d[i])
    places, elements = range(3, 3 + 2 * rank, 2), range(2, 2 + 2 * rank, 2)
    return lax.transpose(x, (0, *places, 1, *elements))


@emitter("im2col", types="float, f32 f16")
def im2col(
    kernel,
    x,
    *,
    s0: int,
    s1: int,
    p0: int,
    p1: int,
    d0: int,
    d1: int,
    is_2D: bool,
    out,
):
    """The elements of the image that the kernel covers at each place, 0 outside of the image.

    kernel: [OC, IC, KH, KW], only its shape is used; x: [N, IC, H, W]. Returns [N, OH, OW, IC * KH * KW], f32 or f16. Without
    `is_2D`: kernel [1, OC, IC, K], x [1, N, IC, L], returns [1, N, OL, IC * K].
    """
    x = lax.convert_element_type(x, jnp.float16 if out.dtype == "f16" else jnp.float32)
    if is_2D:
        return result(_columns(x, kernel.shape[2:], (s1, s0), (p1, p0), (d1, d0)), out)
    return result(_columns(lax.reshape(x, x.shape[1:]), kernel.shape[3:], (s0,), (p0,), (d0,)), out)


@emitter("im2col_back", types="f32, f32 f16")
def im2col_back(
    gradient,
    kernel,
    *,
    s0: int,
    s1: int,
    p0: int,
    p1: int,
    d0: int,
    d1: int,
    is_2D: bool,
    out,
):
    """The gradient of im2col's image: each element is the sum of the gradients of its copies.

    gradient: [N, OH, OW, IC * KH * KW] f32; kernel: [OC, IC, KH, KW], only its shape is used. Returns [N, IC, H, W] f32. Without
    `is_2D`: gradient [1, N, OL, IC * K], kernel [1, OC, IC, K], returns [1, N, IC, L].
    """
    n, oh, ow, _ = gradient.shape
    if is_2D:
        ic, kh, kw = kernel.shape[1:]
        y = lax.reshape(gradient, (n, oh, ow, ic, kh, kw))
        y = lax.transpose(y, (0, 3, 4, 1, 5, 2))  # [N, IC, KH, OH, KW, OW]
        y = overlap_add(y, 4, out.ne[0], s0, p0, d0)
        return result(overlap_add(y, 2, out.ne[1], s1, p1, d1), out)
    ic, k = kernel.shape[2:]
    y = lax.transpose(lax.reshape(gradient, (oh, ow, ic, k)), (0, 2, 3, 1))  # [N, IC, K, OL]
    return result(overlap_add(y, 2, out.ne[0], s0, p0, d0), out)


@emitter("im2col_3d", types="float, f32")
def im2col_3d(
    kernel,
    x,
    *,
    s0: int,
    s1: int,
    s2: int,
    p0: int,
    p1: int,
    p2: int,
    d0: int,
    d1: int,
    d2: int,
    IC: int,
    out,
):
    """im2col of volumes.

    kernel: [OC * IC, KD, KH, KW], only its shape is used; x: [N * IC, D, H, W] f32. Returns [N * OD, OH, OW, IC * KD * KH * KW],
    f32 or f16. Channels beyond the last whole N are not used.
    """
    x = lax.convert_element_type(x, jnp.float16 if out.dtype == "f16" else jnp.float32)
    n = x.shape[0] // IC
    x = lax.reshape(lax.slice_in_dim(x, 0, n * IC, axis=0), (n, IC, *x.shape[1:]))
    return result(_columns(x, kernel.shape[1:], (s2, s1, s0), (p2, p1, p0), (d2, d1, d0)), out)


@emitter("col2im_1d", types="float")
def col2im_1d(x, *, s0: int, oc: int, p0: int, out):
    """The sum of overlapping columns: the step of a transposed convolution after its matrix product.

    x: [1, 1, T, OC * K]; returns [1, 1, OC, (T - 1) * s0 + K - 2 * p0].
    """
    t, columns = x.shape[2:]
    y = lax.reshape(f32(x), (t, oc, columns // oc))
    return result(overlap_add(lax.transpose(y, (1, 2, 0)), 1, out.ne[0], s0, p0, 1), out)


@emitter("conv_2d", types="f32 f16, f32")
def conv_2d(kernel, x, *, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, out):
    """A convolution; the image is rounded to the kernel's type, as ggml's CPU backend does.

    kernel: [OC, IC, KH, KW] f32 or f16; x: [N, IC, H, W] f32. Returns [N, OC, OH, OW] f32.
    """
    x = lax.convert_element_type(x, kernel.dtype)
    return result(_convolve(x, kernel, (s1, s0), (p1, p0), (d1, d0)), out)


@emitter("conv_2d_dw", types="f32 f16, f32")
def conv_2d_dw(kernel, x, *, s0: int, s1: int, p0: int, p1: int, d0: int, d1: int, out):
    """A convolution of each channel with its own kernel.

    kernel: [C, 1, KH, KW] f32 or f16; x: [N, C, H, W] f32. Returns [N, C, OH, OW] f32.
    """
    return result(_convolve(x, f32(kernel), (s1, s0), (p1, p0), (d1, d0), groups=x.shape[1]), out)


@emitter("conv_3d", types="f32 f16, f32")
def conv_3d(
    kernel,
    x,
    *,
    s0: int,
    s1: int,
    s2: int,
    p0: int,
    p1: int,
    p2: int,
    d0: int,
    d1: int,
    d2: int,
    c: int,
    n: int,
    oc: int,
    out,
):
    """A convolution of volumes; the image is rounded to the kernel's type, as ggml's CPU backend does.

    kernel: [oc * c, KD, KH, KW] f32 or f16; x: [n * c, D, H, W] f32. Returns [n * oc, OD, OH, OW] f32.
    """
    x = lax.convert_element_type(lax.reshape(x, (n, c, *x.shape[1:])), kernel.dtype)
    kernel = lax.reshape(kernel, (oc, c, *kernel.shape[1:]))
    return result(_convolve(x, kernel, (s2, s1, s0), (p2, p1, p0), (d2, d1, d0)), out)


@emitter("conv_transpose_1d", types="f32 f16, f32")
def conv_transpose_1d(kernel, x, *, s0: int, p0: int, d0: int, out):
    """A transposed convolution; `x` is rounded to the kernel's type, as ggml's CPU backend does.

    kernel: [1, IC, OC, K] f32 or f16; x: [1, 1, IC, L] f32. Returns [1, 1, OC, (L - 1) * s0 + K] f32. `p0` is 0 and `d0` 1.
    """
    del p0, d0
    return result(_transposed(lax.reshape(x, x.shape[1:]), lax.reshape(kernel, kernel.shape[1:]), (s0,)), out)


@emitter("conv_transpose_2d", types="f32 f16, f32")
def conv_transpose_2d(kernel, x, *, stride: int, out):
    """A transposed convolution; `x` is rounded to the kernel's type, as ggml's CPU backend does.

    kernel: [IC, OC, KH, KW] f32 or f16; x: [N, IC, H, W] f32. Returns [N, OC, (H - 1) * stride + KH, (W - 1) * stride + KW] f32.
    """
    return result(_transposed(x, kernel, (stride, stride)), out)


def _transposed(x: Array, kernel: Array, s: Sequence[int]) -> Array:
    """Returns [N, OC, …] f32 of x [N, IC, …] and kernel [IC, OC, …]: the dilated image convolved with the mirrored kernel."""
    rank = len(s)
    padding = [(k - 1, k - 1) for k in kernel.shape[2:]]
    kernel = lax.rev(lax.transpose(kernel, (1, 0, *range(2, 2 + rank))), range(2, 2 + rank))
    x = lax.convert_element_type(x, kernel.dtype)
    return _product(x, kernel, window_strides=(1,) * rank, padding=padding, lhs_dilation=s)
