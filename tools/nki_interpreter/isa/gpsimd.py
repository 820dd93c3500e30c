"""The GpSimd engine: counters, selections by position, gathers and shuffles across partitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks, tensors
from nki_interpreter.dtypes import boolean, int32, is_float
from nki_interpreter.elementwise import op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.indices import affine, whole_array
from nki_interpreter.isa.common import destination, fitted, flat
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, lowering, to_float
from nki_interpreter.operators import apply_binary, emit, number, result
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor


def counted(shape: tuple[int, ...], steps: tuple[int, ...], offset: Any) -> Any:
    """Returns `offset + Σ index·step` in int32."""
    total = jnp.full(shape, 0, np.int32) + offset
    for axis, step in enumerate(steps):
        if step and shape[axis] > 1:
            total = total + lax.broadcasted_iota(np.int32, shape, axis) * np.int32(step)
    return total


@lowering("iota")
def _lower_iota(context: Context, instruction: Instruction) -> None:
    shape, steps = instruction.attributes
    (target,) = instruction.writes
    value = counted(shape, steps, context.integer(instruction.integers[0]))
    context.write(target, fitted(value, target), exact=target.dtype.itemsize == 4)


def iota(dst: NkiTensor, pattern: Any, offset: int = 0, channel_multiplier: int = 0) -> NkiTensor:
    """Computes `offset + partition · channel_multiplier + Σ i · stride` in int32."""
    checks.gpsimd_in_sbuf("iota", checks.on_chip(dst, "dst"))
    shape = (dst.shape[0], *(int(n) for _, n in pattern))
    if math.prod(shape) != dst.size:
        raise NkiValueError(
            "err_shape_mismatch", f"the pattern gives {shape[1:]} elements per partition, dst has {dst.shape}"
        )
    steps = (int(channel_multiplier), *(int(step) for step, _ in pattern))
    emit("iota", [], [dst], (shape, steps), (int(offset),))
    return dst


def iota_expression(expr: Any, dtype: Any, mask: Any = None) -> NkiTensor:
    """Returns a tile with the values of an index expression."""
    values = np.asarray(whole_array(expr), np.int64)
    if values.ndim < 2:
        raise NkiValueError(
            "err_1d_arange_not_supported", "an index expression of one dimension; add an axis: nl.arange(n)[:, None]"
        )
    tile = result(values.shape, dtype or int32, [], mask)
    found = affine(values)
    if found is None:
        constant = tensors.whole(current().constant(values.astype(np.int32), int32))
        emit("assign", [constant], [tile], False)
    else:
        emit("iota", [], [tile], (values.shape, found[1]), (found[0],))
    return tile


@lowering("affine_select")
def _lower_affine_select(context: Context, instruction: Instruction) -> None:
    shape, steps, op, otherwise = instruction.attributes
    value = context.read(instruction.reads[0])
    index = counted(shape, steps, context.integer(instruction.integers[0]))
    shown = apply_binary(op, index, jnp.zeros((), np.int32)).reshape(value.shape)
    target = instruction.writes[0]
    value = to_float(value) if is_float(target.dtype) else value
    context.write(target, fitted(jnp.where(shown, value, jnp.asarray(otherwise, value.dtype)), target))


def affine_select(
    dst: NkiTensor,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = "equal",
    offset: int = 0,
) -> NkiTensor:
    """Keeps the elements for which `offset + partition · channel_multiplier + Σ i · stride` compares true with 0."""
    data = checks.on_chip(on_true_tile, "on_true_tile")
    shape = (data.shape[0], *(int(n) for _, n in pattern))
    if math.prod(shape) != data.size:
        raise NkiValueError(
            "err_shape_mismatch", f"the pattern gives {shape[1:]} elements per partition, the tile has {data.shape}"
        )
    steps = (int(channel_multiplier), *(int(step) for step, _ in pattern))
    target = destination(dst, data.shape, data.dtype, [data], None)
    checks.gpsimd_in_sbuf("affine_select", data, target)
    fixed = number(on_false_value)
    if fixed is None:
        raise NkiTypeError("err_immediate_expected", f"on_false_value is a number, not {type(on_false_value).__name__}")
    emit("affine_select", [data], [target], (shape, steps, op_name(cmp_op), fixed), (int(offset),))
    return target


def affine_select_predicate(pred: Any, on_true_tile: Any, on_false_value: Any, dtype: Any, mask: Any) -> NkiTensor:
    """Keeps the elements for which a comparison of index expressions is true."""
    data = checks.on_chip(on_true_tile, "on_true_tile")
    shown = np.broadcast_to(np.asarray(whole_array(pred), np.bool_), data.shape)
    target = destination(None, data.shape, dtype or data.dtype, [data], mask)
    constant = tensors.whole(current().constant(np.ascontiguousarray(shown), boolean))
    fixed = number(on_false_value)
    if fixed is None:
        raise NkiTypeError("err_immediate_expected", f"on_false_value is a number, not {type(on_false_value).__name__}")
    fixed = float(fixed) if is_float(data.dtype) else fixed
    emit("select", [constant, data], [target], (None, fixed, False, None))
    return target


@lowering("gather_flattened")
def _lower_gather_flattened(context: Context, instruction: Instruction) -> None:
    data, index = (flat(context.read(t)) for t in instruction.reads)
    target = instruction.writes[0]
    places = jnp.clip(index.astype(np.int32), 0, data.shape[1] - 1)
    context.write(target, fitted(jnp.take_along_axis(data, places, axis=1, mode="clip"), target))


def gather_flattened(
    dst: NkiTensor | None, data: Any, indices: Any, *, dtype: Any = None, mask: Any = None
) -> NkiTensor:
    """Gathers, per partition, the elements at the given indices of its flattened free dimensions."""
    data, indices = checks.on_chip(data, "data"), checks.on_chip(indices, "indices")
    target = destination(dst, indices.shape, dtype or data.dtype, [indices], mask)
    emit("gather_flattened", [data, indices], [target])
    return target


@lowering("local_gather")
def _lower_local_gather(context: Context, instruction: Instruction) -> None:
    count, valid = instruction.attributes
    data, index = (flat(context.read(t)) for t in instruction.reads)
    cores = data.shape[0] // 16
    # One list of indices per group of 16 partitions; the partition varies fastest.
    groups = jnp.transpose(index.reshape((cores, 16, -1)), (0, 2, 1)).reshape((cores, -1))[:, :valid]
    places = groups.astype(np.int32)[:, :, None] + lax.broadcasted_iota(np.int32, (1, 1, count), 2)
    places = jnp.clip(jnp.repeat(places.reshape((cores, -1)), 16, axis=0), 0, data.shape[1] - 1)
    taken = jnp.take_along_axis(data, places, axis=1, mode="clip")
    target = instruction.writes[0]
    context.write(target, fitted(taken, target))


def local_gather(
    dst: NkiTensor | None,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    *,
    mask: Any = None,
) -> NkiTensor:
    """Gathers per 16 partitions with the indices of those partitions, flattened partition first."""
    data, index = checks.on_chip(src_buffer, "src_buffer"), checks.on_chip(index, "index")
    if data.shape[0] != index.shape[0] or data.shape[0] % 16:
        raise NkiValueError(
            "err_local_gather_partitions", f"{data.shape[0]} partitions are not a multiple of 16, or index has others"
        )
    if num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        raise NkiValueError(
            "err_local_gather_elements", f"num_elem_per_idx is 1, 2, 4, 8, 16 or 32, not {num_elem_per_idx}"
        )
    total = math.prod(index.shape[1:]) * 16
    valid = total if num_valid_indices is None else int(num_valid_indices)
    shape: tuple[int, ...] = (
        (data.shape[0], valid, num_elem_per_idx) if num_elem_per_idx > 1 else (data.shape[0], valid)
    )
    target = destination(dst, shape, data.dtype, [], mask)
    checks.gpsimd_in_sbuf("local_gather", data, index, target)
    emit("local_gather", [data, index], [target], (int(num_elem_per_idx), valid))
    return target


@lowering("shuffle")
def _lower_shuffle(context: Context, instruction: Instruction) -> None:
    places = np.asarray(instruction.attributes)
    value = context.read(instruction.reads[0])
    kept = places < 0
    target = instruction.writes[0]
    taken = jnp.take(value, np.where(kept, 0, places), axis=0)
    taken = fitted(taken, target)
    if kept.any():
        shown = np.broadcast_to(~kept.reshape((-1,) + (1,) * (len(target.shape) - 1)), target.shape)
        taken = jnp.where(shown, taken, context.read(target).astype(taken.dtype))
    context.write(target, taken)


def nc_stream_shuffle(src: NkiTensor, dst: NkiTensor, shuffle_mask: Any, *, mask: Any = None) -> NkiTensor:
    """Copies partition `shuffle_mask[i]` of `src` to partition i of `dst` in every 32 partitions; 255 keeps the old values."""
    src, dst = checks.on_chip(src, "src"), checks.on_chip(dst, "dst")
    order = [int(i) for i in shuffle_mask]
    if len(order) != 32 or any(i != 255 and not 0 <= i < 32 for i in order):
        raise NkiValueError("err_shuffle_mask", "shuffle_mask has 32 numbers below 32, or 255 to keep a partition")
    places = []
    for partition in range(dst.shape[0]):
        wanted = order[partition % 32]
        place = partition // 32 * 32 + wanted if src.shape[0] > 1 else 0
        if wanted == 255:
            place = -1
        elif place >= src.shape[0]:
            raise NkiValueError("err_shuffle_mask", f"shuffle_mask names partition {place}, src has {src.shape[0]}")
        places.append(place)
    emit("shuffle", [src, dst], [dst.with_mask(mask)], tuple(places))
    return dst


@lowering("nonzero_with_count")
def _lower_nonzero(context: Context, instruction: Instruction) -> None:
    offset, padding = instruction.attributes
    source, target = instruction.reads[0], instruction.writes[0]
    data = flat(context.read(source)) != 0
    n = data.shape[1]
    place = lax.broadcasted_iota(np.int32, data.shape, 1)
    found = lax.sort(jnp.where(data, place, np.int32(n)), dimension=1)
    found = jnp.where(found == n, np.int32(padding), found + np.int32(offset))
    count = jnp.sum(data, axis=1, keepdims=True, dtype=np.int32)
    value = jnp.concatenate([found, count], axis=1)
    rows = (np.arange(data.shape[0]) % 16 == 0)[:, None]
    context.write(target, jnp.where(rows, value, flat(context.read(target))).reshape(target.shape))


def nonzero_with_count(dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1) -> NkiTensor:
    """Writes on partitions 0, 16, 32, …: the positions of nonzero elements, padding, and their count."""
    needs(nc_version.gen3, "nonzero_with_count")
    src, dst = checks.on_chip(src, "src"), checks.on_chip(dst, "dst")
    if math.prod(dst.shape[1:]) != math.prod(src.shape[1:]) + 1:
        raise NkiValueError(
            "err_shape_mismatch", f"dst has one element more per partition than src, not {dst.shape}, {src.shape}"
        )
    emit("nonzero_with_count", [src, dst], [dst], (int(index_offset), int(padding_val)))
    return dst


@lowering("topk")
def _lower_topk(context: Context, instruction: Instruction) -> None:
    n = int(instruction.attributes)
    data = flat(to_float(context.read(instruction.reads[0])))
    place = lax.broadcasted_iota(np.int32, data.shape, 1)
    values, places = lax.sort((-data, place), dimension=1, num_keys=1)
    first, second = instruction.writes
    context.write(first, fitted(-values[:, :n], first))
    context.write(second, fitted(places[:, :n], second))


def topk(val_dst: Any, idx_dst: Any, src: Any, n: int) -> None:
    """Finds the n largest elements per partition, in descending order, and their positions."""
    src = checks.on_chip(src, "src")
    emit("topk", [src], [checks.on_chip(val_dst, "val_dst"), checks.on_chip(idx_dst, "idx_dst")], int(n))
