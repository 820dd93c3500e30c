"""Common functions of emitters: GGML's conventions in JAX.

Arrays have the reverse of GGML's shape, `[ne3, ne2, ne1, ne0]`: ggml's dimension i is axis `-1 - i`. `dequantize` and `quantize`
handle quantized tensors.

Emitters call `lax` and plain operators rather than `jax.nn`, so that a kernel's text shows its computation, and its HLO does not
change with JAX's release.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.ggml.tensor import TensorDesc

DTYPES = {
    "f32": jnp.float32,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "i32": jnp.int32,
    "i16": jnp.int16,
    "i8": jnp.int8,
}
"""JAX's type for each of ggml's types that is neither quantized nor 64 bits wide."""

PREC_F32 = 10
"""`GGML_PREC_F32`, the value of a `prec` parameter for float32 throughout."""


class Unsupported(ValueError):
    """An emitter raises this for a kernel that it does not support; the error that names the kernel includes the message."""


PREC_F32 = 10
"""`GGML_PREC_F32` of ggml.h."""


def f32(x: Array) -> Array:
    """Returns `x` as float32, in which ggml's CPU backend computes for all storage types."""
    return lax.convert_element_type(x, jnp.float32)


def number(value: float | Array) -> np.float32 | Array:
    """Returns a parameter as float32: a constant, or a run-time input of shape ()."""
    return np.float32(value) if isinstance(value, int | float) else value


def result(x: Array, out: TensorDesc) -> Array:
    """Returns `x` rounded to the result's type (nearest even) and in the result's shape."""
    if out.dtype not in DTYPES:
        raise Unsupported(f"results of type {out.dtype} are not supported")
    if x.size != out.elements:
        raise ValueError(f"the kernel returns {list(x.shape)}, and the manifest says {out}, which is {list(out.shape)}")
    return lax.reshape(lax.convert_element_type(x, DTYPES[out.dtype]), out.shape)


def repeat(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns `x` repeated to `shape`, element i of an axis being element i modulo its length (`ggml_repeat`).

    Every axis of `x` divides the axis of `shape`.
    """
    split: list[int] = []
    dims: list[int] = []
    for n, m in zip(shape, x.shape, strict=True):
        # An axis needs a second axis to repeat over, unless it has one element or its full length already.
        split += [n // m, m] if 1 < m < n else [n]
        dims.append(len(split) - 1)
    return lax.reshape(lax.broadcast_in_dim(x, split, dims), shape)


def prefix_sum(x: Array) -> Array:
    """Returns the sum of each element of a row and the elements before it: [..., n].

    Each step doubles the range of the sums, so that rounding errors grow with log(n), and an infinity affects no element before it.
    """
    n, axis = x.shape[-1], x.ndim - 1
    steps = (n - 1).bit_length()
    if steps == 0:
        return x
    most = 2 ** (steps - 1)
    before = [(0, 0, 0)] * axis + [(most, 0, 0)]

    def step(i, x):
        start = np.int32(most) - lax.shift_left(np.int32(1), i)
        return x + lax.dynamic_slice_in_dim(lax.pad(x, x.dtype.type(0), before), start, n, axis)

    # A loop, because XLA would fuse unrolled steps, and compute each of them again for every later one.
    return lax.fori_loop(0, steps, step, x)


def per_row(x: Array, like: Array) -> Array:
    """Broadcasts a number per row, [ne3, ne2, ne1], to the shape of `like`, [ne3, ne2, ne1, ne0]."""
    return lax.broadcast_in_dim(x, like.shape, (0, 1, 2))


def per_head(x: Array, like: Array) -> Array:
    """Broadcasts a number per head, [1, 1, 1, H], to every row of `like`, [B, H, n, ne0]: [B, H, n] f32."""
    return lax.broadcast_in_dim(lax.reshape(f32(x), like.shape[1:2]), like.shape[:3], (1,))


def grouped_dot(a: Array, b: Array, axis: int) -> Array:
    """Returns products of matrices, where several matrices of `b` share one of `a` (grouped heads, broadcast weights).

    Matrix (i3, i2) of `b` is multiplied by matrix (i3 * A3 / B3, i2 * A2 / B2) of `a`. The matrices that share one become a
    separate axis, so `a` is read in place and never repeated in memory. Accumulates in float32.

    Args:
        a: [A3, A2, r, c]; A3 divides B3 and A2 divides B2.
        b: [B3, B2, n, k] of the same type; k is the length of the contracted axis of `a`.
        axis: the axis of `a` that is contracted, 2 or 3.

    Returns:
        [B3, B2, n, the other axis of a] f32.
    """
    a3, a2 = a.shape[:2]
    b3, b2, n, k = b.shape
    if b3 % a3 or b2 % a2:
        raise Unsupported(f"a batch of {b3} x {b2} can't be shared out over {a3} x {a2} matrices")
    b = lax.reshape(b, (a3, b3 // a3, a2, b2 // a2, n, k))
    dims = (((5,), (axis,)), ((0, 2), (0, 1)))
    y = lax.dot_general(b, a, dims, preferred_element_type=jnp.float32)  # [a3, a2, b3/a3, b2/a2, n, m]
    return lax.reshape(lax.transpose(y, (0, 2, 1, 3, 4, 5)), (b3, b2, n, y.shape[-1]))


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """Returns ALiBi's slope of each head, [n_head, 1, 1] f32; ones if `max_bias` is 0."""
    if max_bias <= 0:
        return np.ones((n_head, 1, 1), np.float32)
    power = 2 ** math.floor(math.log2(n_head))
    m0, m1 = (np.float32(2.0 ** (-bias / power)) for bias in (max_bias, max_bias / 2))
    slopes = [m0 ** np.float32(h + 1) if h < power else m1 ** np.float32(2 * (h - power) + 1) for h in range(n_head)]
    return np.array(slopes, np.float32).reshape(n_head, 1, 1)


def add_mask(scores: Array, mask: Array, max_bias: float) -> Array:
    """Returns attention scores plus the mask, weighted by ALiBi's slopes.

    Args:
        scores: [B, H, n, n_kv] f32.
        mask: [M3, M2, n or more, n_kv] f32 or f16; M3 divides B, M2 divides H. Rows beyond n are padding.
        max_bias: 0 for no ALiBi.
    """
    b, h, n, n_kv = scores.shape
    mask = repeat(f32(lax.slice_in_dim(mask, 0, n, axis=2)), (b, h, n, n_kv))
    return scores + (mask * alibi_slopes(h, max_bias) if max_bias > 0 else mask)
