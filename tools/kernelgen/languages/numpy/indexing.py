"""Elements of a tensor: `x[…]` and `x[…] = v`.

Constant numbers and slices become static slices. A number that is not constant, or a slice between `i * a + b` and `i * a + c` of a
loop's index `i`, becomes a dynamic slice; arrays of integers become gathers and scatters. A slice is a copy and never writes
through.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy.loops import LoopIndex
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import TracedArray, implements, tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """The selected part of one dimension.

    Attributes:
        start: the first element, a number or a JAX array of rank 0.
        size: number of elements.
        step: the distance between them, at least 1.
        reverse: whether they are in reverse order; `start` is then the last.
        drop: whether the dimension is removed.
    """

    start: Any
    size: int
    step: int = 1
    reverse: bool = False
    drop: bool = False

    @property
    def known(self) -> bool:
        return isinstance(self.start, int)


@implements(operator.getitem)
def get(x: TracedArray, index: Any) -> TracedArray:
    items = _items(x, index)
    if _is_mask(items):
        raise refused(
            "an array can't be indexed by bools: how many elements there are is not known while tracing",
            "use np.where(condition, x, y)",
        )
    if any(_is_array(i) for i in items):
        found = x.array.at[_gathering(x, items)].get(mode="clip")
        axes = _to_front(index, items)
        return TracedArray(jnp.moveaxis(found, axes, range(len(axes))))
    parts, new = _parts(x, items)
    found = _slice(x.array, parts)
    found = lax.squeeze(found, [k for k, p in enumerate(parts) if p.drop])
    return TracedArray(lax.expand_dims(found, new) if new else found)


@implements(operator.setitem)
def put(x: TracedArray, index: Any, value: Any) -> Any:
    """Returns the content of `x` after `x[index] = value`, as a JAX array."""
    items = _items(x, index)
    new = tensor(value, x.dtype).array
    if _is_mask(items):
        return _masked(x, items, new)
    if any(_is_array(i) for i in items):
        at = x.array.at[_gathering(x, items)]
        if axes := _to_front(index, items):
            shape = jax.eval_shape(lambda a: jnp.moveaxis(a, axes, range(len(axes))), at.get(mode="clip")).shape
            new = jnp.moveaxis(jnp.broadcast_to(new, shape), range(len(axes)), axes)
        return at.set(new, mode="clip")
    parts, axes = _parts(x, items)
    kept = [p.size for p in parts if not p.drop]
    for a in axes:
        kept.insert(a, 1)
    while new.ndim > len(kept) and new.shape[0] == 1:
        new = lax.squeeze(new, (0,))
    new = jnp.broadcast_to(new, kept).reshape([p.size for p in parts])
    return _written(x.array, parts, new)


def _items(x: TracedArray, index: Any) -> tuple[Any, ...]:
    """Returns an index as a tuple with an entry per dimension, and None for each new one."""
    given = index if isinstance(index, tuple) else (index,)
    items = [np.asarray(i) if isinstance(i, list) else i for i in given]
    items = [
        int(i)
        if isinstance(i, np.integer) or (isinstance(i, np.ndarray) and i.ndim == 0 and i.dtype.kind in "iu")
        else i
        for i in items
    ]
    if any(isinstance(i, bool | np.bool_) for i in items):
        raise refused("Boolean scalar indexing is not supported", "use np.where(condition, x, y)")
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    used = sum(_rank(i) for i in items)
    if used > x.ndim:
        raise IndexError(f"{used} indices for an array of rank {x.ndim}")
    at = dots[0] if dots else len(items)
    return (*items[:at], *[slice(None)] * (x.ndim - used), *items[at + len(dots) :])


def _to_front(index: Any, items: tuple[Any, ...]) -> list[int]:
    """Returns the dimensions that NumPy moves to the front: dimensions of index arrays that a '...' of no dimension separates."""
    given = index if isinstance(index, tuple) else (index,)
    dots = next((k for k, i in enumerate(given) if i is Ellipsis), None)
    if dots is None or len(items) != len(given) - 1:
        return []
    arrays = [k for k, i in enumerate(items) if _is_array(i) or isinstance(i, int | TracedArray)]
    if arrays != list(range(arrays[0], arrays[-1] + 1)) or not arrays[0] < dots <= arrays[-1]:
        return []
    rank = len(np.broadcast_shapes(*(getattr(items[k], "shape", ()) for k in arrays)))
    return list(range(arrays[0], arrays[0] + rank))


def _rank(item: Any) -> int:
    """Returns the number of dimensions that an entry covers."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if _is_array(item) and item.dtype == np.bool_ else 1


def _is_array(item: Any) -> bool:
    return isinstance(item, np.ndarray) or (isinstance(item, TracedArray) and item.ndim > 0)


def _is_mask(items: tuple[Any, ...]) -> bool:
    return any(_is_array(i) and i.dtype == np.bool_ for i in items)


def _parts(x: TracedArray, items: tuple[Any, ...]) -> tuple[list[_Part], list[int]]:
    """Returns the selected part of each dimension, and the positions of new dimensions in the result."""
    parts: list[_Part] = []
    new: list[int] = []
    place = 0
    for item in items:
        if item is None:
            new.append(place)
            place += 1
            continue
        part = _part(item, x.shape[len(parts)], len(parts))
        parts.append(part)
        place += not part.drop
    return parts, new


def _part(item: Any, size: int, axis: int) -> _Part:
    if isinstance(item, slice):
        return _of_slice(item, size)
    if isinstance(item, TracedArray):
        if item.dtype.kind not in "iu":
            raise IndexError(f"an index is an integer, not {item.dtype.name}")
        at = item.array.astype(np.int32)
        return _Part(at if isinstance(item, LoopIndex) else jnp.where(at < 0, at + np.int32(size), at), 1, drop=True)
    if not isinstance(item, int):
        raise IndexError(f"an index is an integer, a slice or an array of integers, not {type(item).__name__}")
    if not -size <= item < size:
        raise IndexError(f"index {item} is out of bounds for axis {axis} of size {size}")
    return _Part(item % size, 1, drop=True)


def _of_slice(item: slice, size: int) -> _Part:
    if not isinstance(item.start, TracedArray) and not isinstance(item.stop, TracedArray):
        indices = range(*item.indices(size))
        if not indices:
            return _Part(0, 0)
        return _Part(min(indices[0], indices[-1]), len(indices), abs(indices.step), indices.step < 0)
    start, stop, step = item.start, item.stop, 1 if item.step is None else item.step
    if not (isinstance(start, LoopIndex) and isinstance(stop, LoopIndex) and start.runs_with(stop)) or step != 1:
        raise refused(
            "the size of a slice is not known while the kernel is traced",
            "both ends are the same multiple of fori_loop's index plus a number: x[i * 128 : i * 128 + 128]",
        )
    length = stop.offset - start.offset
    if not 0 < length <= size:
        raise IndexError(f"a slice of {length} elements of an axis of size {size}")
    return _Part(start.array, length)


def _slice(array: Any, parts: list[_Part]) -> Any:
    starts = [p.start if p.known else 0 for p in parts]
    sizes = [(p.size - 1) * p.step + 1 if p.size else 0 for p in parts]
    ends = [s + n if p.known else m for s, n, p, m in zip(starts, sizes, parts, array.shape, strict=True)]
    found = lax.slice(array, starts, ends, [p.step for p in parts])
    if not all(p.known for p in parts):
        found = lax.dynamic_slice(found, [np.int32(0) if p.known else p.start for p in parts], [p.size for p in parts])
    backwards = [k for k, p in enumerate(parts) if p.reverse]
    return lax.rev(found, backwards) if backwards else found


def _written(array: Any, parts: list[_Part], new: Any) -> Any:
    backwards = [k for k, p in enumerate(parts) if p.reverse]
    new = lax.rev(new, backwards) if backwards else new
    if 0 in new.shape:
        return array
    if new.shape == array.shape and all(p.known for p in parts):
        return new
    if all(p.step == 1 for p in parts):
        return lax.dynamic_update_slice(array, new, [np.int32(p.start) if p.known else p.start for p in parts])
    if not all(p.known for p in parts):
        raise refused("a slice with a step and an index that is not known can't be assigned to together")
    gaps = [
        (p.start, n - p.start - (p.size - 1) * p.step - 1, p.step - 1) for p, n in zip(parts, array.shape, strict=True)
    ]
    spread = lax.pad(new, new.dtype.type(0), gaps)
    hit = lax.pad(jnp.full(new.shape, True), np.bool_(False), gaps)
    return lax.select(hit, spread, array)


def _gathering(x: TracedArray, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an index for JAX; checks constant arrays."""
    found: list[Any] = []
    axis = 0
    for item in items:
        if isinstance(item, np.ndarray):
            if item.dtype.kind not in "iu":
                raise IndexError(f"an index is an array of integers, not of {item.dtype.name}")
            size = x.shape[axis]
            if item.size and (item.min() < -size or item.max() >= size):
                raise IndexError(
                    f"an index from {item.min()} to {item.max()} is out of bounds for axis {axis} of size {size}"
                )
            found.append((item % size if size else item).astype(np.int32))
        elif isinstance(item, TracedArray):
            if item.dtype.kind not in "iu":
                raise IndexError(f"an index is an array of integers, not of {item.dtype.name}")
            found.append(item.array)
        elif isinstance(item, slice) and (isinstance(item.start, TracedArray) or isinstance(item.stop, TracedArray)):
            raise refused("an index has an array and a slice that is not known", "take the slice first")
        else:
            found.append(item)
        axis += item is not None
    return tuple(found)


def _masked(x: TracedArray, items: tuple[Any, ...], new: Any) -> Any:
    mask = next(i for i in items if _is_array(i))
    others = [i for i in items if i is not mask]
    if any(not isinstance(i, slice) or i != slice(None) for i in others) or items[0] is not mask or new.ndim:
        raise refused(
            "elements that bools choose can be assigned one number for all", "use x[...] = np.where(condition, new, x)"
        )
    hit = tensor(mask).array
    if tuple(hit.shape) != x.shape[: hit.ndim]:
        raise IndexError(f"bools of shape {tuple(hit.shape)} for an array of shape {x.shape}")
    hit = jnp.broadcast_to(hit.reshape(hit.shape + (1,) * (x.ndim - hit.ndim)), x.shape)
    return lax.select(hit, jnp.broadcast_to(new, x.shape), x.array)
