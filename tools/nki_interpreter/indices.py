"""Index expressions of the older generation (`nl.arange`, `nl.mgrid`, masks), and `nl.ds` of both generations."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class IndexArray(np.ndarray[Any, Any]):
    """An array of indices or, after a comparison, a mask. It is truthy, so that `and` between masks returns the second one.

    Attributes:
        grid: the shape of the `nl.mgrid` that the array comes from. To stay small, the array has size 1 along axes
            where it is constant.
    """

    grid: tuple[int, ...] | None

    def __array_finalize__(self, obj: Any) -> None:
        grid = getattr(obj, "grid", None)
        self.grid = grid if grid is not None and len(grid) == self.ndim else None

    def full(self) -> Array:
        """Returns the array with the shape of its grid."""
        return np.asarray(self) if self.grid is None else np.broadcast_to(np.asarray(self), self.grid)

    def __bool__(self) -> bool:
        return bool(self.reshape(-1)[0]) if self.size == 1 else True


def index_array(values: Any) -> IndexArray:
    return np.asarray(values).view(IndexArray)


def arange(*args: int) -> IndexArray:
    """Returns the indices from `start` (0) up to, but without, `stop`, with a step (1), like `range`."""
    return index_array(np.arange(*args, dtype=np.int64))


class Grid(tuple[IndexArray, ...]):
    """Index arrays of several dimensions: `p` for the partitions, then `x`, `y`, `z` and `w`."""

    @property
    def p(self) -> IndexArray:
        return self[0]

    @property
    def x(self) -> IndexArray:
        return self[1]

    @property
    def y(self) -> IndexArray:
        return self[2]

    @property
    def z(self) -> IndexArray:
        return self[3]

    @property
    def w(self) -> IndexArray:
        return self[4]


class MGrid:
    """`nl.mgrid[0:128, 0:512]`: one index array per dimension; they broadcast against each other."""

    def __getitem__(self, key: Any) -> Grid:
        axes = [index_array(axis) for axis in np.ogrid[key if isinstance(key, tuple) else (key,)]]
        for axis in axes:
            axis.grid = tuple(a.size for a in axes)
        return Grid(axes)


@dataclass(eq=False, slots=True)  # not frozen: freezing slows the creation of thousands of slices; no code changes them
class DynamicSlice:
    """`nl.ds(start, size)`: `size` elements from `start`, which may be known at run time only."""

    start: Any
    size: int


def whole_array(values: Any) -> Array:
    """Returns the values of an index expression in the shape of its grid."""
    return values.full() if isinstance(values, IndexArray) else np.asarray(values)


_MOST_KNOWN = 512
"""The most elements of an array that the cache of steps stores."""


def affine(array: Array) -> tuple[int, tuple[int, ...]] | None:
    """Returns the start and the step per dimension of an array that is affine in its own indices, else None."""
    if array.size == 0:
        return None
    start = int(array.flat[0])
    if array.size > _MOST_KNOWN or array.dtype != np.int64:
        steps = _steps(array - start)
    else:  # a kernel often repeats a few ranges with other starts
        steps = _known_steps(array.shape, (array - start).tobytes())
    return None if steps is None else (start, steps)


@functools.lru_cache(1 << 12)
def _known_steps(shape: tuple[int, ...], packed: bytes) -> tuple[int, ...] | None:
    return _steps(np.frombuffer(packed, np.int64).reshape(shape))


def _steps(array: Array) -> tuple[int, ...] | None:
    """Returns the steps of an affine array that begins with 0, else None."""
    steps = tuple(
        int(array[tuple(1 if other == axis else 0 for other in range(array.ndim))]) if n > 1 else 0
        for axis, n in enumerate(array.shape)
    )
    expected = np.zeros((), np.int64)
    for axis, (step, n) in enumerate(zip(steps, array.shape, strict=True)):
        expected = expected + (np.arange(n) * step).reshape([-1 if i == axis else 1 for i in range(array.ndim)])
    return steps if np.array_equal(expected, array) else None


def box(mask: Array) -> tuple[tuple[int, int], ...] | None:
    """Returns the bounds of a mask per dimension if it shows a box, else None; an empty box is (0, 0) everywhere."""
    bounds: list[tuple[int, int]] = []
    for axis in range(mask.ndim):
        shown = np.flatnonzero(mask.any(axis=tuple(i for i in range(mask.ndim) if i != axis)))
        if not shown.size:
            return ((0, 0),) * mask.ndim
        bounds.append((int(shown[0]), int(shown[-1]) + 1))
    inside = mask[tuple(slice(a, b) for a, b in bounds)]
    return tuple(bounds) if bool(inside.all()) else None
