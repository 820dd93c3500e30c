"""Normalisation over rows (ggml's dimension 0)."""

import jax.numpy as jnp
from jax import lax
from kernelgen.emitter import emitter

from .common import f32, result


@emitter("norm")
def norm(x, *, eps: float, out):
    """`(x - mean) / sqrt(var + eps)` of each row, var being the mean of squares; x: [ne3, ne2, ne1, ne0] f32."""
    x = f32(x)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return result(x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps)), out)


@emitter("rms_norm")
def rms_norm(x, *, eps: float, out):
    """`x / sqrt(mean(x^2) + eps)` of each row; x: [ne3, ne2, ne1, ne0] f32."""
    x = f32(x)
    return result(x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + jnp.float32(eps)), out)


@emitter("l2_norm")
def l2_norm(x, *, eps: float, out):
    """`x / max(sqrt(sum(x^2)), eps)` of each row; x: [ne3, ne2, ne1, ne0] f32."""
    x = f32(x)
    length = lax.sqrt(jnp.sum(x * x, axis=-1, keepdims=True))
    return result(x / lax.max(length, jnp.float32(eps)), out)
