"""Tensors of a kernel: views of memory, and the operations that create new views."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from nki_interpreter.access import strides_of
from nki_interpreter.dtypes import dtype_of, float32, int32
from nki_interpreter.errors import NkiError, NkiIndexError, NkiTypeError, NkiValueError
from nki_interpreter.indices import Array
from nki_interpreter.program import ON_CHIP, Buffer, NkiMemory, current

Function = TypeVar("Function", bound=Callable[..., Any])
_PROVIDED: dict[str, Callable[..., Any]] = {}


def provides(name: str) -> Callable[[Function], Function]:
    """Registers an operator or the indexing of tensors. `operators` and `indexing` implement them, and import this module."""

    def register(function: Function) -> Function:
        _PROVIDED[name] = function
        return function

    return register


Strided = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Dynamic:
    """An index that is known at run time.

    Attributes:
        index: the tensor of indices; its dimensions of size 1 are broadcast.
        shape: the shape of the index before it is broadcast against the view.
        stride: the number of elements of the memory per step.
        limit: the number of steps; an index at or above it is out of range.
    """

    index: NkiTensor
    shape: tuple[int, ...]
    stride: int
    limit: int


@dataclass(eq=False, slots=True)  # not frozen: freezing slows the creation of thousands of views; no code changes them
class NkiTensor:
    """A view of memory, row-major.

    Attributes:
        storage: the memory.
        offset: the number of the first element.
        dims: stride and size per dimension, in elements of `cast` if given.
        dtype: the dtype of the elements.
        partition: the partition dimension; the dimensions before it are block dimensions.
        cast: the dtype as which the memory is read, None for its own.
        gather: for indices that are not affine, the number of every element; None otherwise.
        dynamic: the indices that are known at run time.
        valid: which elements are inside the memory, None if all are.
        mask: which elements hold values, None if all do.
    """

    storage: NkiMemory
    offset: int
    dims: Strided
    dtype: np.dtype[Any]
    partition: int = 0
    cast: np.dtype[Any] | None = None
    gather: Array | None = None
    dynamic: tuple[Dynamic, ...] = ()
    valid: Array | None = None
    mask: Array | None = None
    varying: tuple[Any, ...] = ()
    """The offsets that rolled loops add: (loop, coefficient, steps) per loop. Only `roll` sets it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return _shape_of(self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(stride for stride, _ in self.dims)

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @property
    def size(self) -> int:
        return _size_of(self.dims)

    @property
    def is_plain(self) -> bool:
        """Whether offset and dimensions alone describe the view."""
        return not (
            self.gather is not None
            or self.valid is not None
            or self.mask is not None
            or self.cast is not None
            or self.dynamic
            or self.varying
        )

    @property
    def buffer(self) -> Buffer:
        return self.storage.buffer

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def on_chip(self) -> bool:
        return self.storage.buffer.kind in ON_CHIP

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"tensor({list(self.shape)}, {self.dtype}, {self.buffer})"

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Any:
        raise NkiTypeError("err_tensor_not_iterable", "a tensor can't be iterated over; index it in a loop")

    def get_pattern(self) -> list[list[int]]:
        return [[stride, size] for stride, size in self.dims]

    def is_contiguous(self) -> bool:
        return self.gather is None and all(
            s == e or n == 1 for (s, n), e in zip(self.dims, strides_of(self.shape), strict=True)
        )

    def is_indirect(self) -> bool:
        return bool(self.dynamic)

    # Views

    def __getitem__(self, key: Any) -> NkiTensor:
        view: NkiTensor = _PROVIDED["indexed"](self, key if isinstance(key, tuple) else (key,))
        return view

    def __setitem__(self, key: Any, value: Any) -> None:
        _PROVIDED["assign"](self[key], value)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        return self._axis(dim, slice(start, end, step))

    def select(self, dim: int, index: Any) -> NkiTensor:
        return self._axis(dim, index)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        return self._axis(dim, vector_offset)

    def _axis(self, dim: int, key: Any) -> NkiTensor:
        return self[(slice(None),) * (dim % self.ndim) + (key,)]

    def permute(self, dims: Any, *more: int) -> NkiTensor:
        order: tuple[int, ...] = (dims, *more) if isinstance(dims, int) else tuple(dims)
        if sorted(order) != list(range(self.ndim)):
            raise NkiValueError("err_invalid_permutation", f"{order} is not a permutation of {self.ndim} dimensions")
        self._plain("permute")
        mask = None if self.mask is None else np.transpose(np.broadcast_to(self.mask, self.shape), order)
        return self.replaced(dims=tuple(self.dims[i] for i in order), mask=mask, partition=0)

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        self._plain("broadcast")
        if self.shape[dim] != 1:
            raise NkiValueError("err_invalid_broadcast", f"dimension {dim} has {self.shape[dim]} elements, not 1")
        dims = list(self.dims)
        dims[dim] = (0, size)
        return self.replaced(dims=tuple(dims))

    def broadcast_to(self, shape: Any, *more: int) -> NkiTensor:
        shape = (shape, *more) if isinstance(shape, int) else tuple(shape)
        self._plain("broadcast_to")
        recorder = current()
        if recorder.older and not self.on_chip and self.storage.initial is None:
            raise NkiTypeError(
                "err_unsupported_memory",
                f"broadcast_to takes a tile in SBUF or PSUM, not in {self.buffer}; load it first",
            )
        dims = ((0, 1),) * (len(shape) - self.ndim) + self.dims
        for (_, n), wanted in zip(dims, shape, strict=True):
            if n not in (1, wanted):
                raise NkiValueError("err_cannot_broadcast", f"shape {self.shape} can't be broadcast to {shape}")
        return self.replaced(dims=tuple((s if n == w else 0, w) for (s, n), w in zip(dims, shape, strict=True)))

    def expand_dim(self, dim: int) -> NkiTensor:
        dim = dim % (self.ndim + 1)
        return self[(slice(None),) * dim + (None,)]

    expand_dims = expand_dim

    def squeeze_dim(self, dim: int) -> NkiTensor:
        dim = dim % self.ndim
        if self.shape[dim] != 1:
            raise NkiValueError("err_invalid_squeeze", f"dimension {dim} has {self.shape[dim]} elements, not 1")
        self._plain("squeeze_dim")
        return self.replaced(dims=self.dims[:dim] + self.dims[dim + 1 :])

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        dim = dim % self.ndim
        return self.reshape(self.shape[:dim] + tuple(shape) + self.shape[dim + 1 :])

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        a, b = start_dim % self.ndim, end_dim % self.ndim
        return self.reshape((*self.shape[:a], math.prod(self.shape[a : b + 1]), *self.shape[b + 1 :]))

    def reshape(self, shape: Any, *more: int) -> NkiTensor:
        wanted = [int(n) for n in ((shape, *more) if isinstance(shape, int | np.integer) else tuple(shape))]
        if -1 in wanted:
            rest = -math.prod(wanted)
            wanted[wanted.index(-1)] = self.size // rest if rest else 0
        if math.prod(wanted) != self.size:
            raise NkiValueError("err_reshape_size_mismatch", f"shape {self.shape} can't be reshaped to {tuple(wanted)}")
        self._plain("reshape")
        dims = reshaped(self.dims, tuple(wanted))
        if dims is None:
            raise NkiValueError(
                "err_reshape_not_contiguous", f"a view with the pattern {self.get_pattern()} can't be {tuple(wanted)}"
            )
        mask = None if self.mask is None else np.broadcast_to(self.mask, self.shape).reshape(wanted)
        return self.replaced(dims=dims, mask=mask)

    def rearrange(self, src_pattern: Any, dst_pattern: Any, fixed_sizes: dict[str, int] | None = None) -> NkiTensor:
        """Names the dimensions, with a group of names for a dimension to split, and reorders the names."""
        known = dict(fixed_sizes or {})
        names: list[str] = []
        split: list[int] = []
        for group, size in zip(src_pattern, self.shape, strict=True):
            parts = (group,) if isinstance(group, str) else tuple(group)
            free = [part for part in parts if part not in known]
            if len(free) > 1:
                raise NkiValueError("err_invalid_rearrange", f"fixed_sizes has to give all but one size of {parts}")
            for part in free:
                known[part] = size // math.prod(known[p] for p in parts if p != part)
            names += parts
            split += [known[part] for part in parts]
        order = [part for group in dst_pattern for part in ((group,) if isinstance(group, str) else group)]
        shape = [
            known[group] if isinstance(group, str) else math.prod(known[part] for part in group)
            for group in dst_pattern
        ]
        return self.reshape(split).permute(tuple(names.index(name) for name in order)).reshape(shape)

    def view(self, dtype: Any) -> NkiTensor:
        wanted = dtype_of(dtype)
        self._plain("view")
        if wanted == self.dtype:
            return self
        old, new = self.dtype.itemsize, wanted.itemsize
        if old == new:
            return self.replaced(dtype=wanted, cast=wanted)
        *dims, (stride, size) = self.dims
        if stride != 1 and size > 1:
            raise NkiValueError(
                "err_invalid_view", "the last dimension has to be contiguous to change the dtype's size"
            )
        if (size * old) % new or (self.offset * old) % new or any((s * old) % new for s, _ in dims):
            raise NkiValueError(
                "err_invalid_view", f"{self!r} can't be read as {wanted}: its rows don't hold whole elements"
            )
        return self.replaced(
            dims=(*((s * old // new, n) for s, n in dims), (1, size * old // new)),
            offset=self.offset * old // new,
            dtype=wanted,
            cast=wanted,
        )

    reinterpret_cast = view

    def astype(self, dtype: Any) -> NkiTensor:
        made: NkiTensor = _PROVIDED["copied"](self, dtype_of(dtype))
        return made

    def ap(
        self,
        pattern: Any,
        offset: int | None = None,
        scalar_offset: NkiTensor | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: Any = None,
    ) -> NkiTensor:
        """Returns the elements of the storage that an access pattern selects: [stride, count] per dimension, in elements.

        The offset is added to the view's offset. `scalar_offset` (one element) counts steps of the base's dimension
        `indirect_dim`; `vector_offset` gives the positions on dimension 0 of the pattern.
        """
        self._plain("ap")
        base = self if dtype is None else self.whole().view(dtype)
        dims = tuple((int(stride), int(size)) for stride, size in pattern)
        found = base.replaced(offset=self.offset + int(offset or 0), dims=dims, valid=None, mask=None, partition=0)
        found._inside()
        shape = self.storage.shape
        step = math.prod(shape[indirect_dim + 1 :])
        if scalar_offset is not None:
            index = scalar_offset if isinstance(scalar_offset, NkiTensor) else in_register(scalar_offset)
            found = found.replaced(dynamic=(Dynamic(index, (1,) * len(dims), step, shape[indirect_dim]),))
        if vector_offset is not None:
            if indirect_dim:
                raise NkiValueError("err_indirect_dim", f"vector_offset works on dimension 0 only, not {indirect_dim}")
            first = (0, dims[0][1])
            index_shape = (dims[0][1],) + (1,) * (len(dims) - 1)
            found = found.replaced(
                dims=(first, *dims[1:]), dynamic=(Dynamic(vector_offset, index_shape, step, shape[0]),)
            )
        return found

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        return self[index]

    def whole(self) -> NkiTensor:
        """Returns the whole memory of this view, in the memory's shape."""
        return whole(self.storage)

    def with_mask(self, mask: Any) -> NkiTensor:
        """Returns the view restricted to the elements that a mask shows."""
        if mask is None:
            return self
        shown = np.asarray(mask, np.bool_)
        try:
            np.broadcast_to(shown, self.shape)
        except ValueError:
            raise NkiValueError(
                "err_mask_shape", f"a mask of shape {shown.shape} can't be broadcast to {self.shape}"
            ) from None
        if shown.all():
            return self
        return self.replaced(mask=shown if self.mask is None else self.mask & shown)

    def replaced(self, **changes: Any) -> NkiTensor:
        made = NkiTensor(
            self.storage, self.offset, self.dims, self.dtype, self.partition, self.cast, self.gather, self.dynamic,
            self.valid, self.mask, self.varying,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    def _plain(self, what: str) -> None:
        if self.gather is not None or self.dynamic:
            raise NkiError("err_indirect_view", f"{what} of a tensor that is indexed by a tile or an index array")

    def _inside(self) -> None:
        first = self.offset + sum(s * (n - 1) for s, n in self.dims if s < 0)
        last = self.offset + sum(s * (n - 1) for s, n in self.dims if s > 0)
        size = self.storage.size * self.storage.dtype.itemsize // self.dtype.itemsize
        if self.size and (first < 0 or last >= size):
            raise NkiIndexError(
                "err_access_out_of_bounds", f"the pattern reaches from element {first} to {last} of memory of {size}"
            )

    # Operators

    def _binary(self, name: str, other: Any, swapped: bool = False) -> Any:
        if not isinstance(other, NkiTensor | int | float | np.generic | np.ndarray):
            return NotImplemented
        return _PROVIDED["binary"](name, *((other, self) if swapped else (self, other)))

    def __neg__(self) -> Any:
        return self._binary("multiply", -1)

    def __invert__(self) -> Any:
        return _PROVIDED["unary"]("invert", self)

    def __iadd__(self, other: Any) -> Any:
        return _PROVIDED["accumulated"](self, other)


def _operator(name: str, swapped: bool = False) -> Callable[[NkiTensor, Any], Any]:
    return lambda tensor, other: tensor._binary(name, other, swapped)


_OPERATORS = """
    add=add sub=subtract mul=multiply truediv=divide mod=mod pow=power and=bitwise_and or=bitwise_or xor=bitwise_xor
    lshift=left_shift rshift=right_shift lt=less le=less_equal gt=greater ge=greater_equal eq=equal ne=not_equal
"""
for _method, _, _name in (word.partition("=") for word in _OPERATORS.split()):
    setattr(NkiTensor, f"__{_method}__", _operator(_name))
    if _method in ("add", "sub", "mul", "truediv"):
        setattr(NkiTensor, f"__r{_method}__", _operator(_name, swapped=True))


def whole(storage: NkiMemory, partition: int = 0) -> NkiTensor:
    """Returns a tensor of all of a storage."""
    return NkiTensor(storage, 0, _row_major(storage.shape), storage.dtype, partition)


@functools.lru_cache(1 << 12)
def _row_major(shape: tuple[int, ...]) -> Strided:
    return tuple(zip(strides_of(shape), shape, strict=True))


@functools.lru_cache(1 << 12)
def _shape_of(dims: Strided) -> tuple[int, ...]:
    return tuple(size for _, size in dims)


@functools.lru_cache(1 << 12)
def _size_of(dims: Strided) -> int:
    return math.prod(size for _, size in dims)


def reshaped(dims: Strided, shape: tuple[int, ...]) -> Strided | None:
    """Returns the strides of a view in another shape with as many elements, or None if no strides give that shape."""
    left: list[tuple[int, int]] = []  # the dimensions still to divide, from the end; contiguous neighbours are merged
    for stride, size in dims:
        if size == 1:
            continue
        if left and left[-1][0] == stride * size:
            left[-1] = (stride, left[-1][1] * size)
        else:
            left.append((stride, size))
    result: list[tuple[int, int]] = []
    for size in reversed(shape):
        if size == 1:
            result.append((result[-1][0] * result[-1][1] if result else 1, 1))
            continue
        if not left:
            return None
        stride, have = left.pop()
        if have % size:
            return None
        result.append((stride, size))
        if have > size:
            left.append((stride * size, have // size))
    return tuple(reversed(result))


def in_register(value: Any) -> NkiTensor:
    """Returns a tile of one element that holds a number, or a register."""
    if hasattr(value, "register_tensor"):
        tile: NkiTensor = value.register_tensor()
        return tile
    array = np.asarray(value)
    dtype = int32 if array.dtype.kind in "iub" else float32
    return whole(current().constant(array.astype(dtype).reshape(1, 1), dtype))


def shown_of(tensor: NkiTensor) -> Any:
    """Returns which elements of a view are inside the memory and not masked out, or None for all."""
    if tensor.mask is None:
        return tensor.valid
    return tensor.mask if tensor.valid is None else tensor.mask & tensor.valid


def new(
    shape: Any,
    dtype: Any,
    buffer: Buffer,
    *,
    value_dtype: np.dtype[Any] | None = None,
    name: str = "",
    partition: int = 0,
    initial: Array | None = None,
    address: Any = None,
) -> NkiTensor:
    """Returns new memory as a tensor; `address` is its first partition and first byte there, if the kernel places it."""
    storage = current().storage(shape, dtype_of(dtype), buffer, value_dtype=value_dtype, name=name, initial=initial)
    storage.partition = partition
    if address is not None:
        storage.address = int(address[1])
    return whole(storage, partition)
