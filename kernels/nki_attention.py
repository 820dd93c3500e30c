"""Flash attention in NKI. The kernel reads keys and values once for all query heads that share them.

If all scores of a key head fit in SBUF (as for one token), keys lie on the partitions: every partition has scores even with few
queries, and the weights need no transpose before the product with the values. The queries of a prompt fill several tiles, each
with a running maximum and sum that the next block of keys corrects.

The kernel skips only the keys that `causal` excludes (`kernelgen.ggml.causality`). The mask could exclude more, but its values
are known only when the kernel runs: a loop on the device that reads them waits 10 to 37 us each time, as measured on trn1.
"""

import nki.isa as nisa
import nki.language as nl
import numpy as np
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.ggml.causality import TOKENS, seen
from kernelgen.languages.nki import inline

from .common import PREC_F32, alibi_slopes, f32, result
from .nki_common import (
    PARTITIONS,
    RUN,
    blocks,
    hbm,
    loaded,
    psum,
    row_tiles,
    runs,
    sbuf,
    turn,
    turn_each,
    turn_tile,
    turned,
    turned_dtypes,
)

KEYS, BANK = 2048, 512
"""Keys per block: their scores fill four banks of PSUM. And keys per bank."""

SCORES = 8192
"""Scores per partition that fit in SBUF beside the mask and the weights."""

QUERIES = 2048
"""Queries whose sums fit in SBUF while the kernel reads the keys."""

LEAST = float(np.finfo(np.float32).min)


class _Task:
    """The inputs and settings of one call; each method computes a part.

    Args:
        q: [B, G, rows, DK]: the queries of the heads that share a key head, row after row.
        k: [K, G, n_kv, DK]; v: [V, G, n_kv, DV]; or, if 128 divides n_kv, [K, G, 128, n_kv / 128, DK].
        mask: [M3, M2, n or more, n_kv] or None.
        sinks, slopes: [H, 1] f32 or None.
        settings: n (tokens), n_kv, causal, scale, cap (of the scores, 0 for none), weights (their dtype in the
            product with the values).
    """

    def __init__(self, q, k, v, mask, sinks, slopes, settings):
        self.q, self.k, self.v = q, k, v
        self.mask, self.sinks, self.slopes = mask, sinks, slopes
        self.n, self.scale, self.cap = settings["n"], settings["scale"], settings["cap"]
        self.weights = settings["weights"]
        self.n_kv, self.causal = settings["n_kv"], settings["causal"]

    def seen(self, start, rows):
        """Returns how many keys, from the first, the queries of `rows` rows from row `start` attend to."""
        if not self.causal or self.n < TOKENS:  # with fewer tokens, a tile holds the last tokens of several heads
            return self.n_kv
        return seen(self.n, self.n_kv, start % self.n, rows)

    def queries(self, b, g, start, rows):
        """Returns queries with channels on the partitions, [128, ⌈DK / 128⌉, rows]."""
        channels = self.q.shape[3]
        tile = sbuf((min(channels, PARTITIONS), -(-channels // PARTITIONS), rows), self.k.dtype)
        turn(tile, self.q[b, g, start : start + rows])
        return tile

    def keys(self, b, g, first, width):
        """Returns keys with channels on the partitions, [128, ⌈DK / 128⌉, width]."""
        channels = self.k.shape[3]
        tile = sbuf((min(channels, PARTITIONS), -(-channels // PARTITIONS), width), self.k.dtype)
        group = self.q.shape[0] // self.k.shape[0]
        turn(tile, self.k[b // group, g, first : first + width])
        return tile

    def values(self, b, g, first, width):
        """Returns values with 128 keys on the partitions, [128, ⌈width / 128⌉, DV]."""
        group = self.q.shape[0] // self.v.shape[0]
        source = self.v[b // group, g, first : first + width]
        tile = sbuf((min(width, PARTITIONS), -(-width // PARTITIONS), source.shape[1]), self.weights)
        for at, count in blocks(width, PARTITIONS):
            nisa.dma_copy(dst=tile[0:count, at // PARTITIONS], src=source[at : at + count])
        return tile

    def scores(self, target, queries, keys, b, g, start, first):
        """Writes the scaled and masked scores of queries from row `start` and keys from key `first`: [p, width]."""
        p, width = target.shape
        channels = self.k.shape[3]
        shown = None if self.mask is None else self.shown(b, g, start, p, first, width)
        for at, size in blocks(width, BANK):
            sums = psum((p, size))
            for chunk, count in ((c // PARTITIONS, d) for c, d in blocks(channels, PARTITIONS)):
                moving = keys[0:count, chunk, at : at + size]
                stationary = queries[0:count, chunk]
                nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=chunk > 0)
            self.masked(target[:, at : at + size], sums, None if shown is None else shown[:, at : at + size])

    def masked(self, target, sums, shown):
        """Scales and caps products in PSUM, adds the mask if any, and writes the result to `target`."""
        factor, source = self.scale, sums
        if self.cap:
            nisa.activation(target, nl.tanh, sums, scale=self.scale / self.cap)
            factor, source = self.cap, target
        if shown is None:
            nisa.tensor_scalar(target, source, nl.multiply, factor)
        else:
            nisa.scalar_tensor_tensor(target, source, nl.multiply, factor, nl.add, shown)

    def shown(self, b, g, start, p, first, width):
        """Returns the mask of p queries and `width` keys, times the heads' slopes: [p, width]."""
        outer, heads = self.mask.shape[:2]
        tile = sbuf((p, width), self.mask.dtype)
        own = self.q.shape[2] // self.n
        for at, row, count in runs(start, p, self.n):
            head, token = g * own + row // self.n, row % self.n
            source = self.mask[b % outer, head % heads, token : token + count, first : first + width]
            nisa.dma_copy(dst=tile[at : at + count], src=source)
        if self.slopes is None:
            return tile
        weighted = sbuf((p, width))
        nisa.tensor_scalar(weighted, tile, nl.multiply, self.of_heads(self.slopes, g, start, p))
        return weighted

    def of_heads(self, values, g, start, p):
        """Repeats each head's value for the queries of that head: returns [p, 1]."""
        tile = sbuf((p, 1))
        own = self.q.shape[2] // self.n
        for at, row, count in runs(start, p, self.n):
            head = g * own + row // self.n
            nisa.dma_copy(dst=tile[at : at + count], src=values[head : head + 1].broadcast_to((count, 1)))
        return tile

    def begin(self, top, total, g, start):
        """Sets the initial maximum and sum: the sink's, or values that give zeros for a query without keys."""
        if self.sinks is None:
            nisa.memset(top, LEAST)
            nisa.memset(total, 0.0)
        else:
            nisa.tensor_copy(dst=top, src=self.of_heads(self.sinks, g, start, top.shape[0]))
            nisa.memset(total, 1.0)

    def weighted(self, sums, weights, values, more):
        """Writes the product of weights [p, width] and values [128, ⌈width / 128⌉, DV] to `sums`, or adds it if `more`."""
        p, width = weights.shape
        for first, size in blocks(width, BANK):
            stationary = sbuf((min(size, PARTITIONS), -(-size // PARTITIONS), p), self.weights)
            turn_tile(stationary, weights[:, first : first + size], scalar=True)  # the vector engine has more work
            for at, count in blocks(size, PARTITIONS):
                chunk = at // PARTITIONS
                moving = values[0:count, (first + at) // PARTITIONS]
                adds = more or first + at > 0
                nisa.nc_matmul(dst=sums, stationary=stationary[0:count, chunk], moving=moving, accumulate=adds)

    def store(self, y, sums, total, b, g, start):
        """Writes sums [p, DV] divided by totals [p, 1] to the result, [B, n, H, DV]. The total of a query without keys is 0."""
        p = sums.shape[0]
        over, done = sbuf((p, 1)), sbuf(sums.shape)
        nisa.tensor_scalar(over, total, nl.maximum, 1.0)
        nisa.reciprocal(over, over)
        nisa.tensor_scalar(done, sums, nl.multiply, over)
        own = self.q.shape[2] // self.n
        for at, row, count in runs(start, p, self.n):
            head, token = g * own + row // self.n, row % self.n
            nisa.dma_copy(dst=y[b, token : token + count, head], src=done[at : at + count])


class _Keys:
    """The layout of a head's keys on the partitions: `each` adjacent keys per partition, then `rest` keys, one per partition.

    The keys of a partition are contiguous in memory, so that DMA reads them in long runs.
    """

    def __init__(self, n_kv):
        self.partitions = min(n_kv, PARTITIONS)
        self.each, self.rest = n_kv // PARTITIONS, n_kv % PARTITIONS
        self.columns = self.each + (self.rest > 0)

    def parts(self, rows, dtype):
        """Loads rows of keys, [n_kv, D] or [128, each, D], tile by tile in a dtype.

        Yields (first column, tile [partitions, columns, D]).
        """
        size = rows.shape[-1]
        whole = self.each * PARTITIONS
        if self.each:
            source = rows if self.rest == 0 else rows[0:whole].reshape((PARTITIONS, self.each, size))
            for at, count in blocks(self.each, max(1, RUN // (size * np.dtype(rows.dtype).itemsize))):
                yield at, loaded(source[:, at : at + count], dtype)
        if self.rest:
            yield self.each, loaded(rows[whole:], dtype, (self.rest, 1, size))

    def shown(self, task, b, g):
        """Returns the mask times the heads' slopes, [partitions, columns, heads, n]. Loads one head if all heads share a mask."""
        outer, heads = task.mask.shape[:2]
        own = task.q.shape[2] // task.n
        apart = 1 if heads == 1 and task.slopes is None else own
        dtype = task.mask.dtype if task.slopes is None else np.float32
        made = sbuf((self.partitions, apart, task.n, self.columns), dtype)
        for i in range(apart):
            source = task.mask[b % outer, (g * own + i) % heads, 0 : task.n]
            for first, count, p in ((0, self.each, PARTITIONS), (self.each, 1, self.rest)):
                if count and p:
                    place, start = made[0:p, i, :, first : first + count], first * PARTITIONS
                    part = source[:, start : start + p * count].reshape((task.n, p, count))
                    nisa.dma_copy(dst=place, src=part.permute((1, 0, 2)))
                    if task.slopes is not None:
                        slope = loaded(task.slopes[g * own + i : g * own + i + 1].broadcast_to((p, 1)))
                        nisa.tensor_scalar(place, place, nl.multiply, slope)
        shown = made.permute((0, 3, 1, 2))
        return shown if apart == own else shown.broadcast(2, own)


def _few(rows, n_kv):
    """Returns whether all scores of a key head fit in SBUF."""
    return rows <= PARTITIONS and -(-n_kv // PARTITIONS) * rows <= SCORES


def _whole(task, y, b, g):
    """Computes all queries of a key head at once: scores in SBUF, keys on the partitions."""
    rows, channels, group = task.q.shape[2], task.k.shape[-1], task.q.shape[0] // task.k.shape[0]
    own = rows // task.n
    keys = _Keys(task.n_kv)
    p, columns = keys.partitions, keys.columns
    queries = task.queries(b, g, 0, rows)
    scores = sbuf((p, columns, own, task.n))
    shown = None if task.mask is None else keys.shown(task, b, g)
    if keys.each and keys.rest:
        nisa.memset(scores[:, keys.each], -np.inf)
    # A sum of several products requires its own bank of PSUM.
    most_at_once = BANK // rows if channels <= PARTITIONS else 1
    for first, part in keys.parts(task.k[b // group, g], turned_dtypes(task.k.dtype)[0]):
        of = part.shape[0]
        across = sbuf((min(channels, PARTITIONS), -(-channels // PARTITIONS), part.shape[1], of), task.k.dtype)
        turn_each(across, part)
        for at, count in blocks(part.shape[1], most_at_once):
            sums = psum((of, count, own, task.n))
            for i in range(count):
                for start, size in blocks(channels, PARTITIONS):
                    chunk = start // PARTITIONS
                    nisa.nc_matmul(
                        dst=sums[:, i].reshape((of, rows)),
                        stationary=across[0:size, chunk, at + i],
                        moving=queries[0:size, chunk],
                        accumulate=start > 0,
                    )
            place = slice(first + at, first + at + count)
            task.masked(scores[0:of, place], sums, None if shown is None else shown[0:of, place])
    top, total, most, added = (sbuf((rows, 1)) for _ in range(4))
    task.begin(top, total, g, 0)
    of_partition, wide = sbuf((p, own, task.n)), sbuf((rows, p))
    nisa.tensor_reduce(dst=of_partition, op=nl.maximum, data=scores.permute((0, 2, 3, 1)), axis=3)
    nisa.tensor_reduce(dst=most, op=nl.maximum, data=turned(of_partition.reshape((p, rows))), axis=1)
    nisa.tensor_tensor(most, most, top, nl.maximum)
    nisa.tensor_scalar(most, most, nl.multiply, -1.0)
    nisa.tensor_copy(dst=wide, src=most.broadcast(1, p))
    less = turned(wide).reshape((p, 1, own, task.n)).broadcast(1, columns)
    nisa.tensor_tensor(scores, scores, less, nl.add)
    weights = sbuf(scores.shape, task.weights)
    nisa.activation(weights, nl.exp, scores)
    nisa.tensor_reduce(dst=of_partition, op=nl.add, data=weights.permute((0, 2, 3, 1)), axis=3)
    nisa.tensor_reduce(dst=added, op=nl.add, data=turned(of_partition.reshape((p, rows))), axis=1)
    nisa.activation(top, nl.exp, top, bias=most)
    nisa.scalar_tensor_tensor(total, total, nl.multiply, top, nl.add, added)
    weights = weights.reshape((p, columns, rows))
    sums = psum((rows, task.v.shape[-1]))
    for first, part in keys.parts(task.v[b // (task.q.shape[0] // task.v.shape[0]), g], task.weights):
        for i in nl.affine_range(part.shape[1]):
            stationary = weights[0 : part.shape[0], first + i]
            nisa.nc_matmul(dst=sums, stationary=stationary, moving=part[:, i], accumulate=first + i > 0)
    task.store(y, sums, total, b, g, 0)


def _running(task, y, b, g, first_head, heads):
    """Computes several tiles of queries. Each tile keeps its sums, maximum and total from one block of keys to the next."""
    n = task.n
    start, size = first_head * n, min(heads * n, PARTITIONS)
    tiles = -(-heads * n // PARTITIONS) if n < PARTITIONS else heads * -(-n // PARTITIONS)
    queries = task.queries(b, g, start, heads * n)
    sums, top, total = sbuf((size, tiles, task.v.shape[3])), sbuf((size, tiles)), sbuf((size, tiles))
    nisa.memset(sums, 0.0)
    for at, p, tile in row_tiles(heads, n):
        task.begin(top[0:p, tile : tile + 1], total[0:p, tile : tile + 1], g, start + at)
    for first, width in blocks(task.n_kv, KEYS):
        keys, values = task.keys(b, g, first, width), task.values(b, g, first, width)
        for at, p, tile in row_tiles(heads, n):
            count = min(width, task.seen(at, p) - first)
            if count > 0:
                state = (sums[0:p, tile], top[0:p, tile : tile + 1], total[0:p, tile : tile + 1])
                scores = sbuf((p, count))
                task.scores(scores, queries[:, :, at : at + p], keys[:, :, 0:count], b, g, start + at, first)
                _added(task, state, scores, values)
    for at, p, tile in row_tiles(heads, n):
        task.store(y, sums[0:p, tile], total[0:p, tile : tile + 1], b, g, start + at)


def _added(task, state, scores, values):
    """Adds a block of keys to the state of a tile of queries: (sums [p, DV], maximum [p, 1], total [p, 1])."""
    sums, top, total = state
    p, width = scores.shape
    most, added, kept = (sbuf((p, 1)) for _ in range(3))
    weights = sbuf((p, width), turned_dtypes(task.weights)[0])
    nisa.tensor_reduce(dst=most, op=nl.maximum, data=scores, axis=1)
    nisa.tensor_tensor(most, most, top, nl.maximum)
    nisa.tensor_scalar(most, most, nl.multiply, -1.0)
    nisa.activation_reduce(weights, nl.exp, scores, nl.add, added, bias=most)
    nisa.activation(kept, nl.exp, top, bias=most)
    nisa.tensor_scalar(top, most, nl.multiply, -1.0)
    nisa.scalar_tensor_tensor(total, total, nl.multiply, kept, nl.add, added)
    block = psum((p, sums.shape[1]))
    task.weighted(block, weights, values, False)
    nisa.scalar_tensor_tensor(sums, sums, nl.multiply, kept, nl.add, block)


@nki.jit
def _attention(q, k, v, mask, sinks, slopes, settings):
    """Computes attention; see `_Task` for the arguments. Returns [B, n, H, DV] f32."""
    task = _Task(q, k, v, mask, sinks, slopes, settings)
    batches, groups, rows, _ = q.shape
    y = hbm((batches, task.n, groups * rows // task.n, v.shape[-1]), nl.float32)
    for b in range(batches):
        for g in nl.affine_range(groups):
            if _few(rows, task.n_kv):
                _whole(task, y, b, g)
            else:
                for head, count in blocks(rows // task.n, max(1, QUERIES // task.n)):
                    _running(task, y, b, g, head, count)
    return y


@emitter(
    "flash_attn_ext",
    types="f32, f32 f16 bf16, f32 f16 bf16, f16, f32",
    language="nki",
    where=(
        "k_ne2 == v_ne2",
        "v_ne0 <= 512",
        "q_ne3 * k_ne2 * (q_ne1 * q_ne2 // k_ne2 // 128 + 1) * (k_ne1 // 2048 + 1) <= 1024",
    ),
)
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
    out,
):
    """Computes softmax(scale * q k^T + slope * mask) v for every head; see the JAX emitter (`attention.flash_attn_ext`).

    q: [B, H, n, DK] f32; k: [K3, K2, n_kv, DK], v: [V3, V2, n_kv, DV], both f32, f16 or bf16, K2 dividing H and V2 equal to it;
    mask: [M3, M2, n or more, n_kv] f16; sinks: [1, 1, 1, H] f32. Returns [B, n, H, DV] f32.
    """
    del n_kv_max
    batches, heads, n, channels = q.shape
    sinks = None if sinks is None else lax.reshape(f32(sinks), (heads, 1))
    slopes = None
    if mask is not None and max_bias > 0:
        slopes = np.reshape(alibi_slopes(heads, max_bias), (heads, 1))
    settings = {
        "n": n,
        "n_kv": k.shape[2],
        "causal": causal,
        "scale": scale,
        "cap": logit_softcap,
        "weights": np.dtype(np.float32) if prec == PREC_F32 else v.dtype,
    }
    q = lax.reshape(lax.convert_element_type(q, k.dtype), (batches, k.shape[1], heads // k.shape[1] * n, channels))
    if _few(q.shape[2], k.shape[2]) and k.shape[2] % PARTITIONS == 0:
        # A tensor with this shape: the interpreter does not roll loops over parts of a view of another tensor.
        k, v = (lax.reshape(x, (*x.shape[:2], PARTITIONS, x.shape[2] // PARTITIONS, x.shape[3])) for x in (k, v))
    return result(inline(_attention, q, k, v, mask, sinks, slopes, settings=settings)[0], out)
