"""Fused attention, and the scores by which sparse attention chooses its keys."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.emitters import emitter

from .common import PREC_F32, add_mask, f32, grouped_dot, per_head, per_row, repeat, result
from .dequantize import floats


@emitter("flash_attn_ext", types="f32, float quantized, float quantized, f16, f32")
def flash_attn_ext(
    q,
    k,
    v,
    mask=None,
    sinks=None,
    *,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    prec: int = 0,
    n_kv_max: int = 0,
    inputs,
    out,
):
    """softmax(scale * q k^T + slope * mask) v for every head; query heads share key and value heads in groups.

    As ggml's CPU backend does, `q` is rounded to the type of `k`. The weights of `v` are rounded to its type too, unless `prec`
    asks for float32. With `logit_softcap`, scores are capped as cap * tanh(score / cap) before the mask. A query that the mask
    hides from every key gets zeros. `n_kv_max` says how many keys a query sees at most, for kernels that gather them; all are read
    here, and the mask hides the others.

    q: [B, H, n, DK] f32; k: [K3, K2, n_kv, DK], v: [V3, V2, n_kv, DV], both f32, f16, bf16 or quantized, K2 and V2 dividing
    H; mask: [M3, M2, n or more, n_kv] f16; sinks: [1, 1, 1, H] f32. Returns [B, n, H, DV] f32.
    """
    k, v = floats(k, inputs[1]), floats(v, inputs[2])
    scores = grouped_dot(k, lax.convert_element_type(q, k.dtype), 3)  # [B, H, n, n_kv]
    if logit_softcap:
        cap = np.float32(logit_softcap)
        scores = cap * lax.tanh(scores * (np.float32(scale) / cap))
    else:
        scores = scores * np.float32(scale)
    if mask is not None:
        scores = add_mask(scores, mask, max_bias)
    # The maximum of a query that sees nothing is -inf, and -inf - -inf would be no number: it is held at the least finite one, so
    # that the weights are zeros. Of any other query they sum to one at least, for that of the maximum is one.
    top = lax.reduce(scores, np.finfo(np.float32).min, lax.max, (3,))
    if sinks is not None:
        sinks = per_head(sinks, scores)
        top = lax.max(top, sinks)
    weights = lax.exp(scores - per_row(top, scores))
    total = lax.reduce_sum(weights, (3,))
    if sinks is not None:
        total = total + lax.exp(sinks - top)
    total = lax.max(total, np.float32(1))
    if prec == PREC_F32:
        v = f32(v)
    y = grouped_dot(v, lax.convert_element_type(weights, v.dtype), 2)  # [B, H, n, DV]
    return result(lax.transpose(y / per_row(total, y), (0, 2, 1, 3)), out)


@emitter("lightning_indexer", types="f32, float quantized, f32, f16")
def lightning_indexer(q, k, weights, mask, *, inputs, out):
    """How much each query wants each key: the sum over the indexer's heads of `weights * relu(q k^T)`, plus the mask.

    q: [N, n, H, D] f32; k: [N, n_kv, 1, D] f32, f16, bf16 or quantized; weights: [N, 1, n, H] f32; mask: [M, 1, n, n_kv] f16, M
    dividing N. Returns [N, 1, n, n_kv] f32.
    """
    k = lax.squeeze(f32(floats(k, inputs[1])), (2,))
    scores = lax.dot_general(q, k, (((3,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)  # [N, n, H, n_kv]
    scores = lax.max(scores, np.float32(0))
    total = lax.dot_general(
        lax.squeeze(weights, (1,)), scores, (((2,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32
    )
    return result(lax.expand_dims(total, (1,)) + repeat(f32(mask), (total.shape[0], 1, *total.shape[1:])), out)
