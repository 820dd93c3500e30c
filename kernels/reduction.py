"""Sums, means, maxima and counts, of rows and of whole tensors."""

import math

import numpy as np
from jax import lax

from kernelgen.emitters import emitter

from .common import f32, prefix_sum, result


@emitter("sum", types="float")
def sum_all(x, *, out):
    """The sum of all elements: [1, 1, 1, 1]."""
    # Adds row by row, like ggml, so that the partial sums of a long tensor stay small.
    return result(lax.reduce_sum(lax.reduce_sum(f32(x), (3,)), (0, 1, 2)), out)


@emitter("mean", types="float")
def mean(x, *, out):
    """The mean of each row: [ne3, ne2, ne1, 1] f32."""
    return result(lax.reduce_sum(f32(x), (3,)) / np.float32(x.shape[3]), out)


@emitter("cumsum", types="f32")
def cumsum(x):
    """The sum of each element of a row and the elements before it, in the shape of `x`."""
    return prefix_sum(x)


@emitter("argmax", types="f32")
def argmax(x, *, out):
    """The index of the largest element of each row of `x`, [1, 1, n, ne0], the last if there are several: [1, 1, 1, n] i32."""
    # Two plain reductions, because neuronx-cc's documentation excludes reductions of pairs.
    top = lax.broadcast_in_dim(lax.reduce_max(x, (3,)), x.shape, (0, 1, 2))
    place = lax.broadcasted_iota(np.int32, x.shape, 3)
    return result(lax.reduce_max(lax.select(x == top, place, lax.full_like(place, 0)), (3,)), out)


@emitter("count_equal", types="i32, i32")
def count_equal(x, y):
    """The number of equal elements of `x` and `y`: one i64, as a pair of i32."""
    if math.prod(x.shape) >= 2**31:
        raise ValueError("a tensor of 2^31 elements or more can't be counted")
    low = lax.reduce_sum(lax.convert_element_type(x == y, np.int32), (0, 1, 2, 3))
    return lax.pad(lax.reshape(low, (1, 1, 1, 1, 1)), np.int32(0), [(0, 0, 0)] * 4 + [(0, 1, 0)])


@emitter("repeat_back", types="float")
def repeat_back(x, *, out):
    """The gradient of `repeat`: sums of the elements of `x` that are repeats of one element, in the result's shape."""
    split = [n for whole, part in zip(x.shape, out.shape, strict=True) for n in (whole // part, part)]
    return result(lax.reduce_sum(lax.reshape(f32(x), split), (0, 2, 4, 6)), out)
