"""Plans how to read and write a strided view of memory with slices, reshapes and transposes. Pure arithmetic, without arrays."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

Dims = tuple[tuple[int, int], ...]
"""A stride and a size per dimension, in elements."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The elements that a view takes from one axis of the memory.

    Attributes:
        size: the length of the axis.
        start: the position of the first taken element.
        parts: (step, count) of the view's dimensions on this axis, the largest step first; a step is at least the span
            of the later parts.
    """

    size: int
    start: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AccessPlan:
    """A view as slices of axes.

    Attributes:
        shape: the shape of the memory before slicing.
        axes: the elements taken from each axis.
        order: for every dimension of the view, the number of its parts and their places in the list of all parts; a broadcast
            dimension has none.
        reversed: the dimensions with a negative stride.
    """

    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    order: tuple[tuple[int, ...], ...]
    reversed: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(count for axis in self.axes for _, count in axis.parts)


@functools.lru_cache(1 << 12)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the row-major strides of a shape, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@functools.lru_cache(1 << 14)
def plan(shape: tuple[int, ...], offset: int, dims: Dims) -> AccessPlan | None:
    """Returns the slices that take the elements `offset + Σ i·stride` of row-major memory, or None if no slices do."""
    backwards = tuple(i for i, (stride, size) in enumerate(dims) if stride < 0 and size > 1)
    offset += sum(dims[i][0] * (dims[i][1] - 1) for i in backwards)
    forward = tuple((abs(stride) if size > 1 else 0, size) for stride, size in dims)
    if 0 in shape:
        return None
    flat = (math.prod(shape),)
    for axes in dict.fromkeys((tuple(n for n in shape if n > 1), flat)):
        found = _planned(axes or (1,), offset, forward)
        if found is not None:
            ordered, order = found
            return AccessPlan(axes or (1,), ordered, order, backwards)
    return None


def _planned(
    shape: tuple[int, ...], offset: int, dims: Dims
) -> tuple[tuple[Axis, ...], tuple[tuple[int, ...], ...]] | None:
    strides = strides_of(shape)
    starts = []
    for stride in strides:
        starts.append(offset // stride)
        offset %= stride
    if starts[0] >= shape[0] or starts[0] < 0:
        return None
    parts: list[list[tuple[int, int, int, int]]] = [[] for _ in shape]  # step, count, dimension, place in the dimension
    for number, (stride, size) in enumerate(dims):
        if not stride:
            continue
        place, rest = 0, size
        while rest > 1:
            # The outermost axis that contains the stride: elements past its end continue in the axis before it.
            axis = next((j for j, s in enumerate(strides) if s <= stride and stride % s == 0), None)
            if axis is None:
                return None
            step = stride // strides[axis]
            fits = (shape[axis] - 1 - starts[axis]) // step + 1
            if rest <= fits or axis == 0:
                parts[axis].append((step, rest, number, -place))
                break
            inner = shape[axis] // step
            if inner < 2 or shape[axis] % step or starts[axis] >= step or rest % inner:
                return None
            parts[axis].append((step, inner, number, -place))
            stride, rest, place = stride * inner, rest // inner, place + 1
    axes, where = [], {}
    for axis, (size, start, its) in enumerate(zip(shape, starts, parts, strict=True)):
        its.sort(key=lambda part: -part[0])
        span = 1
        for step, count, _, _ in reversed(its):
            if step < span:
                return None
            span = step * (count - 1) + span
        if start + span > size:
            return None
        axes.append(Axis(size, start, tuple((step, count) for step, count, _, _ in its)))
        for step, _, number, place in its:
            where[number, place] = (axis, step)
    places = {key: i for i, key in enumerate((axis, step) for axis, its in enumerate(parts) for step, _, _, _ in its)}
    order = tuple(
        tuple(places[where[key]] for key in sorted(k for k in where if k[0] == number)) for number in range(len(dims))
    )
    return tuple(axes), order
