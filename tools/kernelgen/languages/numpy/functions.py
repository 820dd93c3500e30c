"""NumPy's functions that jax.numpy computes otherwise than NumPy, or with operations that neuronx-cc has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy import indexing
from kernelgen.languages.numpy.tensor import FUNCTIONS, IN_PLACE, F, TracedArray, tensor


def _replaces(function: Any) -> Callable[[F], F]:
    def mark(compute: F) -> F:
        FUNCTIONS[function] = compute
        return compute

    return mark


FUNCTIONS[np.copy] = lambda a, **_: jnp.asarray(a)
FUNCTIONS[np.linalg.norm] = jnp.linalg.norm
FUNCTIONS[np.clip] = lambda a, a_min=None, a_max=None, **ends: jnp.clip(a, **{"min": a_min, "max": a_max, **ends})
FUNCTIONS[np.tan] = lambda x: jnp.sin(x) / jnp.cos(x)


def _is_float(*values: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(*values), np.floating)


def _of_integers(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a division that gives 0 for an integer divided by 0, as in NumPy; XLA sets all bits."""

    def compute(x: Any, y: Any) -> Any:
        found = function(x, y)
        return found if _is_float(x, y) else jnp.where(jnp.equal(y, 0), found.dtype.type(0), found)

    return compute


FUNCTIONS[np.floor_divide] = _of_integers(jnp.floor_divide)
FUNCTIONS[np.remainder] = _of_integers(jnp.remainder)
FUNCTIONS[np.divmod] = lambda x, y: (FUNCTIONS[np.floor_divide](x, y), FUNCTIONS[np.remainder](x, y))
FUNCTIONS[np.reciprocal] = lambda x: jnp.reciprocal(x) if _is_float(x) else lax.div(jnp.ones_like(x), x)


@_replaces(np.power)
def power(x: Any, y: Any) -> Any:
    """`x ** y`; a constant whole exponent becomes products, also if it is a float."""
    if isinstance(y, float | np.floating | np.integer) and float(y).is_integer() and abs(float(y)) <= 64:
        x, y = jnp.asarray(x, jnp.result_type(x, y)), int(y)
    return jnp.power(x, y)


def _product(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns a product whose sums of 16-bit floats are float32, as on the tensor engine, and rounded once."""

    def compute(x: Any, y: Any) -> Any:
        dtype = jnp.result_type(x, y)
        return function(x, y, preferred_element_type=np.float32 if _is_float(dtype) else None).astype(dtype)

    return compute


FUNCTIONS[np.matmul] = _product(jnp.matmul)
FUNCTIONS[np.dot] = _product(jnp.dot)


def _place(best: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that finds the first index of the best element, or of the first NaN.

    It uses two plain reductions: neuronx-cc's documentation excludes reductions of pairs.
    """

    def compute(a: Any, axis: Any = None, *, keepdims: Any = False) -> Any:
        x, over = (a.reshape(-1), 0) if axis is None else (a, axis)
        hit = x == best(x, axis=over, keepdims=True)
        if _is_float(x):
            hit = hit | (x != x)  # the best of an array with a NaN is NaN, which equals nothing
        n = x.shape[over]
        place = jnp.min(jnp.where(hit, lax.broadcasted_iota(np.int32, x.shape, over % x.ndim), np.int32(n)), over)
        if keepdims is True:
            return place.reshape((1,) * a.ndim) if axis is None else jnp.expand_dims(place, over)
        return place

    return compute


FUNCTIONS[np.argmax] = _place(jnp.max)
FUNCTIONS[np.argmin] = _place(jnp.min)


@_replaces(np.cumsum)
def cumsum(a: Any, axis: Any = None, dtype: Any = None) -> Any:
    """Prefix sums, by steps of doubling distance; JAX's are sums of windows."""
    x = a.reshape(-1) if axis is None else a
    axis = (0 if axis is None else axis) % x.ndim
    x = x.astype(jnp.sum(x[:0], dtype=dtype).dtype)
    step = 1
    while step < x.shape[axis]:
        before = lax.slice_in_dim(x, 0, -step, axis=axis)
        x = x + lax.pad(before, x.dtype.type(0), [(step if k == axis else 0, 0, 0) for k in range(x.ndim)])
        step *= 2
    return x


def _moment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `var` or `std`, whose steps are float16 for float16: what exceeds its range on the way is infinite, as in NumPy."""

    def compute(a: Any, axis: Any = None, dtype: Any = None, *, ddof: Any = 0, keepdims: Any = False) -> Any:
        if a.dtype != np.float16 or dtype is not None:
            return function(a, axis, dtype, ddof=ddof, keepdims=keepdims)
        total = jnp.sum(a, axis, keepdims=True)
        count = a.size // total.size
        found = jnp.sum(jnp.square(a - total / count), axis, keepdims=keepdims) / (count - ddof)
        return found if function is jnp.var else jnp.sqrt(found)

    return compute


FUNCTIONS[np.var] = _moment(jnp.var)
FUNCTIONS[np.std] = _moment(jnp.std)


@_replaces(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> Any:
    if np.ndim(repeats) == 0:
        return jnp.repeat(a, repeats, axis)
    x = a.reshape(-1) if axis is None else a
    axis = 0 if axis is None else axis
    return take(x, np.repeat(np.arange(x.shape[axis]), repeats), axis)


@_replaces(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> Any:
    """Shifts along the same axis are added up first: JAX moves all elements for each."""
    if axis is None:
        return jnp.roll(a, np.sum(shift) if np.ndim(shift) else shift)
    shifts: dict[int, int] = {}
    for by, k in np.broadcast(shift, axis):
        shifts[k] = shifts.get(k, 0) + by
    return jnp.roll(a, tuple(shifts.values()), tuple(shifts))


@_replaces(np.take)
def take(a: Any, indices: Any, axis: Any = None) -> Any:
    x = a.reshape(-1) if axis is None else jnp.moveaxis(a, axis, 0)
    chosen = np.asarray(indices) if isinstance(indices, list | tuple) else indices
    found = indexing.get(x, chosen)
    rank = np.ndim(chosen)
    return found if axis is None else jnp.moveaxis(found, range(rank), range(axis % a.ndim, axis % a.ndim + rank))


@_replaces(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Any:
    return jnp.take_along_axis(arr, indices, axis, mode="clip")


def _put_along_axis(arr: TracedArray, indices: Any, values: Any, axis: Any) -> None:
    places, new = tensor(indices).array, tensor(values, arr.dtype).array
    arr.replace(jnp.put_along_axis(arr.array, places, new, axis, inplace=False, mode="clip"))


def _copyto(dst: TracedArray, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    value = tensor(src, dst.dtype)
    dst[...] = value if where is True else np.where(where, value, dst)


IN_PLACE[np.put_along_axis] = _put_along_axis
IN_PLACE[np.copyto] = _copyto
