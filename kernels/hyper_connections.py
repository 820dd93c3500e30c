"""Hyper-connections: several residual streams side by side, mixed before and after each layer (DeepSeek-V4)."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import result

STREAMS = 4
"""The number of streams that `dsv4_hc_comb` mixes; ggml supports no other number."""


@emitter("dsv4_hc_pre", types="f32, f32")
def dsv4_hc_pre(x, weights, *, scale: float = 1.0, gated: bool = False, out):
    """A layer's input: the weighted sum of the streams, times `scale`. `gated` weights are per channel, and go through a sigmoid.

    x: [1, n_tokens, hc, n_embd] f32; weights: [1, 1, n_tokens, hc] f32, or as x when gated. Returns [1, 1, n_tokens, n_embd].
    """
    weights = lax.logistic(weights) if gated else lax.broadcast_in_dim(weights[0, 0], x.shape, (1, 2))
    return result(lax.reduce_sum(x * weights, (2,)) * np.float32(scale), out)


@emitter("dsv4_hc_comb", types="f32, f32, f32")
def dsv4_hc_comb(mixes, scale, base, *, eps: float, n_iter: int, out):
    """The mixing matrix: softmax over each stream's targets, then `n_iter` rounds that make rows and columns sum to 1 (Sinkhorn).

    mixes: [1, 1, n_tokens, 24] f32, whose last 16 elements are the matrix; scale: [1, 1, 1, 3 or more], only the third element is
    used; base: [1, 1, 1, 24]. Returns [1, n_tokens, source, target].
    """
    n_tokens, eps = mixes.shape[2], np.float32(eps)
    at = 2 * STREAMS
    x = lax.slice_in_dim(mixes[0, 0], at, at + STREAMS**2, axis=1) * scale[0, 0, 0, 2]
    x = lax.reshape(x + base[0, 0, :, at : at + STREAMS**2], (n_tokens, STREAMS, STREAMS))

    def normal(x: Array, axis: int, eps: np.float32) -> Array:
        total = lax.expand_dims(lax.reduce_sum(x, (axis,)) + eps, (axis,))
        return x * (np.float32(1) / total)

    x = lax.exp(x - lax.reduce_max(x, (2,))[:, :, None])
    x = normal(normal(x, 2, np.float32(0)) + eps, 1, eps)
    x = lax.fori_loop(1, n_iter, lambda _, x: normal(normal(x, 2, eps), 1, eps), x)
    return result(x, out)


@emitter("dsv4_hc_post", types="f32, f32, f32, f32")
def dsv4_hc_post(x, residual, post, comb=None, *, out):
    """The streams after a layer: its result `x`, weighted by `post` for each stream, plus the streams before it, mixed by `comb`.

    x: [1, 1, n_tokens, n_embd] f32; residual: [1, n_tokens, hc, n_embd]; post: [1, 1, n_tokens, hc]; comb: [1, n_tokens, source,
    target]; without it, streams are not mixed. Returns [1, n_tokens, hc, n_embd].
    """
    y = lax.broadcast_in_dim(x[0, 0], residual.shape, (1, 3)) * lax.broadcast_in_dim(post[0, 0], residual.shape, (1, 2))
    if comb is not None:
        residual = lax.dot_general(comb, residual, (((2,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)
    return result(y + residual, out)
