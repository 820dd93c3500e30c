"""The layout of a tensor in its kernel parameter: the storage that ggml's tensors cover, and views of it.

A kernel's parameters are storage that a backend binds: the range of bytes from a tensor's first element to the end of its last. A
non-contiguous tensor is a view of its storage, and the kernel contains the view:

* dense storage in another order of dimensions: the parameter has the storage's shape, the view is a transpose;
* strides that nest (each a multiple of the next, rows longer than the used part): the parameter is flat, the view pads it to
  whole rows, reshapes and slices;
* anything else (overlapping or irregular strides): a gather from flat storage.

A weight may have another layout than ggml's (`kernelgen.ggml.weight_layouts`). Then its view is the stored form: in `planes` its
last dimension is a row's bytes, in which the emitter finds the fields; in `transposed` the rows are the last dimension; in `bf16`
its elements are.

Element types that neuronx-cc does not support arrive as others: I64 as pairs of i32, low word first, quantized blocks as bytes.
`view` and `update` are JAX functions; the rest is arithmetic and needs no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import BF16, F8_TILES, PLANES, TRANSPOSED, stored_bytes

_ARRAY_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i16": "int16", "i32": "int32"}


@dataclass(frozen=True, slots=True)
class ParameterStorage:
    """The parameter of a tensor, and the layout of the tensor's elements in it.

    Attributes:
        dtype: NumPy name of the parameter's element type.
        shape: the parameter's shape.
        dims: (length, stride in elements of `dtype`) of the view's dimensions, outermost first: ne3 to ne0 (blocks for a
            quantized type), then the dimensions of `trailing`. In the layout `planes` a row's bytes are one dimension, in
            `transposed` ne0 comes before ne1, in `bf16` ne0 counts elements, and in `f8_e4m3_128x128` ne1 is 1 and ne0 the bytes
            of a matrix.
        length: number of elements of `dtype` in the storage.
        dense: whether the view covers every element once.
        unit: bytes of an element of `dtype`.
    """

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    length: int
    dense: bool
    unit: int

    @property
    def view_shape(self) -> tuple[int, ...]:
        return tuple(n for n, _ in self.dims)

    @property
    def order(self) -> tuple[int, ...]:
        """The view's dimensions from the largest stride to the smallest; in order for a contiguous tensor."""
        return tuple(sorted(range(len(self.dims)), key=lambda k: (-self.dims[k][1], k)))


def storage(tensor: TensorDesc) -> ParameterStorage:
    """Returns the parameter of `tensor`.

    Raises:
        ValueError: neuronx-cc has no element type for its type.
    """
    if tensor.layout == BF16:
        return storage(_in_bf16(tensor))
    if tensor.layout == F8_TILES:
        return storage(_in_bytes(tensor))
    t = TYPES[tensor.dtype]
    strides = list(tensor.nb)
    lengths = list(tensor.ne)
    trailing: tuple[tuple[int, int], ...] = ()
    if t.quantized:
        dtype, unit, trailing = "uint8", 1, ((t.size, 1),)
        lengths[0] //= t.block
    elif tensor.dtype == "i64":
        dtype, unit, trailing = "int32", 4, ((2, 1),)
    elif tensor.dtype in _ARRAY_TYPES:
        dtype, unit = _ARRAY_TYPES[tensor.dtype], t.size
    else:
        raise ValueError(f"Neuron devices have no {tensor.dtype}")
    if tensor.layout == TRANSPOSED:
        lengths[:2] = tensor.ne[1], tensor.ne[0]
        strides[:2] = unit, unit * tensor.ne[1]
    kept: tuple[int, ...] = (3, 2, 1, 0)
    if tensor.layout == PLANES:
        kept, trailing = (3, 2, 1), ((lengths[0] * t.size, 1),)
    dims = (*((lengths[k], strides[k] // unit) for k in kept), *trailing)
    length = tensor.storage_bytes // unit
    # Dense: from the innermost dimension out, each stride is the product of all lengths inside it. Dimensions of length 1 do not
    # count.
    made = ParameterStorage(dtype, (length,), dims, length, False, unit)
    expected = 1
    for k in reversed(made.order):
        n, stride = dims[k]
        if n > 1 and stride != expected:
            return made
        expected *= n
    return ParameterStorage(dtype, tuple(dims[k][0] for k in made.order), dims, length, True, unit)


def _in_bf16(tensor: TensorDesc) -> TensorDesc:
    """Returns a quantized tensor whose strides are whole rows as a bf16 tensor with as many elements in each row."""
    t = TYPES[tensor.dtype]
    row = tensor.ne[0] // t.block * t.size
    return TensorDesc.make(tensor.ne, "bf16", (2, *(stride // row * 2 * tensor.ne[0] for stride in tensor.nb[1:])))


def _in_bytes(tensor: TensorDesc) -> TensorDesc:
    """Returns a tensor in `f8_e4m3_128x128` whose strides are whole matrices, with the bytes of each matrix as a row of i8."""
    ne0, ne1, ne2, ne3 = tensor.ne
    stored = stored_bytes(tensor.layout, tensor.dtype, (ne0, ne1, 1, 1))
    matrix = tensor.nb[1] * ne1
    nb = (1, stored, *(stride // matrix * stored for stride in tensor.nb[2:]))
    return TensorDesc.make((stored, 1, ne2, ne3), "i8", nb)


def view(array: Any, s: ParameterStorage) -> Any:
    """Returns the logical array, shape `s.view_shape`, of a parameter of shape `s.shape`."""
    from jax import lax

    if s.dense:
        return lax.transpose(array, _inverse(s.order)) if s.order != tuple(range(len(s.order))) else array
    nested = _nested(s)
    if nested is None:
        # Positions from strides are in bounds, so the gather needs no bounds handling.
        return array.at[_indices(s)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    padded, rows, used, kept = nested
    # The storage ends with the last used element; a reshape to rows requires the whole last row.
    if padded > s.length:
        array = lax.pad(array, array.dtype.type(0), [(0, padded - s.length, 0)])
    array = lax.slice(lax.reshape(array, rows), (0,) * len(rows), used)
    array = lax.reshape(array, tuple(s.dims[k][0] for k in kept))
    stepped = sorted(kept)
    array = lax.transpose(array, [kept.index(k) for k in stepped])
    # The remaining dimensions have one element, or repeat (stride 0).
    return lax.broadcast_in_dim(array, s.view_shape, stepped)


def update(array: Any, s: ParameterStorage, value: Any) -> Any:
    """Returns the storage `array`, shape `s.shape`, with its view replaced by `value`, shape `s.view_shape`.

    Elements outside the view stay; dense storage has none, and its `array` is not read.
    """
    from jax import lax

    if s.dense:
        return lax.transpose(value, s.order) if s.order != tuple(range(len(s.order))) else value
    nested = _nested(s)
    if nested is None or any(n > 1 and stride == 0 for n, stride in s.dims):
        return array.at[_indices(s)].set(value, mode="promise_in_bounds", wrap_negative_indices=False)
    padded, rows, used, kept = nested
    if padded > s.length:
        array = lax.pad(array, array.dtype.type(0), [(0, padded - s.length, 0)])
    stepped = sorted(kept)
    value = lax.reshape(value, tuple(s.dims[k][0] for k in stepped))
    value = lax.reshape(lax.transpose(value, [stepped.index(k) for k in kept]), used)
    array = lax.dynamic_update_slice(lax.reshape(array, rows), value, (0,) * len(rows))
    return lax.slice(lax.reshape(array, (padded,)), (0,), (s.length,))


def _nested(s: ParameterStorage) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Returns the view as a slice of rows of rows, or None if strides do not nest.

    Returns:
        (elements after padding to whole rows, shape as rows, end of the slice per dimension, view dimensions in that order).
    """
    kept = tuple(k for k in s.order if s.dims[k][0] > 1 and s.dims[k][1] > 0)
    if not kept:
        return (s.length, (s.length,), (1,), ()) if s.length else None
    # Each dimension is a slice of a row; the row's length is the outer dimension's stride in units of the dimension's own stride.
    rows, used = [s.dims[kept[0]][0]], [s.dims[kept[0]][0]]
    for outer, inner in pairwise(kept):
        n, stride = s.dims[inner]
        if s.dims[outer][1] % stride or s.dims[outer][1] < n * stride:
            return None
        rows.append(s.dims[outer][1] // stride)
        used.append(n)
    # The innermost elements may have gaps, too, if only one element of the last dimension is used.
    step = s.dims[kept[-1]][1]
    return s.dims[kept[0]][0] * s.dims[kept[0]][1], (*rows, step), (*used, 1), kept


def _indices(s: ParameterStorage) -> Any:
    """Returns the position of every element of the view in flat storage, i32."""
    import jax.numpy as jnp
    from jax import lax

    total = jnp.zeros(s.view_shape, jnp.int32)
    for axis, (n, stride) in enumerate(s.dims):
        if n > 1:
            total = total + lax.broadcasted_iota(jnp.int32, s.view_shape, axis) * jnp.int32(stride)
    return total


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(k) for k in range(len(order))]
