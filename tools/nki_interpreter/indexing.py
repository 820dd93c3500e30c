"""What indexing makes of a tensor: views by numbers, slices, new axes, index arrays and tiles of indices, as NumPy has them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from nki_interpreter import indices
from nki_interpreter.dtypes import float32
from nki_interpreter.errors import NkiError, NkiIndexError
from nki_interpreter.indices import Array, DynamicSlice
from nki_interpreter.program import HBM, SBUF, NkiLoopIndex, NkiMemory
from nki_interpreter.tensors import Dynamic, NkiTensor, Strided, in_register


def indexed(tensor: NkiTensor, key: tuple[Any, ...]) -> NkiTensor:
    """Returns the view of a tensor that an index gives.

    Raises:
        NkiIndexError: the index is not one, or outside.
        NkiError: the tensor is itself indexed by a tile or an index array.
    """
    if tensor.is_plain:
        found = _known_view(tensor, key)
        if found is not None:
            offset, dims, partition = found
            return NkiTensor(tensor.storage, tensor.offset + offset, dims, tensor.dtype, partition)
    return _found_view(tensor, key)


_NUMBER = frozenset((int, NkiLoopIndex))
_PLAIN = _NUMBER | {type(None)}


def _known_view(tensor: NkiTensor, key: tuple[Any, ...]) -> tuple[int, Strided, int] | None:
    """Returns what plain numbers and slices make of a view: what they add to the offset, the dimensions, the partitions' one.

    None for any other index, and for a slice that goes past the end.
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
        else:
            return None
    return _plain_view(tensor.dims, tensor.partition, tensor.on_chip, tuple(plain))


@functools.lru_cache(1 << 15)
def _plain_view(dims: Strided, partition: int, on_chip: bool, key: tuple[Any, ...]) -> tuple[int, Strided, int] | None:
    """As `_known_view`, for a key with (start, stop, step) for slices; a kernel makes the same views again and again."""
    storage = NkiMemory(0, (), float32, float32, SBUF if on_chip else HBM)
    whole_view = NkiTensor(storage, 0, dims, float32, partition)
    made = _found_view(whole_view, tuple(item if isinstance(item, int) else slice(*item) for item in key))
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
    """Integers, slices and new axes."""
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
            where = item + size if item < 0 else item
            if not 0 <= where < size:
                raise NkiIndexError(
                    "err_index_out_of_bounds", f"index {item} is out of bounds for axis {place} with size {size}"
                )
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
            if isinstance(item, DynamicSlice):
                item = slice(int(item.start), int(item.start) + int(item.size))
            start, count, step = _bounds(item, size)
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
    """Returns start, count and step of a slice; one that goes past the end keeps its length."""
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


def _fancy(tensor: NkiTensor, items: list[Any]) -> NkiTensor:
    """Index arrays and tiles of indices beside integers and slices, as NumPy places their dimensions."""
    shapes = []
    for item in items:
        if _is_array(item) or isinstance(item, NkiTensor):
            shapes.append(tuple(item.shape))
    try:
        common = np.broadcast_shapes(*shapes)
    except ValueError:
        raise NkiIndexError("err_index_shapes", f"index shapes {shapes} can't be broadcast together") from None
    advanced = [i for i, item in enumerate(items) if _is_array(item) or isinstance(item, NkiTensor | int)]
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1))
    before = [i for i in range(len(items)) if i not in advanced and (adjacent and i < advanced[0])]
    after = [i for i in range(len(items)) if i not in advanced and i not in before]
    rank = len(before) + len(common) + len(after)
    axis_of, place = {}, 0
    for number, item in enumerate(items):
        if item is not None:
            axis_of[number] = place
            place += 1
    offset = tensor.offset
    steps = [0] * len(common)
    irregular: Array | None = None
    valid: Array | None = None
    mask_key: list[Any] = [slice(None)] * tensor.ndim
    dynamic = []

    def placed(array: Array) -> Array:
        """Gives an array of the index arrays' dimensions the dimensions of the result."""
        full = array.reshape((1,) * (len(common) - array.ndim) + array.shape)
        return full.reshape((1,) * len(before) + full.shape + (1,) * len(after))

    def also(ok: Array) -> None:
        nonlocal valid
        if not ok.all():
            valid = ok if valid is None else valid & ok

    for number in advanced:
        item = items[number]
        stride, size = tensor.dims[axis_of[number]]
        if isinstance(item, int):
            where = item + size if item < 0 else item
            if not 0 <= where < size:
                raise NkiIndexError(
                    "err_index_out_of_bounds",
                    f"index {item} is out of bounds for axis {axis_of[number]} with size {size}",
                )
            offset += where * stride
            mask_key[axis_of[number]] = where
        elif isinstance(item, NkiTensor):
            dynamic.append((item, tuple(item.shape), stride, size))
        else:
            if item.dtype == np.bool_:
                raise NkiIndexError("err_invalid_index", "a tensor can't be indexed with a mask; pass it as mask=")
            array = np.asarray(item, np.int64)
            mask_key[axis_of[number]] = np.clip(array, 0, size - 1)
            also(placed((array >= 0) & (array < size)))
            found = indices.affine(array)
            if found is None:
                part = placed(array * stride)
                irregular = part if irregular is None else irregular + part
            else:
                offset += found[0] * stride
                for axis, step in enumerate(found[1]):
                    steps[len(common) - array.ndim + axis] += step * stride
    dims: list[tuple[int, int]] = []
    partition = None
    for place_ in [*before, None, *after]:
        if place_ is None:
            dims += list(zip(steps, common, strict=True))
            continue
        number = place_
        item = items[number]
        if item is None:
            dims.append((0, 1))
            continue
        stride, size = tensor.dims[axis_of[number]]
        if isinstance(item, DynamicSlice):
            item = slice(int(item.start), int(item.start) + int(item.size))
        start, count, step = _bounds(item, size)
        mask_key[axis_of[number]] = slice(start, start + step * count, step)
        offset += stride * start
        if start + step * (count - 1) >= size and count:
            also((start + step * np.arange(count) < size).reshape([-1 if i == len(dims) else 1 for i in range(rank)]))
        if axis_of[number] == tensor.partition:
            partition = len(dims)
        dims.append((stride * step, count))
    gather = None
    if irregular is not None:
        total: Array = irregular + offset
        for axis, (stride, size) in enumerate(dims):
            total = total + (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(rank)])
        gather = np.asarray(np.broadcast_to(total, tuple(n for _, n in dims)))
    if tensor.on_chip and len(dims) == 1:
        dims.append((1, 1))
        rank = 2
        gather = None if gather is None else gather[:, None]
        valid = None if valid is None else valid[:, None]
    mask = None
    if tensor.mask is not None and not dynamic and None not in items:
        mask = np.broadcast_to(tensor.mask, tensor.shape)[tuple(mask_key)]
        mask = np.broadcast_to(mask.reshape((*mask.shape, *(1,) * (rank - mask.ndim))), tuple(n for _, n in dims))
    if tensor.valid is not None:
        raise NkiError("err_nested_index", "a slice that goes past the end can't be indexed by arrays again")
    return tensor.replaced(
        offset=offset,
        dims=tuple(dims),
        partition=partition or 0,
        gather=gather,
        valid=valid,
        mask=mask,
        dynamic=tuple(
            Dynamic(
                index,
                (1,) * len(before)
                + (1,) * (len(common) - len(shape))
                + shape
                + (1,) * (rank - len(before) - len(common)),
                s,
                n,
            )
            for index, shape, s, n in dynamic
        ),
    )


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
