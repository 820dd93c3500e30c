"""Reads and writes views of memory with JAX: static slices, reshapes and transposes where possible, else gathers and scatters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter.access import AccessPlan, Axis, Dims, plan
from nki_interpreter.lazy import jax, jnp, lax

Starts = list[Any]
"""The starts of a plan's slices: numbers, or values known at run time."""


def read(memory: Any, dims: Dims, offset: int, starts: Starts | None = None) -> Any:
    """Returns the elements `offset + Σ i·stride` of memory.

    Args:
        memory: an array of any shape, row-major.
        dims: stride and size per dimension of the result.
        offset: the number of the first element.
        starts: the starts of the plan's slices, if a loop changes the offset; they replace those of the plan.
    """
    shape = tuple(size for _, size in dims)
    if 0 in shape:
        return jnp.zeros(shape, memory.dtype)
    found = plan(memory.shape, offset, dims)
    if found is None:
        return _gathered(memory, dims, offset)
    taken = _reshape(memory, found.shape)
    for number, axis in enumerate(found.axes):
        taken = _sliced(taken, number, axis, None if starts is None else starts[number])
    taken = _reshape(taken, found.counts)
    return _to_view(taken, found, shape)


def write(memory: Any, dims: Dims, offset: int, values: Any, starts: Starts | None = None) -> Any:
    """Returns memory with the elements `offset + Σ i·stride` replaced; an element written twice keeps one of the values."""
    shape = tuple(size for _, size in dims)
    if 0 in shape:
        return memory
    values = lax.convert_element_type(values, memory.dtype)
    found = plan(memory.shape, offset, dims)
    if found is None or any(stride == 0 and size > 1 for stride, size in dims):
        flat = _indices(dims, offset)
        elements = _reshape(memory, (-1,)).at[flat.reshape(-1)]
        return elements.set(values.reshape(-1), mode="promise_in_bounds", wrap_negative_indices=False).reshape(
            memory.shape
        )
    taken = _from_view(values, found)
    if taken.size == memory.size:
        return _reshape(taken, memory.shape)
    whole = _reshape(memory, found.shape)
    return _reshape(_updated(whole, list(found.axes), taken, starts), memory.shape)


def _to_view(taken: Any, found: AccessPlan, shape: tuple[int, ...]) -> Any:
    order = [place for places in found.order for place in places]
    if order != sorted(order):
        taken = lax.transpose(taken, order)
    if any(not places and n > 1 for places, n in zip(found.order, shape, strict=True)):
        inner = tuple(n if places else 1 for places, n in zip(found.order, shape, strict=True))
        taken = lax.broadcast_in_dim(_reshape(taken, inner), shape, tuple(range(len(shape))))
    taken = _reshape(taken, shape)
    return lax.rev(taken, found.reversed) if found.reversed else taken


def _from_view(values: Any, found: AccessPlan) -> Any:
    if found.reversed:
        values = lax.rev(values, found.reversed)
    order = [place for places in found.order for place in places]
    counts = found.counts
    values = _reshape(values, tuple(counts[place] for place in order))
    if order != sorted(order):
        values = lax.transpose(values, np.argsort(order))
    return values


def _sliced(taken: Any, number: int, axis: Axis, start: Any) -> Any:
    """Slices an axis; the parts of the axis remain one axis."""
    begin = axis.start if start is None else start
    if not axis.parts:
        return _slice(taken, number, begin, 1, 1)
    (step, count), *inner = axis.parts
    if not inner:
        return _slice(taken, number, begin, (count - 1) * step + 1, step)
    if isinstance(begin, int) and begin + count * step > axis.size:
        taken = _padded(taken, number, begin + count * step - axis.size)
    taken = _slice(taken, number, begin, count * step, 1)
    shape = taken.shape
    taken = _reshape(taken, (*shape[:number], count, step, *shape[number + 1 :]))
    taken = _sliced(taken, number + 1, Axis(step, 0, tuple(inner)), None)
    return _reshape(taken, (*shape[:number], -1, *shape[number + 1 :]))


def _slice(taken: Any, number: int, begin: Any, length: int, step: int) -> Any:
    if isinstance(begin, int):
        if begin == 0 and length == taken.shape[number] and step == 1:
            return taken
        return lax.slice_in_dim(taken, begin, begin + length, step, number)
    taken = lax.dynamic_slice_in_dim(taken, begin, length, number)
    return taken if step == 1 else lax.slice_in_dim(taken, 0, length, step, number)


def _padded(taken: Any, number: int, more: int) -> Any:
    config = [(0, 0, 0)] * taken.ndim
    config[number] = (0, more, 0)
    return lax.pad(taken, jnp.zeros((), taken.dtype), config)


def _updated(whole: Any, axes: list[Axis], taken: Any, starts: Starts | None) -> Any:
    """Returns an array with the elements replaced that the axes select."""
    begins = [axis.start if starts is None else starts[i] for i, axis in enumerate(axes)]
    simple = all(not a.parts or (len(a.parts) == 1 and (a.parts[0][0] == 1 or a.parts[0][1] == 1)) for a in axes)
    lengths = tuple(math.prod(count for _, count in axis.parts) for axis in axes)
    if simple:
        taken = _reshape(taken, lengths)
        return taken if taken.shape == whole.shape else lax.dynamic_update_slice(whole, taken, begins)
    # Each stepped axis becomes two axes; the second is written from its beginning. The padding is cut off afterwards.
    spans = [a.parts[0][0] * a.parts[0][1] if a.parts else 1 for a in axes]
    padded = whole
    for number, (axis, span) in enumerate(zip(axes, spans, strict=True)):
        if isinstance(begins[number], int) and begins[number] + span > axis.size:
            padded = _padded(padded, number, begins[number] + span - axis.size)
    part = lax.dynamic_slice(padded, begins, spans)
    split: list[Axis] = []
    for axis in axes:
        (step, count), *inner = axis.parts or ((1, 1),)
        split.append(Axis(count, 0, ((1, count),)))
        if step > 1:
            split.append(Axis(step, 0, tuple(inner)))
    part = _updated(_reshape(part, tuple(a.size for a in split)), split, taken, None)
    padded = lax.dynamic_update_slice(padded, _reshape(part, tuple(spans)), begins)
    return lax.slice(padded, (0,) * whole.ndim, whole.shape) if padded.shape != whole.shape else padded


def _reshape(array: Any, shape: tuple[int, ...]) -> Any:
    if -1 in shape:
        return array.reshape(shape)
    return array if array.shape == tuple(shape) else lax.reshape(array, shape)


def _gathered(memory: Any, dims: Dims, offset: int) -> Any:
    """Reads overlapping windows: adjacent slices along the shortest dimension, if they are few."""
    overlapping = sorted((size, i) for i, (stride, size) in enumerate(dims) if size > 1 and stride)
    if len(overlapping) > 1 and overlapping[0][0] <= 16:
        number = overlapping[0][1]
        stride, size = dims[number]
        rest = (*dims[:number], (0, 1), *dims[number + 1 :])
        if all(plan(memory.shape, offset + i * stride, rest) is not None for i in range(size)):
            return lax.concatenate([read(memory, rest, offset + i * stride) for i in range(size)], number)
    elements = memory.reshape(-1).at[_indices(dims, offset)]
    return elements.get(mode="promise_in_bounds", wrap_negative_indices=False)


def _indices(dims: Dims, offset: Any) -> Any:
    """Returns `offset + Σ i·stride` as an array, computed from counters rather than stored."""
    shape = tuple(size for _, size in dims)
    total = jnp.full(shape, 0, np.int32) + offset
    for number, (stride, size) in enumerate(dims):
        if stride and size > 1:
            total = total + lax.broadcasted_iota(np.int32, shape, number) * stride
    return total


def flat_indices(dims: Dims, offset: Any) -> Any:
    """Returns the indices of `_indices`, for callers that add to them."""
    return _indices(dims, offset)


def bitcast(array: Any, dtype: np.dtype[Any]) -> Any:
    """Returns memory reinterpreted as another dtype; the last axis grows or shrinks."""
    if array.dtype == dtype:
        return array
    old, new = array.dtype.itemsize, dtype.itemsize
    if old == new:
        return lax.bitcast_convert_type(array, dtype)
    if old > new:
        cast = lax.bitcast_convert_type(array, dtype)
        return cast.reshape((*array.shape[:-1], array.shape[-1] * (old // new)))
    grouped = array.reshape((*array.shape[:-1], array.shape[-1] // (new // old), new // old))
    return lax.bitcast_convert_type(grouped, dtype)


__all__ = ["bitcast", "flat_indices", "jax", "read", "write"]
