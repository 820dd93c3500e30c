"""Quantized tensors: ggml's block formats, read and written.

A quantized tensor arrives as its bytes, `[ne3, ne2, ne1, blocks per row, bytes per block]` u8, and stays so in the NEFF's inputs:
what is here becomes part of the kernel that uses it. Formats are those of ggml-common.h, results those of ggml-quants.c.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.ggml.types import TYPES
from kernelgen.plan import TensorDesc

from .common import DTYPES, Unsupported, f32


def floats(x: Array, tensor: TensorDesc) -> Array:
    """Returns a tensor in its own float type, or dequantized to float32: `[ne3, ne2, ne1, ne0]`."""
    if not TYPES[tensor.dtype].quantized:
        return x
    if tensor.dtype not in DEQUANTIZE:
        raise Unsupported(f"{tensor.dtype} is not dequantized here; types that are: {', '.join(sorted(DEQUANTIZE))}")
    return lax.reshape(DEQUANTIZE[tensor.dtype](x), tensor.shape)


def stored(x: Array, tensor: TensorDesc) -> Array:
    """Returns `x`, [..., ne0], as a tensor's elements: rounded to its type, or quantized to its blocks."""
    if not TYPES[tensor.dtype].quantized:
        return lax.convert_element_type(x, DTYPES[tensor.dtype])
    if tensor.dtype not in QUANTIZE:
        raise Unsupported(f"nothing quantizes to {tensor.dtype} here; types that can be: {', '.join(sorted(QUANTIZE))}")
    return QUANTIZE[tensor.dtype](x)


# --- reading: each function takes [..., blocks, bytes per block] u8 and returns [..., blocks, elements per block] f32 ---


def _half(x: Array, at: int) -> Array:
    """Returns the f16 number at byte `at` of each block, [..., blocks, 1] f32."""
    low, high = (lax.convert_element_type(x[..., k : k + 1], jnp.uint16) for k in (at, at + 1))
    return f32(lax.bitcast_convert_type(low | (high << np.uint16(8)), jnp.float16))


def _signed(x: Array) -> Array:
    return f32(lax.bitcast_convert_type(x, jnp.int8))


def _q8_0(x: Array) -> Array:
    return _signed(x[..., 2:34]) * _half(x, 0)


def _q4_0(x: Array) -> Array:
    q = x[..., 2:18]
    # The lower halves of the 16 bytes are elements 0 to 15, the upper halves 16 to 31.
    return (f32(jnp.concatenate([q & np.uint8(15), q >> np.uint8(4)], axis=-1)) - 8) * _half(x, 0)


def _q4_k(x: Array) -> Array:
    d, dmin = _half(x, 0), _half(x, 2)
    # Eight 6-bit scales and minima in 12 bytes: 0 to 3 in the lower bits of bytes 0 to 7, the rest pieced together.
    s = x[..., 4:16]
    low, mid, high = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    six, four, two = np.uint8(63), np.uint8(4), np.uint8(6)
    scale = jnp.concatenate([low & six, (high & np.uint8(15)) | ((low >> two) << four)], axis=-1)
    minimum = jnp.concatenate([mid & six, (high >> four) | ((mid >> two) << four)], axis=-1)
    # 32 bytes hold 64 elements: the lower halves, then the upper ones.
    q = lax.reshape(x[..., 16:144], (*x.shape[:-1], 4, 1, 32))
    q = jnp.concatenate([q & np.uint8(15), q >> four], axis=-2)
    q = f32(lax.reshape(q, (*x.shape[:-1], 8, 32)))
    return lax.reshape(
        q * (d * f32(scale))[..., None] - (dmin * f32(minimum))[..., None],
        (*x.shape[:-1], 256),
    )


def _q6_k(x: Array) -> Array:
    d = _half(x, 208)
    scale = _signed(x[..., 192:208])
    # Two halves of 128 elements; 64 bytes of lower bits and 32 of upper ones give four runs of 32.
    ql = lax.reshape(x[..., 0:128], (*x.shape[:-1], 2, 2, 32))
    qh = lax.reshape(x[..., 128:192], (*x.shape[:-1], 2, 1, 32))
    low = jnp.concatenate([ql & np.uint8(15), ql >> np.uint8(4)], axis=-2)
    high = jnp.concatenate([(qh >> np.uint8(2 * k)) & np.uint8(3) for k in range(4)], axis=-2)
    q = f32(low | (high << np.uint8(4))) - 32  # [..., 2, 4, 32]
    q = lax.reshape(q, (*x.shape[:-1], 16, 16))
    return lax.reshape(q * (d * scale)[..., None], (*x.shape[:-1], 256))


DEQUANTIZE = {"q4_0": _q4_0, "q8_0": _q8_0, "q4_K": _q4_k, "q6_K": _q6_k}
"""Dequantization by ggml's type name."""


# --- quantizing, as ggml's reference functions round ---


def _blocks(x: Array) -> Array:
    return lax.reshape(x, (*x.shape[:-1], x.shape[-1] // 32, 32))


def _bytes_of_half(x: Array) -> Array:
    """Returns the two bytes of [..., 1] numbers as f16, [..., 2] u8."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float16), jnp.uint16)
    return lax.convert_element_type(jnp.concatenate([bits & np.uint16(255), bits >> np.uint16(8)], axis=-1), jnp.uint8)


def _inverse(d: Array) -> Array:
    return jnp.where(d == 0, np.float32(0), np.float32(1) / jnp.where(d == 0, np.float32(1), d))


def _to_q8_0(x: Array) -> Array:
    x = _blocks(f32(x))
    top = lax.reduce_max(lax.abs(x), (x.ndim - 1,))[..., None]
    scale = jnp.where(top == 0, np.float32(0), np.float32(127) / jnp.where(top == 0, np.float32(1), top))
    # Ties are common in F16 and BF16 tensors. They go to the even number, as where ggml has vector instructions.
    q = lax.convert_element_type(lax.round(x * scale, lax.RoundingMethod.TO_NEAREST_EVEN), jnp.int8)
    return jnp.concatenate([_bytes_of_half(top / np.float32(127)), lax.bitcast_convert_type(q, jnp.uint8)], axis=-1)


def _to_q4_0(x: Array) -> Array:
    x = _blocks(f32(x))
    magnitude = lax.abs(x)
    top = lax.reduce_max(magnitude, (x.ndim - 1,))[..., None]
    # The value of largest magnitude, with its sign, becomes -8: the first one where both signs occur.
    place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    first = lax.reduce_min(jnp.where(magnitude == top, place, np.int32(x.shape[-1])), (x.ndim - 1,))[..., None]
    d = lax.reduce_sum(jnp.where(place == first, x, np.float32(0)), (x.ndim - 1,))[..., None] / np.float32(-8)
    # At most 8 in magnitude already; the limits keep compilers from fusing product and sum, which rounds ties another way.
    scaled = lax.clamp(np.float32(-9), x * _inverse(d), np.float32(9))
    q = lax.convert_element_type(scaled + np.float32(8.5), jnp.int32)  # towards zero
    q = lax.convert_element_type(lax.min(q, np.int32(15)), jnp.uint8)
    return jnp.concatenate([_bytes_of_half(d), q[..., :16] | (q[..., 16:] << np.uint8(4))], axis=-1)


QUANTIZE = {"q4_0": _to_q4_0, "q8_0": _to_q8_0}
"""Quantization of [..., ne0] to [..., blocks, bytes per block] u8, by ggml's type name."""
