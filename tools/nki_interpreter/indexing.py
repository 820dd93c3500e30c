"""Indexes tensors as NumPy does: by numbers, slices, new axes, index arrays and tiles of indices. The results are views."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nki_interpreter import indices
from nki_interpreter.dtypes import float32
from nki_interpreter.errors import NkiError, NkiIndexError
from nki_interpreter.indices import Array, DynamicSlice
from nki_interpreter.program import HBM, SBUF, NkiLoopIndex, NkiMemory
from nki_interpreter.tensors import Dynamic, NkiTensor, Strided, in_register, provides


@provides("indexed")
def indexed(tensor: NkiTensor, key: tuple[Any, ...]) -> NkiTensor:
    """Returns the view of a tensor that an index selects.

    Raises:
        NkiIndexError: the index is invalid or out of range.
        NkiError: the tensor is already indexed by a tile or an index array.
    """
    if tensor.is_plain:
        found = _known_view(tensor, key)
        if found is not None:
            offset, dims, partition = found
            return NkiTensor(tensor.storage, tensor.offset + offset, dims, tensor.dtype, partition)
    return _found_view(tensor, key)


_NUMBER = frozenset((int, NkiLoopIndex))
_PLAIN = _NUMBER | {type(None)}


class _Affine(NamedTuple):
    """An index array that is affine in its own indices."""

    start: int
    steps: tuple[int, ...]
    shape: tuple[int, ...]

    def array(self) -> Array:
        array = np.full(self.shape, self.start)
        for axis, (step, n) in enumerate(zip(self.steps, self.shape, strict=True)):
            array += (np.arange(n) * step).reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        return array


def _known_view(tensor: NkiTensor, key: tuple[Any, ...]) -> tuple[int, Strided, int] | None:
    """Returns the view that numbers, slices and affine arrays select: the added offset, the dimensions, the partition dimension.

    Returns None for any other index, and for one that goes past the end.
    """
    plain: list[Any] = []
    for item in key:
        kind = type(item)
        if kind is DynamicSlice:
            start, size = item.start, item.size
            if type(start) not in _NUMBER or type(size) is not int:
                return None
            plain.append((start, start + size, None))
        elif kind in _NUMBER:
            plain.append(int(item))
        elif kind is slice:
            part = (item.start, item.stop, item.step)
            if not _PLAIN.issuperset(map(type, part)):
                return None
            plain.append(part)
        elif _is_array(item) and item.dtype == np.int64:
            found = indices.affine(np.asarray(item))
            if found is None:
                return None
            plain.append(_Affine(*found, item.shape))
        else:
            return None
    return _plain_view(tensor.dims, tensor.partition, tensor.on_chip, tuple(plain))


@functools.lru_cache(1 << 15)
def _plain_view(dims: Strided, partition: int, on_chip: bool, key: tuple[Any, ...]) -> tuple[int, Strided, int] | None:
    """Computes `_known_view` for a key of numbers, (start, stop, step) and `_Affine`; cached, because kernels repeat views."""
    storage = NkiMemory(0, (), float32, float32, SBUF if on_chip else HBM)
    whole_view = NkiTensor(storage, 0, dims, float32, partition)
    items = (
        item.array() if isinstance(item, _Affine) else item if isinstance(item, int) else slice(*item) for item in key
    )
    made = _found_view(whole_view, tuple(items))
    return None if made.valid is not None else (made.offset, made.dims, made.partition)


def _found_view(tensor: NkiTensor, key: tuple[Any, ...]) -> NkiTensor:
    items = _expanded(tensor, key)
    if all(isinstance(item, slice) and item == slice(None) for item in items):
        return tensor
    if tensor.gather is not None or tensor.dynamic:
        raise NkiError(
            "err_nested_indirect", "a tensor that is indexed by a tile or an index array can't be indexed again"
        )
    arrays = [item for item in items if _is_array(item) or isinstance(item, NkiTensor)]
    if not arrays:
        return _sliced(tensor, items)
    if tensor.on_chip and any(_is_array(a) and a.ndim == 1 for a in arrays) and len(arrays) == 1 and tensor.ndim > 1:
        others = [item for item in items if not _is_array(item)]
        if any(isinstance(item, int) for item in others) and tensor.ndim == 2:
            raise NkiIndexError(
                "err_1d_arange_not_supported",
                "indexing a tensor with 1d arange is not supported; add an axis, nl.arange(n)[:, None], or use a slice",
            )
    return _fancy(tensor, items)


def _sliced(tensor: NkiTensor, items: list[Any]) -> NkiTensor:
    """Indexes by integers, slices and new axes."""
    offset, dims, dynamic = tensor.offset, [], []
    valid: list[tuple[int, Array]] = []
    keep: list[Any] = []
    partition, place = tensor.partition, 0
    new_partition: int | None = None
    for item in items:
        if item is None:
            dims.append((0, 1))
            keep.append(None)
            continue
        stride, size = tensor.dims[place]
        if place == partition:
            new_partition = len(dims)
        if isinstance(item, int):
            where = _place(item, place, size)
            offset += stride * where
            keep.append(where)
            if place == partition and tensor.on_chip:
                dims.append((stride, 1))
                keep[-1] = slice(where, where + 1)
        elif isinstance(item, DynamicSlice) and not isinstance(item.start, int | np.integer):
            index = item.start if isinstance(item.start, NkiTensor) else in_register(item.start)
            dims.append((stride, int(item.size)))
            dynamic.append((index, stride, size))
            keep.append(slice(0, int(item.size)))
        else:
            start, count, step = _bounds(_as_slice(item), size)
            offset += stride * start
            if start + step * (count - 1) >= size and count:
                ok = start + step * np.arange(count) < size
                valid.append((len(dims), ok))
            dims.append((stride * step, count))
            keep.append(slice(start, start + step * count if step > 0 else None, step))
        place += 1
    if tensor.on_chip and len(dims) == 1:
        dims.append((1, 1))
        keep.append(None)
    rank = len(dims)
    shown: Array | None = None
    for number, ok in valid:
        part = ok.reshape([-1 if i == number else 1 for i in range(rank)])
        shown = part if shown is None else shown & part
    mask = None
    if tensor.mask is not None or tensor.valid is not None:
        mask, old = (
            None if m is None else np.broadcast_to(m, tensor.shape)[tuple(keep)] for m in (tensor.mask, tensor.valid)
        )
        if old is not None:
            shown = old if shown is None else shown & old
    return tensor.replaced(
        offset=offset,
        dims=tuple(dims),
        partition=min(new_partition or 0, max(0, rank - 1)),
        valid=shown,
        mask=mask,
        dynamic=tuple(Dynamic(index, (1,) * rank, stride, limit) for index, stride, limit in dynamic),
    )


def _bounds(item: slice, size: int) -> tuple[int, int, int]:
    """Returns start, count and step of a slice; a slice that goes past the end keeps its length."""
    for part in (item.start, item.stop, item.step):
        if isinstance(part, NkiTensor) or (part is not None and not isinstance(part, int | np.integer | np.ndarray)):
            raise NkiIndexError(
                "err_dynamic_slice", "a slice's bounds are numbers; for a start known at run time use nl.ds"
            )
    step = int(item.step) if item.step is not None else 1
    if step < 0:
        start, stop, step = item.indices(size)
        return start, len(range(start, stop, step)), step
    start = 0 if item.start is None else int(item.start)
    stop = size if item.stop is None else int(item.stop)
    start, stop = (start + size if start < 0 else start), (stop + size if stop < 0 else stop)
    return start, max(0, -(-(stop - start) // step)), step


@dataclass
class _Layout:
    """The order of a view's dimensions if its index has arrays, as in NumPy.

    All arrays, tiles and integers together give the dimensions `common`. These stand at the place of the first array if
    no slice or new axis separates the arrays, else first.

    Attributes:
        items: the index, one entry per axis of the tensor and per new axis.
        axes: the tensor's axis of each entry; a new axis has the number of the next axis.
        common: the shape that the arrays broadcast to.
        advanced: the positions in `items` of arrays, tiles and integers.
        before, after: the positions of slices and new axes whose dimensions are before and after the common ones.
    """

    items: list[Any]
    axes: list[int]
    common: tuple[int, ...]
    advanced: list[int]
    before: list[int]
    after: list[int]

    @property
    def rank(self) -> int:
        return len(self.before) + len(self.common) + len(self.after)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of an index array extended to the dimensions of the view."""
        missing = len(self.before) + len(self.common) - len(shape)
        return (1,) * missing + tuple(shape) + (1,) * len(self.after)


def _layout(items: list[Any]) -> _Layout:
    shapes = [tuple(item.shape) for item in items if _is_array(item) or isinstance(item, NkiTensor)]
    try:
        common = np.broadcast_shapes(*shapes)
    except ValueError:
        raise NkiIndexError("err_index_shapes", f"index shapes {shapes} can't be broadcast together") from None
    advanced = [i for i, item in enumerate(items) if _is_array(item) or isinstance(item, NkiTensor | int)]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    others = [i for i in range(len(items)) if i not in advanced]
    before = [i for i in others if adjacent and i < advanced[0]]
    axes = [sum(item is not None for item in items[:i]) for i in range(len(items))]
    return _Layout(items, axes, common, advanced, before, [i for i in others if i not in before])


@dataclass
class _Selection:
    """The sum of the index entries processed so far.

    Attributes:
        offset: the number of the first element, without the part in `irregular`.
        steps: the strides of the common dimensions.
        irregular: the part of the elements' numbers that comes from index arrays that are not affine.
        valid: which elements are inside the memory, None if all are.
        dynamic: the tiles of indices.
    """

    offset: int
    steps: list[int]
    irregular: Array | None = None
    valid: Array | None = None
    dynamic: list[Dynamic] = field(default_factory=list)

    def inside(self, ok: Array) -> None:
        self.valid = ok if self.valid is None else self.valid & ok


def _fancy(tensor: NkiTensor, items: list[Any]) -> NkiTensor:
    """Indexes by index arrays and tiles, beside integers and slices; orders the dimensions as NumPy does."""
    if tensor.valid is not None:
        raise NkiError("err_nested_index", "a slice that goes past the end can't be indexed by arrays again")
    layout = _layout(items)
    selection = _Selection(tensor.offset, [0] * len(layout.common))
    for number in layout.advanced:
        _select(selection, layout, number, *tensor.dims[layout.axes[number]])
    dims, partition = _placed_dims(selection, layout, tensor)
    valid, gather = selection.valid, _numbers(selection, dims)
    if tensor.on_chip and len(dims) == 1:  # a tile has at least two dimensions
        dims.append((1, 1))
        gather = None if gather is None else gather[:, None]
        valid = None if valid is None else valid[:, None]
        selection.dynamic = [Dynamic(d.index, (*d.shape, 1), d.stride, d.limit) for d in selection.dynamic]
    return tensor.replaced(
        offset=selection.offset,
        dims=tuple(dims),
        partition=partition,
        gather=gather,
        valid=valid,
        mask=_mask_of(tensor, layout, dims, bool(selection.dynamic)),
        dynamic=tuple(selection.dynamic),
    )


def _select(selection: _Selection, layout: _Layout, number: int, stride: int, size: int) -> None:
    """Adds an entry (integer, index array or tile of indices) for an axis of that stride and size."""
    item = layout.items[number]
    if isinstance(item, int):
        selection.offset += stride * _place(item, layout.axes[number], size)
        return
    if isinstance(item, NkiTensor):
        selection.dynamic.append(Dynamic(item, layout.shape_of(item.shape), stride, size))
        return
    if item.dtype == np.bool_:
        raise NkiIndexError("err_invalid_index", "a tensor can't be indexed with a mask; pass it as mask=")
    array = np.asarray(item, np.int64)
    found = indices.affine(array)
    if found is None:
        part = (array * stride).reshape(layout.shape_of(array.shape))
        selection.irregular = part if selection.irregular is None else selection.irregular + part
        lowest, highest = (array.min(), array.max()) if array.size else (0, 0)
    else:
        start, steps = found
        selection.offset += start * stride
        first = len(layout.common) - array.ndim
        for axis, step in enumerate(steps):
            selection.steps[first + axis] += step * stride
        reach = [step * (n - 1) for step, n in zip(steps, array.shape, strict=True)]
        lowest, highest = start + sum(r for r in reach if r < 0), start + sum(r for r in reach if r > 0)
    if lowest < 0 or highest >= size:
        selection.inside(((array >= 0) & (array < size)).reshape(layout.shape_of(array.shape)))


def _place(item: int, axis: int, size: int) -> int:
    """Returns the position of an integer index; a negative one counts from the end."""
    where = item + size if item < 0 else item
    if not 0 <= where < size:
        raise NkiIndexError(
            "err_index_out_of_bounds", f"index {item} is out of bounds for axis {axis} with size {size}"
        )
    return where


def _as_slice(item: Any) -> Any:
    """Returns `nl.ds` with a known start as a slice, anything else unchanged."""
    return slice(int(item.start), int(item.start) + int(item.size)) if isinstance(item, DynamicSlice) else item


def _placed_dims(selection: _Selection, layout: _Layout, tensor: NkiTensor) -> tuple[list[tuple[int, int]], int]:
    """Adds the slices to a selection; returns the view's dimensions and its partition dimension."""
    dims: list[tuple[int, int]] = []
    partition = 0
    for number in [*layout.before, None, *layout.after]:
        if number is None:
            dims += zip(selection.steps, layout.common, strict=True)
            continue
        item = layout.items[number]
        if item is None:
            dims.append((0, 1))
            continue
        stride, size = tensor.dims[layout.axes[number]]
        start, count, step = _bounds(_as_slice(item), size)
        selection.offset += stride * start
        if start + step * (count - 1) >= size and count:
            ok = start + step * np.arange(count) < size
            selection.inside(ok.reshape([-1 if i == len(dims) else 1 for i in range(layout.rank)]))
        if layout.axes[number] == tensor.partition:
            partition = len(dims)
        dims.append((stride * step, count))
    return dims, partition


def _numbers(selection: _Selection, dims: list[tuple[int, int]]) -> Array | None:
    """Returns the number of every element, or None if offset and dimensions determine it."""
    if selection.irregular is None:
        return None
    total: Array = selection.irregular + selection.offset
    for axis, (stride, size) in enumerate(dims):
        total = total + (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(len(dims))])
    return np.asarray(np.broadcast_to(total, tuple(n for _, n in dims)))


def _mask_of(tensor: NkiTensor, layout: _Layout, dims: list[tuple[int, int]], dynamic: bool) -> Array | None:
    """Returns a tensor's mask indexed like the view; None without a mask, or if the view is known at run time only."""
    if tensor.mask is None or dynamic or None in layout.items:
        return None
    key: list[Any] = []
    for item, size in zip(layout.items, tensor.shape, strict=True):
        if isinstance(item, int):
            key.append(item)
        elif _is_array(item):
            key.append(np.clip(np.asarray(item, np.int64), 0, size - 1))
        else:
            start, count, step = _bounds(_as_slice(item), size)
            key.append(slice(start, start + step * count, step))
    mask = np.broadcast_to(tensor.mask, tensor.shape)[tuple(key)]
    return np.broadcast_to(mask.reshape((*mask.shape, *(1,) * (len(dims) - mask.ndim))), tuple(n for _, n in dims))


def _is_array(item: Any) -> bool:
    return isinstance(item, np.ndarray) and item.ndim > 0


def _expanded(tensor: NkiTensor, key: tuple[Any, ...]) -> list[Any]:
    items = [_number(item) for item in key]
    if sum(1 for item in items if item is Ellipsis) > 1:
        raise NkiIndexError("err_invalid_index", "an index has at most one ellipsis")
    used = sum(1 for item in items if item is not None and item is not Ellipsis)
    if used > tensor.ndim:
        raise NkiIndexError("err_tensor_access_rank", f"{used} indices for a tensor of {tensor.ndim} dimensions")
    fill = [slice(None)] * (tensor.ndim - used)
    for place, item in enumerate(items):
        if item is Ellipsis:
            return items[:place] + fill + items[place + 1 :]
    return items + fill


def _number(item: Any) -> Any:
    if isinstance(item, np.ndarray) and item.ndim == 0:
        return int(item)
    if isinstance(item, bool | np.bool_ | float):
        raise NkiIndexError("err_invalid_index", f"{item!r} is not an index")
    if isinstance(item, np.integer):
        return int(item)
    if isinstance(item, list):
        return np.asarray(item)
    if isinstance(item, int | slice | NkiTensor | np.ndarray | DynamicSlice) or item is None or item is Ellipsis:
        return item
    if hasattr(item, "register_tensor"):
        return item.register_tensor()
    raise NkiIndexError("err_invalid_index", f"{type(item).__name__} is not an index")
