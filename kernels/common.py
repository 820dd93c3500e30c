"""What emitters share: GGML's conventions in JAX.

Arrays have the reverse of GGML's shape, `(ne3, ne2, ne1, ne0)`: ggml's dimension i is axis `-1 - i`.
"""

import jax.numpy as jnp
from jax import Array, lax

FLOATS = {"f32": jnp.float32, "f16": jnp.float16, "bf16": jnp.bfloat16}
"""JAX's type for each of ggml's float types."""

DTYPES = {**FLOATS, "i32": jnp.int32, "i16": jnp.int16, "i8": jnp.int8}
"""JAX's type for each of ggml's types that is not quantized or 64 bits wide."""


def f32(x: Array) -> Array:
    """Returns `x` as float32: ggml's CPU backend computes in it whatever the storage type is."""
    return lax.convert_element_type(x, jnp.float32)


def result(x: Array, out) -> Array:
    """Returns `x` rounded to the result's type (nearest even) and in the result's shape."""
    return lax.reshape(lax.convert_element_type(x, DTYPES[out.dtype]), out.shape)


def repeat(x: Array, shape: tuple[int, ...]) -> Array:
    """Returns `x` repeated along every axis to `shape`, element i being element i modulo the axis's length (`ggml_repeat`).

    Args:
        x: each axis divides the axis of `shape`.
    """
    if x.shape == shape:
        return x
    counts = [n // m for n, m in zip(shape, x.shape, strict=True)]
    split = [n for count, m in zip(counts, x.shape, strict=True) for n in (count, m)]
    return lax.reshape(lax.broadcast_in_dim(x, split, range(1, 2 * x.ndim, 2)), shape)


def repeat_heads(x: Array, axis: int, n: int) -> Array:
    """Returns `x` with every element of `axis` repeated in place until the axis has `n` (grouped-query heads, mul_mat).

    This is the other order than `repeat`: heads 0 and 1 of four query heads share head 0 of two key heads.
    """
    if x.shape[axis] == n:
        return x
    axis %= x.ndim
    split = [*x.shape[: axis + 1], n // x.shape[axis], *x.shape[axis + 1 :]]
    dims = [k for k in range(len(split)) if k != axis + 1]
    return lax.reshape(lax.broadcast_in_dim(x, split, dims), (*x.shape[:axis], n, *x.shape[axis + 1 :]))
