"""Elements of a JAX array by NumPy's rules: `x[…]` and `x[…] = v`.

Constant numbers and slices become static slices. A number that is not constant, or a slice between `i * a + b` and `i * a + c` of a
loop's index `i`, becomes a dynamic slice; arrays of integers become gathers and scatters. A slice is a copy and never writes
through.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy.places import refused


def get(x: Any, index: Any) -> Any:
    """Returns `x[index]`."""
    items = _items(x, index)
    if any(_is_mask(i) for i in items):
        raise refused(
            "an array can't be indexed by bools: how many elements there are is not known while tracing",
            "use np.where(condition, x, y)",
        )
    starts, sizes, rest = _window(x, items, False)
    found = _read(x, starts, sizes).at[rest].get(mode="clip")
    front, now = _moved(index, items)
    return jnp.moveaxis(found, now, front)


def put(x: Any, index: Any, new: Any) -> Any:
    """Returns `x` after `x[index] = new`."""
    items = _items(x, index)
    if any(_is_mask(i) for i in items):
        return _masked(x, items, new)
    is_basic = not any(np.ndim(i) for i in items)
    starts, sizes, rest = _window(x, items, is_basic)
    if not is_basic:
        front, now = _moved(index, items)
        if front != now:
            new = jnp.moveaxis(jnp.broadcast_to(new, jax.eval_shape(lambda a: get(a, index), x).shape), front, now)
        new = _read(x, starts, sizes).at[rest].set(new, mode="clip")
    else:
        shape = np.broadcast_to(np.False_, sizes)[rest].shape
        while new.ndim > len(shape) and new.shape[0] == 1:
            new = lax.squeeze(new, (0,))
        steps = [i.step or 1 if isinstance(i, slice) else 1 for i in rest if i is not None]
        lengths = [-(-n // abs(step)) for n, step in zip(sizes, steps, strict=True)]
        new = lax.rev(jnp.broadcast_to(new, shape).reshape(lengths), [k for k, step in enumerate(steps) if step < 0])
        if 0 in lengths:
            return x
        if lengths != sizes:
            gaps = [(0, 0, abs(step) - 1) for step in steps]
            hit = lax.pad(jnp.full(lengths, True), np.bool_(False), gaps)
            new = lax.select(hit, lax.pad(new, new.dtype.type(0), gaps), _read(x, starts, sizes))
    return new if new.shape == x.shape else lax.dynamic_update_slice(x, new, starts)


def _read(x: Any, starts: list[Any], sizes: list[int]) -> Any:
    return x if tuple(sizes) == x.shape else lax.dynamic_slice(x, starts, sizes)


def _items(x: Any, index: Any) -> list[Any]:
    """Returns an index as a list with an entry per dimension, and None for each new one."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [
        int(i) if isinstance(i, np.ndarray | np.integer) and i.ndim == 0 and i.dtype.kind in "iu" else i for i in items
    ]
    if any(isinstance(i, bool | np.bool_) for i in items):
        raise refused("Boolean scalar indexing is not supported", "use np.where(condition, x, y)")
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    used = sum(np.ndim(i) if _is_mask(i) else 1 for i in items if i is not None and i is not Ellipsis)
    if used > x.ndim:
        raise IndexError(f"{used} indices for an array of rank {x.ndim}")
    k = dots[0] if dots else len(items)
    return [*items[:k], *[slice(None)] * (x.ndim - used), *items[k + 1 :]]


def _moved(index: Any, items: list[Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns where NumPy and where JAX have the dimensions of index arrays.

    Unlike JAX, NumPy takes a `...` that stands for no dimension as a separation, and moves them to the front.
    """
    numbers = [k for k, i in enumerate(items) if i is not None and not isinstance(i, slice)]
    shapes = [np.shape(items[k]) for k in numbers]
    dots = next((k for k, i in enumerate(index) if i is Ellipsis), 0) if isinstance(index, tuple) else 0
    is_adjacent = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
    if not (any(shapes) and is_adjacent and len(items) < len(index) and numbers[0] < dots <= numbers[-1]):
        return (), ()
    rank = len(np.broadcast_shapes(*shapes))
    return tuple(range(rank)), tuple(range(numbers[0], numbers[0] + rank))


def _is_mask(item: Any) -> bool:
    return getattr(item, "dtype", None) == np.bool_


def _window(x: Any, items: list[Any], are_slices: bool) -> tuple[list[Any], list[int], tuple[Any, ...]]:
    """Returns the part of an array that unknown numbers and slices select, and the index into it.

    Args:
        x: the array.
        items: an index.
        are_slices: whether known numbers and slices select this part, too.

    Returns:
        the first element in each dimension, the numbers of elements, and the index into the part.
    """
    starts: list[Any] = []
    sizes: list[int] = []
    rest: list[Any] = []
    for item in items:
        if item is None:
            rest.append(None)
            continue
        axis, size = len(starts), x.shape[len(starts)]
        start: Any = np.int32(0)
        length, left = size, item
        if isinstance(item, slice):
            if any(hasattr(end, "array") for end in (item.start, item.stop)):
                start, length = _between(item, size)
                left = slice(None)
            elif are_slices and (elements := range(size)[item]):
                start, length = np.int32(min(elements[0], elements[-1])), abs(elements[-1] - elements[0]) + 1
                left = slice(None, None, elements.step)
            elif are_slices:
                length = 0
        elif isinstance(item, int):
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for axis {axis} of size {size}")
            left = item % size
            if are_slices:
                start, length, left = np.int32(left), 1, 0
        elif hasattr(item, "affine"):
            start, length, left = item.array, 1, 0
        elif getattr(item, "dtype", np.dtype(object)).kind not in "iu":
            raise IndexError("an index is an integer, a slice or an array of integers")
        elif isinstance(item, np.ndarray):
            if item.size and (item.min() < -size or item.max() >= size):
                raise IndexError(
                    f"an index from {item.min()} to {item.max()} is out of bounds for axis {axis} of size {size}"
                )
            left = (item % size if size else item).astype(np.int32)
        else:
            left = item.astype(np.int32)
            if not item.ndim:
                start, length, left = jnp.where(left < 0, left + np.int32(size), left), 1, 0
        starts.append(start)
        sizes.append(length)
        rest.append(left)
    return starts, sizes, tuple(rest)


def _between(item: slice, size: int) -> tuple[Any, int]:
    """Returns the start and the length of a slice between two forms of a loop's index."""
    start, stop = (getattr(end, "affine", None) for end in (item.start, item.stop))
    if start is None or stop is None or start[:2] != stop[:2] or item.step not in (None, 1):
        raise refused(
            "the size of a slice is not known while the kernel is traced",
            "both ends are the same multiple of fori_loop's index plus a number: x[i * 128 : i * 128 + 128]",
        )
    length = stop[2] - start[2]
    if not 0 < length <= size:
        raise IndexError(f"a slice of {length} elements of an axis of size {size}")
    return item.start.array, length


def _masked(x: Any, items: list[Any], new: Any) -> Any:
    hit, *others = items
    if not _is_mask(hit) or any(not isinstance(i, slice) or i != slice(None) for i in others) or new.ndim:
        raise refused(
            "elements that bools choose can be assigned one number for all", "use x[...] = np.where(condition, new, x)"
        )
    if hit.shape != x.shape[: hit.ndim]:
        raise IndexError(f"bools of shape {hit.shape} for an array of shape {x.shape}")
    return jnp.where(hit.reshape(hit.shape + (1,) * (x.ndim - hit.ndim)), new, x)
