"""Fused attention, and the scores by which sparse attention chooses its keys."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter
from kernelgen.ggml.causality import TOKENS, seen
from kernelgen.ggml.tensor import TensorDesc

from .common import PREC_F32, add_mask, f32, grouped_dot, per_head, per_row, repeat, result
from .dequantize import floats

QUERIES, KEYS = 128, 2048
"""The block of scores without a prompt: queries of all heads, and keys. It takes 8 KiB in each of SBUF's 128 partitions."""

SCORES, FEWEST_KEYS = 2 << 20, 512
"""The block of scores of a prompt: 8 MiB, a third of trn1's SBUF, and the fewest keys of such a block."""


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
    causal: bool = False,
    inputs,
    out,
):
    """softmax(scale * q k^T + slope * mask) v for every head; query heads share key and value heads in groups.

    As in ggml's CPU backend, `q` is rounded to the type of `k`. The weights of `v` are rounded to the type of `v`, unless `prec` is
    float32. With `logit_softcap`, scores are capped as cap * tanh(score / cap) before the mask. A query without visible keys gets
    zeros. `n_kv_max` is the most keys that a query attends to, for kernels that gather them; this kernel reads all keys, and the
    mask hides the others.

    With many scores, the kernel reads keys in blocks, and carries sums, maximum and total of each query from block to block. It
    processes a prompt in chunks of 128 tokens, so that the scores of all heads fit into SBUF. Others measured attention in XLA with
    the scores of all of 8,448 keys on trn1 and trn2: it moved 2.1 GB of scores to HBM and back, and took 3 to 5 times as long as an
    NKI kernel with blocks. This form was not measured. With `causal`, the kernel omits keys that no token of a chunk attends to
    (`kernelgen.ggml.causality`).

    q: [B, H, n, DK] f32; k: [K3, K2, n_kv, DK], v: [V3, V2, n_kv, DV], both f32, f16, bf16 or quantized, K2 and V2 dividing
    H; mask: [M3, M2, n or more, n_kv] f16; sinks: [1, 1, 1, H] f32. Returns [B, n, H, DV] f32.
    """
    batches, heads, n, _ = q.shape
    n_kv = k.shape[2]
    rows, width = _block(batches * heads, n, n_kv, causal)
    parts = []
    for first in range(0, n, rows):
        part = lax.slice_in_dim(q, first, min(first + rows, n), axis=2)
        n_seen = seen(n, n_kv, first, part.shape[2]) if causal else n_kv
        sums = total = None
        # The largest score so far: none, or the sink's, which adds one to the total.
        top = None if sinks is None else per_head(sinks, part)
        for start in range(0, n_seen, width):
            end = min(start + width, n_seen)
            keys, values = (_keys(x, t, start, end - start) for x, t in ((k, inputs[1]), (v, inputs[2])))
            scores = grouped_dot(keys, lax.convert_element_type(part, keys.dtype), 3)  # [B, H, rows, width]
            if logit_softcap:
                cap = np.float32(logit_softcap)
                scores = cap * lax.tanh(scores * (np.float32(scale) / cap))
            else:
                scores = scores * np.float32(scale)
            if mask is not None:
                of_rows = lax.slice_in_dim(mask, first, first + part.shape[2], axis=2)
                scores = add_mask(scores, lax.slice_in_dim(of_rows, start, end, axis=3), max_bias)
            # The maximum of a query without visible keys would be -inf, and -inf - -inf is NaN. The smallest finite number as a
            # lower bound makes its weights zeros. The weights of any other query sum to at least one, the maximum's weight.
            before, top = top, lax.reduce(scores, np.finfo(np.float32).min, lax.max, (3,))
            if before is not None:
                top = lax.max(top, before)
            weights = lax.exp(scores - per_row(top, scores))
            added = lax.reduce_sum(weights, (3,))
            if prec == PREC_F32:
                values = f32(values)
            y = grouped_dot(values, lax.convert_element_type(weights, values.dtype), 2)  # [B, H, rows, DV]
            if before is not None:
                kept = lax.exp(before - top)
                added = added + (kept if total is None else total * kept)
                y = y if sums is None else sums * per_row(kept, y) + y
            sums, total = y, added
        total = lax.max(total, np.float32(1))
        parts.append(lax.transpose(sums / per_row(total, sums), (0, 2, 1, 3)))
    return result(lax.concatenate(parts, 1) if len(parts) > 1 else parts[0], out)


def _block(heads: int, n: int, n_kv: int, causal: bool) -> tuple[int, int]:
    """Returns the numbers of tokens and keys in a block of scores; all of them if there are few scores."""
    if n >= TOKENS and (causal or heads * n * n_kv > SCORES):
        return TOKENS, min(max(SCORES // (heads * TOKENS) // FEWEST_KEYS, 1) * FEWEST_KEYS, KEYS, n_kv)
    return n, KEYS if n_kv > KEYS and heads * n * n_kv > QUERIES * KEYS else n_kv


def _keys(x: Array, tensor: TensorDesc, start: int, width: int) -> Array:
    """Returns a block of keys or values, dequantized: [N3, N2, width, D] from `x`, [N3, N2, n_kv, …]."""
    if width == x.shape[2]:
        return floats(x, tensor)
    block = TensorDesc.make((tensor.ne[0], width, *tensor.ne[2:]), tensor.dtype)
    return floats(lax.slice_in_dim(x, start, start + width, axis=2), block)


@emitter("lightning_indexer", types="f32, float quantized, f32, f16")
def lightning_indexer(q, k, weights, mask, *, inputs, out):
    """The score of each query and key: the sum over the indexer's heads of `weights * relu(q k^T)`, plus the mask.

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
