"""Softmax in NKI for attention: with scale, mask, ALiBi slopes and sinks. Rows lie on partitions."""

import nki.isa as nisa
import nki.language as nl
import numpy as np
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.languages.nki import inline

from .common import alibi_slopes, f32, result
from .nki_common import hbm, loaded, row_tiles, runs, sbuf


@nki.jit
def _soft_max(x, mask, sinks, slopes, scale):
    """Computes the softmax of each row of `scale * x + slope * mask`.

    x: [B, H, n, n_kv]; mask: [M3, M2, n or more, n_kv] or None; sinks, slopes: [H, 1] f32 or None. Returns [B, H, n, n_kv] f32.
    """
    batches, heads, n, n_kv = x.shape
    y = hbm(x.shape, nl.float32)
    source, target = x.reshape((batches, heads * n, n_kv)), y.reshape((batches, heads * n, n_kv))
    for b in nl.affine_range(batches):
        for start, p, _ in row_tiles(heads, n):
            tile = loaded(source[b, start : start + p], nl.float32)
            scores = _scores(tile, _mask_of(mask, b, start, p, n, n_kv), _of_heads(slopes, start, p, n), scale)
            sink = _of_heads(sinks, start, p, n)
            nisa.dma_copy(dst=target[b, start : start + p], src=_of_rows(scores, sink))
    return y


def _mask_of(mask, b, start, p, n, n_kv):
    """Returns the mask of p rows from row `start`, [p, n_kv], or None. Each head has n rows."""
    if mask is None:
        return None
    tile = sbuf((p, n_kv), mask.dtype)
    for at, row, count in runs(start, p, n):
        part = mask[b % mask.shape[0], row // n % mask.shape[1], row % n : row % n + count]
        nisa.dma_copy(dst=tile[at : at + count], src=part)
    return tile


def _of_heads(values, start, p, n):
    """Repeats each head's value for the rows of that head: returns [p, 1], or None."""
    if values is None:
        return None
    tile = sbuf((p, 1))
    for at, row, count in runs(start, p, n):
        head = row // n
        nisa.dma_copy(dst=tile[at : at + count], src=values[head : head + 1].broadcast_to((count, 1)))
    return tile


def _scores(tile, mask, slopes, scale):
    """Returns `scale * tile + slopes * mask`, [p, n_kv]."""
    scores = sbuf(tile.shape)
    if mask is None:
        nisa.tensor_scalar(scores, tile, nl.multiply, scale)
        return scores
    if slopes is not None:
        weighted = sbuf(mask.shape)
        nisa.tensor_scalar(weighted, mask, nl.multiply, slopes)
        mask = weighted
    nisa.scalar_tensor_tensor(scores, tile, nl.multiply, scale, nl.add, mask)
    return scores


def _of_rows(scores, sink):
    """Returns the softmax of each row, [p, n_kv]. The maximum and the sum include the row's sink."""
    p = scores.shape[0]
    top, total, weights = sbuf((p, 1)), sbuf((p, 1)), sbuf(scores.shape)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=scores, axis=1)
    if sink is not None:
        nisa.tensor_tensor(top, top, sink, nl.maximum)
    nisa.tensor_scalar(top, top, nl.multiply, -1.0)
    nisa.activation_reduce(weights, nl.exp, scores, nl.add, total, bias=top)
    if sink is not None:
        own = sbuf((p, 1))
        nisa.activation(own, nl.exp, sink, bias=top)
        nisa.tensor_tensor(total, total, own, nl.add)
    nisa.reciprocal(total, total)
    nisa.tensor_scalar(weights, weights, nl.multiply, total)
    return weights


@emitter("soft_max", types="f32, f32 f16, f32", language="nki", where=("x_ne0 <= 8192", "x_ne2 * x_ne3 <= 256"))
def soft_max(x, mask=None, sinks=None, *, scale: float = 1.0, max_bias: float = 0.0, out):
    """Computes the softmax of each row of `scale * x + slope * mask`.

    x: [B, H, n, n_kv] f32; mask: [M3, M2, n or more, n_kv] f32 or f16, M3 dividing B and M2 dividing H; sinks: [1, 1, 1, H] f32.
    """
    heads = x.shape[1]
    sinks = None if sinks is None else lax.reshape(f32(sinks), (heads, 1))
    slopes = None
    if mask is not None and max_bias > 0:
        slopes = np.reshape(alibi_slopes(heads, max_bias), (heads, 1))
    return result(inline(_soft_max, x, mask, sinks, slopes, scale=scale)[0], out)
