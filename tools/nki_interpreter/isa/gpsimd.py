"""The GpSimd engine: counters, selections by position, gathers and shuffles across partitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import int32, is_float, uint32
from nki_interpreter.elementwise import op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import destination, flat
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, lowering, to_float
from nki_interpreter.operators import apply_binary, emit, number
from nki_interpreter.program import Instruction
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
    (target,) = instruction.writes
    shape, steps = instruction.attributes
    value = counted(shape, steps, context.integer(instruction.integers[0])).reshape(target.shape)
    context.write(target, value, exact=target.dtype.itemsize == 4)


def _pattern(tile: NkiTensor, pattern: Any, channel_multiplier: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape and the steps of a pattern for a tile: [stride, count] per free dimension."""
    shape = (tile.shape[0], *(int(n) for _, n in pattern))
    if math.prod(shape) != tile.size:
        raise NkiValueError(
            "err_shape_mismatch", f"the pattern gives {shape[1:]} elements per partition, the tile has {tile.shape}"
        )
    return shape, (int(channel_multiplier), *(int(step) for step, _ in pattern))


def iota(dst: Any, pattern: Any, offset: int = 0, channel_multiplier: int = 0) -> None:
    """Computes `offset + partition · channel_multiplier + Σ i · stride` in int32."""
    dst = checks.on_chip(dst, "dst")
    checks.gpsimd_in_sbuf("iota", dst)
    emit("iota", [], [dst], _pattern(dst, pattern, channel_multiplier), (int(offset),))


@lowering("affine_select")
def _lower_affine_select(context: Context, instruction: Instruction) -> Any:
    shape, steps, op, otherwise = instruction.attributes
    value = context.read(instruction.reads[0])
    index = counted(shape, steps, context.integer(instruction.integers[0]))
    shown = apply_binary(op, index, jnp.zeros((), np.int32)).reshape(value.shape)
    value = to_float(value) if is_float(instruction.writes[0].dtype) else value
    return jnp.where(shown, value, jnp.asarray(otherwise, value.dtype))


def affine_select(
    dst: Any,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = "equal",
    offset: int = 0,
) -> None:
    """Keeps the elements for which `offset + partition · channel_multiplier + Σ i · stride` compares true with 0."""
    data = checks.on_chip(on_true_tile, "on_true_tile")
    described = _pattern(data, pattern, channel_multiplier)
    target = destination(dst, data.shape)
    checks.gpsimd_in_sbuf("affine_select", data, target)
    emit("affine_select", [data], [target], (*described, op_name(cmp_op), fixed_number(on_false_value)), (int(offset),))


def fixed_number(on_false_value: Any) -> float | int:
    fixed = number(on_false_value)
    if fixed is None:
        raise NkiTypeError("err_immediate_expected", f"on_false_value is a number, not {type(on_false_value).__name__}")
    return fixed


@lowering("gather_flattened")
def _lower_gather_flattened(context: Context, instruction: Instruction) -> Any:
    data, index = (flat(context.read(t)) for t in instruction.reads)
    places = jnp.clip(index.astype(np.int32), 0, data.shape[1] - 1)
    return jnp.take_along_axis(data, places, axis=1, mode="clip")


def nc_n_gather(dst: Any, data: Any, indices: Any) -> None:
    """Gathers, per partition, the elements at the given indices of its flattened free dimensions."""
    data, indices = checks.on_chip(data, "data"), checks.on_chip(indices, "indices")
    target = destination(dst, indices.shape)
    checks.dtype(indices, "indices", uint32)
    checks.equal_dtypes(target, data, "dst of nc_n_gather")
    checks.in_sbuf("nc_n_gather", target, data, indices)
    emit("gather_flattened", [data, indices], [target])


@lowering("local_gather")
def _lower_local_gather(context: Context, instruction: Instruction) -> Any:
    count, valid = instruction.attributes
    data, index = (flat(context.read(t)) for t in instruction.reads)
    cores = data.shape[0] // 16
    # One list of indices per group of 16 partitions; the partition varies fastest.
    groups = jnp.transpose(index.reshape((cores, 16, -1)), (0, 2, 1)).reshape((cores, -1))[:, :valid]
    places = groups.astype(np.int32)[:, :, None] + lax.broadcasted_iota(np.int32, (1, 1, count), 2)
    places = jnp.clip(jnp.repeat(places.reshape((cores, -1)), 16, axis=0), 0, data.shape[1] - 1)
    return jnp.take_along_axis(data, places, axis=1, mode="clip")


def gathered_shape(src_buffer: Any, index: Any, num_elem_per_idx: int, num_valid_indices: Any) -> tuple[int, ...]:
    """Returns the shape of the result of local_gather."""
    valid = math.prod(index.shape[1:]) * 16 if num_valid_indices is None else int(num_valid_indices)
    shape: tuple[int, ...] = (src_buffer.shape[0], valid, num_elem_per_idx)
    return shape if num_elem_per_idx > 1 else shape[:2]


def local_gather(
    dst: Any, src_buffer: Any, index: Any, num_elem_per_idx: int = 1, num_valid_indices: int | None = None
) -> None:
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
    shape = gathered_shape(data, index, num_elem_per_idx, num_valid_indices)
    target = destination(dst, shape)
    checks.dtype(index, "index of local_gather", np.uint16)
    checks.equal_dtypes(target, data, "dst of local_gather")
    checks.gpsimd_in_sbuf("local_gather", data, index, target)
    emit("local_gather", [data, index], [target], (int(num_elem_per_idx), shape[1]))


@lowering("shuffle")
def _lower_shuffle(context: Context, instruction: Instruction) -> Any:
    places = np.asarray(instruction.attributes)
    kept = places < 0
    (target,) = instruction.writes
    taken = jnp.take(context.read(instruction.reads[0]), np.where(kept, 0, places), axis=0).reshape(target.shape)
    if kept.any():
        shown = np.broadcast_to(~kept.reshape((-1,) + (1,) * (target.ndim - 1)), target.shape)
        taken = jnp.where(shown, taken, context.read(target).astype(taken.dtype))
    return taken


def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Any) -> None:
    """Copies partition `shuffle_mask[i]` of `src` to partition i of `dst` in every 32 partitions; 255 keeps the old values."""
    src, dst = checks.on_chip(src, "src"), checks.on_chip(dst, "dst")
    checks.equal_dtypes(dst, src, "dst of nc_stream_shuffle")
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
    emit("shuffle", [src, dst], [dst], tuple(places))


@lowering("nonzero_with_count")
def _lower_nonzero(context: Context, instruction: Instruction) -> Any:
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
    return jnp.where(rows, value, flat(context.read(target)))


def nonzero_with_count(dst: Any, src: Any, index_offset: int = 0, padding_val: int = -1) -> None:
    """Writes on partitions 0, 16, 32, …: the positions of nonzero elements, padding, and their count."""
    needs(nc_version.gen3, "nonzero_with_count")
    src, dst = checks.on_chip(src, "src"), checks.on_chip(dst, "dst")
    if math.prod(dst.shape[1:]) != math.prod(src.shape[1:]) + 1:
        raise NkiValueError(
            "err_shape_mismatch", f"dst has one element more per partition than src, not {dst.shape}, {src.shape}"
        )
    checks.in_sbuf("nonzero_with_count", dst, src)
    checks.dtype(src, "src of nonzero_with_count", np.float32, np.int32)
    checks.dtype(dst, "dst of nonzero_with_count", int32)
    emit("nonzero_with_count", [src, dst], [dst], (int(index_offset), int(padding_val)))


@lowering("topk")
def _lower_topk(context: Context, instruction: Instruction) -> Any:
    n = int(instruction.attributes)
    data = flat(to_float(context.read(instruction.reads[0])))
    place = lax.broadcasted_iota(np.int32, data.shape, 1)
    values, places = lax.sort((-data, place), dimension=1, num_keys=1)
    return -values[:, :n], places[:, :n]


def topk(val_dst: Any, idx_dst: Any, src: Any, n: int) -> None:
    """Finds the n largest elements per partition, in descending order, and their positions."""
    src = checks.on_chip(src, "src")
    emit("topk", [src], [checks.on_chip(val_dst, "val_dst"), checks.on_chip(idx_dst, "idx_dst")], int(n))
