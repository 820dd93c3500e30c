"""NumPy's reductions along axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy.dtypes import BOOL, FLOAT32, INT32, floating, is_float, narrowed, summing
from kernelgen.languages.numpy.elementwise import truth
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import FUNCTIONS, TracedArray, implements, tensor


def axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Returns the axes as numbers from 0; None means all of them.

    Raises:
        ValueError: the array lacks the axis, or it is named twice.
    """
    if axis is None:
        return tuple(range(rank))
    found = []
    for a in axis if isinstance(axis, tuple | list) else (axis,):
        n = int(a)
        if not -rank <= n < rank:
            raise ValueError(f"axis {n} is out of bounds for an array of rank {rank}")
        found.append(n % rank)
    if len({*found}) != len(found):
        raise ValueError(f"an axis is named twice in {axis}")
    return tuple(sorted(found))


def made(x: Any, array: Any) -> TracedArray:
    """Returns a result with its loops: one over each dimension of the reduced array."""
    result = TracedArray(array)
    result.iterations = ("reduction", tuple(x.shape))
    return result


def _kept(x: Any, reduced: Any, over: tuple[int, ...], keepdims: Any) -> Any:
    return lax.expand_dims(reduced, over) if keepdims is True else reduced


def _reduction(function: Callable[..., Any], dtype_of: Callable[[Any], Any]) -> Callable[..., TracedArray]:
    def compute(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = None,
        where: Any = True,
    ) -> TracedArray:
        if where is not True and where is not np._NoValue:
            raise refused("where= of a function is not supported", "choose with np.where(condition, x, y)")
        x = tensor(a).array
        over = axes(axis, x.ndim)
        x = x.astype(dtype_of(x.dtype) if dtype is None else narrowed(dtype))
        reduced = _kept(x, function(x, axis=over), over, keepdims)
        return made(x, reduced if initial is None or initial is np._NoValue else _with(function, reduced, initial))

    return compute


def _with(function: Callable[..., Any], reduced: Any, initial: Any) -> Any:
    start = jnp.full((1, *reduced.shape), initial, reduced.dtype)
    return function(lax.concatenate([start, reduced[None]], 0), axis=(0,))


def _of_ordered(function: Callable[..., Any]) -> Callable[..., TracedArray]:
    """Returns a reduction whose third argument is `out`, not `dtype`."""
    reduce = _reduction(function, lambda dtype: dtype)

    def compute(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = None, where: Any = True
    ) -> TracedArray:
        return reduce(a, axis, None, None, keepdims, initial, where)

    return compute


FUNCTIONS[np.sum] = _reduction(jnp.sum, summing)
FUNCTIONS[np.prod] = _reduction(jnp.prod, summing)
FUNCTIONS[np.max] = FUNCTIONS[np.amax] = _of_ordered(jnp.max)
FUNCTIONS[np.min] = FUNCTIONS[np.amin] = _of_ordered(jnp.min)


@implements(np.any)
def any_(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, **_: Any) -> TracedArray:
    x = truth(a)
    over = axes(axis, x.ndim)
    return made(x, _kept(x, lax.reduce_or(x, over), over, keepdims))


@implements(np.all)
def all_(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, **_: Any) -> TracedArray:
    x = truth(a)
    over = axes(axis, x.ndim)
    return made(x, _kept(x, lax.reduce_and(x, over), over, keepdims))


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: Any = False) -> TracedArray:
    x = truth(a).astype(np.int32)
    over = axes(axis, x.ndim)
    return made(x, _kept(x, jnp.sum(x, axis=over), over, keepdims))


def _moments(a: Any, axis: Any, dtype: Any, ddof: Any) -> tuple[Any, Any, tuple[int, ...], Any]:
    """Returns the array in float32, its mean with the axes kept, the axes, and the result's dtype."""
    x = tensor(a).array
    over = axes(axis, x.ndim)
    wanted = floating(x.dtype) if dtype is None else narrowed(dtype)
    x = x.astype(FLOAT32)
    return x, jnp.mean(x, axis=over, keepdims=True), over, wanted


@implements(np.mean)
def mean(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, **_: Any) -> TracedArray:
    x, average, over, wanted = _moments(a, axis, dtype, 0)
    return made(x, (average if keepdims is True else lax.squeeze(average, over)).astype(wanted))


@implements(np.var)
def var(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = False, **_: Any
) -> TracedArray:
    x, average, over, wanted = _moments(a, axis, dtype, ddof)
    count = np.prod([x.shape[k] for k in over])
    # For float16 NumPy's steps are float16: an intermediate value beyond its range is infinite, even if the variance is not.
    step = _in_range if dtype is None and tensor(a).dtype == np.float16 else lambda value: value
    if step is _in_range:
        average = step(step(jnp.sum(x, axis=over, keepdims=True)) / np.float32(count))
    squares = step(jnp.square(step(x - average)))
    found = step(jnp.sum(squares, axis=over)) / np.float32(count - ddof)
    return made(x, _kept(x, found, over, keepdims).astype(wanted))


def _in_range(value: Any) -> Any:
    """Returns float32 values, with infinity in place of values that round to it in float16."""
    return jnp.where(lax.abs(value) < np.float32(65_520), value, value * np.float32(np.inf))


@implements(np.std)
def std(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: Any = False, **_: Any
) -> TracedArray:
    x = tensor(a)
    found = var(a, axis, None if dtype is None and x.dtype == np.float16 else FLOAT32, None, ddof, keepdims)
    return made(x, lax.sqrt(found.array).astype(floating(x.dtype) if dtype is None else narrowed(dtype)))


def _place(best: Callable[..., Any]) -> Callable[..., TracedArray]:
    """Returns a function that finds the first index of the best element, or of the first NaN.

    It uses two plain reductions: neuronx-cc's documentation excludes reductions of pairs.
    """

    def compute(a: Any, axis: Any = None, out: Any = None, *, keepdims: Any = False) -> TracedArray:
        x = tensor(a).array
        rank = x.ndim
        if axis is None:
            x = x.reshape(-1)
        (over,) = axes(0 if axis is None else axis, x.ndim)
        if x.dtype == BOOL:
            x = x.astype(np.int32)
        hit = x == best(x, axis=over, keepdims=True)
        if is_float(x.dtype):
            # The best of an array with a NaN is NaN, which equals nothing.
            hit = hit | (x != x)
        place = lax.broadcasted_iota(np.int32, x.shape, over)
        found = jnp.min(jnp.where(hit, place, np.int32(x.shape[over])), axis=over)
        if keepdims is True:
            found = found.reshape((1,) * rank) if axis is None else lax.expand_dims(found, (over,))
        return made(x, found)

    return compute


FUNCTIONS[np.argmax] = _place(jnp.max)
FUNCTIONS[np.argmin] = _place(jnp.min)


@implements(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> TracedArray:
    x = tensor(a).array
    x = (x.reshape(-1) if axis is None else x).astype(summing(x.dtype) if dtype is None else narrowed(dtype))
    (over,) = axes(0 if axis is None else axis, x.ndim)
    return made(x, prefix_sum(x, over))


def prefix_sum(x: Any, axis: int) -> Any:
    """Returns the inclusive prefix sums along an axis, by steps of doubling distance."""
    n, step = x.shape[axis], 1
    while step < n:
        before = lax.slice_in_dim(x, 0, n - step, axis=axis)
        pad = [(step if k == axis else 0, 0, 0) for k in range(x.ndim)]
        x = x + lax.pad(before, x.dtype.type(0), pad)
        step *= 2
    return x


__all__ = ["INT32", "axes", "prefix_sum"]
