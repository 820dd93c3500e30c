"""Ops that make tensors from parts of others, or from numbers: concatenation, repetition, triangles, sequences."""

import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo.storage import ParameterStorage, storage, update, view

from .common import DTYPES, repeat, result


@emitter("concat", types="any, same")
def concat(x, y, *, dim: int):
    """`x` followed by `y` in ggml's dimension `dim`; blocks of quantized types are moved as they are."""
    return lax.concatenate([x, y], 3 - dim)


@emitter("repeat", types="number")
def repeat_to(x, *, out):
    """`x`, repeated to the result's shape."""
    return repeat(x, out.shape)


def _region(
    x: Array, part: TensorDesc, strides: tuple[int, int, int], offset: int
) -> tuple[Array, ParameterStorage, Array]:
    """Returns the layout of a tensor of the shape of `part` in the storage of `x`, with `strides` (bytes) from byte `offset` on.

    Returns:
        (all of `x`, flat; the layout; the part of `x` that the layout covers, in the layout's shape).
    """
    size = x.dtype.itemsize
    layout = storage(TensorDesc.make(part.ne, part.dtype, (size, *strides)))
    flat = lax.reshape(x, (x.size,))
    covered = lax.slice(flat, (offset // size,), (offset // size + layout.length,))
    return flat, layout, lax.reshape(covered, layout.shape)


def _replace(x: Array, flat: Array, covered: Array, offset: int) -> Array:
    """Returns `x` with the elements from byte `offset` on replaced by `covered`."""
    covered = lax.reshape(covered, (covered.size,))
    return lax.reshape(lax.dynamic_update_slice(flat, covered, (np.int32(offset // x.dtype.itemsize),)), x.shape)


@emitter("acc", types="f32, f32")
def acc(x, y, *, nb1: int, nb2: int, nb3: int, offset: int, inplace: bool = False, inputs):
    """`x` with `y` added to its part that starts at byte `offset` and has the shape of `y` and these strides."""
    flat, layout, covered = _region(x, inputs[1], (nb1, nb2, nb3), offset)
    return _replace(x, flat, update(covered, layout, view(covered, layout) + y), offset)


@emitter("set", types=("f32, f32", "i32, i32"))
def set_part(x, y, *, nb1: int, nb2: int, nb3: int, offset: int, inplace: bool = False, inputs):
    """`x` with `y` in place of its part that starts at byte `offset` and has the shape of `y` and these strides."""
    flat, layout, covered = _region(x, inputs[1], (nb1, nb2, nb3), offset)
    return _replace(x, flat, update(covered, layout, y), offset)


@emitter("diag", types="f32")
def diag(x, *, out):
    """Matrices with the rows of `x`, [ne3, ne2, 1, n], on their diagonals, 0 elsewhere: [ne3, ne2, n, n]."""
    wide = lax.broadcast_in_dim(x, out.shape, (0, 1, 2, 3))
    row, column = (lax.broadcasted_iota(np.int32, out.shape, axis) for axis in (2, 3))
    return lax.select(row == column, wide, lax.full_like(wide, 0))


@emitter("tri", types="f32")
def tri(x, *, tri_type: int):
    """A triangle of each matrix, 0 elsewhere: upper with (0) or without (1) the diagonal, lower with (2) or without (3) it."""
    row, column = (lax.broadcasted_iota(np.int32, x.shape, axis) for axis in (2, 3))
    kept = (column >= row, column > row, column <= row, column < row)[tri_type]
    return lax.select(kept, x, lax.full_like(x, 0))


@emitter("fill", types="f32 f16")
def fill(x, *, c: float):
    """A tensor with the shape of `x` and the value `c`."""
    return lax.full_like(x, c)


@emitter("arange", types="")
def arange(*, start: float, stop: float, step: float, out):
    """`start + i * step` for every i with a value below `stop`: [1, 1, 1, n] f32."""
    i = lax.convert_element_type(lax.iota(np.int32, out.ne[0]), DTYPES["f32"])
    return result(np.float32(start) + np.float32(step) * i, out)
