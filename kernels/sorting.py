"""Sorting rows, and finding their largest elements.

neuronx-cc refuses HLO's `sort` on trn2 and later, and elsewhere turns it into a top-k of at most 16384 elements. So these kernels
sort rows with a network instead, and find the largest elements by counting. Both are loops of a constant number of steps over whole
rows. They compare only floats; NaN counts as the largest number.
"""

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import prefix_sum, result

_INF = np.float32(np.inf)


def _numbers(x: Array) -> Array:
    return lax.select(x != x, lax.full_like(x, _INF), x)


def _argsort(key: Array) -> Array:
    """Returns the indices that sort each row in ascending order, with equal elements in their order: [rows, n] i32.

    It is a bitonic network in which each step ends with a perfect shuffle (Stone, 1971): each step compares the first half of a row
    with the second, so that no step needs a gather.
    """
    rows, n = key.shape
    levels = max((n - 1).bit_length(), 1)
    size, half = 2**levels, 2 ** (levels - 1)
    key = lax.pad(key, _INF, [(0, 0, 0), (0, size - n, 0)])
    index = lax.broadcasted_iota(np.int32, (rows, size), 1)
    place = lax.broadcasted_iota(np.int32, (1, half), 1)

    def halves(x):
        return lax.slice_in_dim(x, 0, half, axis=1), lax.slice_in_dim(x, half, size, axis=1)

    def shuffled(a, b):
        pair = [lax.broadcast_in_dim(x, (rows, half, 1), (0, 1)) for x in (a, b)]
        return lax.reshape(lax.concatenate(pair, 2), (rows, size))

    def merge(level, state):
        def step(i, state):
            key, index = state
            bit = np.int32(levels - 1) - i  # the bit of the unshuffled places in which two compared elements differ
            shift = lax.broadcast(lax.max(level - bit, np.int32(0)), place.shape)
            down = ((lax.shift_right_logical(place, shift) & 1) == 1) & (level < np.int32(levels - 1))
            (a, b), (ia, ib) = halves(key), halves(index)
            after = (a > b) | ((a == b) & (ia > ib))
            swap = (after != down) & (bit <= level)
            key = shuffled(lax.select(swap, b, a), lax.select(swap, a, b))
            index = shuffled(lax.select(swap, ib, ia), lax.select(swap, ia, ib))
            return key, index

        return lax.fori_loop(0, levels, step, state)

    _, index = lax.fori_loop(0, levels, merge, (key, index))
    return lax.slice_in_dim(index, 0, n, axis=1)


@emitter("argsort", types="f32")
def argsort(x, *, order: int, out):
    """The indices that sort each row in ascending (`order` 0) or descending (1) order, equal elements in theirs: as `x`, i32."""
    key = _numbers(lax.reshape(x, (x.size // x.shape[3], x.shape[3])))
    return result(_argsort(-key if order else key), out)


def _float(ordered: Array) -> Array:
    """Returns the floats at these places in the order of all floats, i32 with the sign bit flipped; -inf below the first."""
    flipped = lax.select(ordered < 0, ordered ^ np.int32(-(2**31)), ~ordered)
    x = lax.bitcast_convert_type(flipped, np.float32)
    return lax.select((x != x) & (ordered >= 0), lax.full_like(x, -_INF), x)


def _count(x: Array) -> Array:
    return lax.reduce_sum(lax.convert_element_type(x, np.int32), (1,))


@emitter("top_k", types="f32")
def top_k(x, *, out):
    """The indices of the `out.ne[0]` largest elements of each row, in ascending order: [ne3, ne2, ne1, k] i32."""
    n, k = x.shape[3], out.ne[0]
    rows = x.size // n
    x = _numbers(lax.reshape(x, (rows, n)))

    def wide(t):
        return lax.broadcast_in_dim(t, x.shape, (0,))

    # Finds the k-th largest element bit by bit from the highest: it is the largest number that k elements reach.
    def refine(i, found):
        candidate = found | lax.shift_left(np.int32(1), np.int32(31) - i)
        reached = _count(x >= wide(_float(candidate)))
        return lax.select(reached >= k, candidate, found)

    least = wide(_float(lax.fori_loop(0, 32, refine, lax.full((rows,), 0, np.int32))))

    # Takes all larger elements, and the first equal ones, up to k.
    above, equal = x > least, x == least
    counts = lax.concatenate([lax.convert_element_type(c, np.int32)[None] for c in (above, equal)], 0)
    counts = prefix_sum(counts)
    room = lax.broadcast_in_dim(np.int32(k) - counts[0, :, n - 1], x.shape, (0,))
    taken = counts[0] + lax.min(counts[1], room)  # the number of taken elements up to and including each

    # Element j of the result is the index of the (j + 1)-th taken element: the number of indices up to which at most j are taken.
    target = lax.broadcasted_iota(np.int32, (rows, k), 1)
    row = lax.broadcasted_iota(np.int32, (rows, k), 0) * np.int32(n)
    taken = lax.reshape(taken, (rows * n,))
    bits = n.bit_length()

    def search(i, before):
        further = before + lax.shift_left(np.int32(1), np.int32(bits - 1) - i)
        last = row + lax.min(further, np.int32(n)) - np.int32(1)
        fewer = taken.at[last].get(mode="promise_in_bounds", wrap_negative_indices=False) <= target
        return lax.select(fewer & (further <= n), further, before)

    return result(lax.fori_loop(0, bits, search, lax.full((rows, k), 0, np.int32)), out)
