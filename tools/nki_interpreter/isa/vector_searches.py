"""The vector engine: the eight largest elements and their positions, and runs of equal ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import is_float, uint32
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import (
    destination,
    fitted,
    flat,
)
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, lowering, masked, to_float
from nki_interpreter.operators import (
    emit,
)
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor, shown_of

_BIG = np.int32(1 << 30)


def _eight(data: NkiTensor, what: str) -> None:
    width = math.prod(data.shape[1:])
    if current().check and not 8 <= width <= 16_384:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit", f"{what} takes 8 to 16384 elements per partition, not {width}"
        )


@lowering("max8")
def _lower_max8(context: Context, instruction: Instruction) -> None:
    (source,) = instruction.reads
    value = flat(masked(to_float(context.read(source)), source, -math.inf))
    ordered = lax.sort(value, dimension=1)
    target = instruction.writes[0]
    context.write(target, fitted(lax.rev(ordered[:, -8:], (1,)), target))


def max8(dst: NkiTensor | None, src: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Finds the eight largest elements per partition, in descending order."""
    src = checks.on_chip(src, "src").with_mask(mask)
    _eight(src, "max8")
    target = destination(dst, (src.shape[0], 8), dtype or src.dtype, [], None)
    emit("max8", [src], [target])
    return target


@lowering("find_index8")
def _lower_find_index8(context: Context, instruction: Instruction) -> None:
    source, vals = instruction.reads
    data = flat(to_float(context.read(source)))
    shown = shown_of(source)
    wanted = flat(to_float(context.read(vals)))
    place = lax.broadcasted_iota(np.int32, data.shape, 1)
    found: list[Any] = []
    for j in range(8):
        hit = data == wanted[:, j : j + 1]
        if shown is not None:
            hit = hit & flat(jnp.broadcast_to(shown, source.shape))
        for i in range(j):
            # The search for a repeated value starts after its last match.
            again = wanted[:, i : i + 1] == wanted[:, j : j + 1]
            hit = hit & ~(again & (place <= found[i]))
        found.append(jnp.min(jnp.where(hit, place, _BIG), axis=1, keepdims=True))
    index = jnp.concatenate(found, axis=1)
    target = instruction.writes[0]
    missing = np.asarray(np.iinfo(target.dtype).max, target.dtype)
    context.write(target, fitted(jnp.where(index == _BIG, missing, index.astype(target.dtype)), target))


def nc_find_index8(dst: NkiTensor | None, data: Any, vals: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Finds each of eight values per partition.

    Writes the first position of each; for a repeated value the next position, for an absent value all ones.
    """
    data, vals = checks.on_chip(data, "data").with_mask(mask), checks.on_chip(vals, "vals")
    _eight(data, "nc_find_index8")
    if math.prod(vals.shape[1:]) != 8:
        raise NkiValueError("err_shape_mismatch", f"vals has 8 elements per partition, not {vals.shape}")
    target = destination(dst, (data.shape[0], 8), dtype or uint32, [], None)
    if is_float(target.dtype):
        raise NkiTypeError("err_unsupported_dtype", f"indices are uint16 or uint32, not {target.dtype}")
    emit("find_index8", [data, vals], [target])
    return target


@lowering("match_replace8")
def _lower_match_replace8(context: Context, instruction: Instruction) -> None:
    imm, backwards = instruction.attributes
    source, vals = instruction.reads
    own = flat(context.read(source))
    data = to_float(own)
    shown = shown_of(source)
    wanted = flat(to_float(context.read(vals)))
    place = lax.broadcasted_iota(np.int32, data.shape, 1)
    visible = None if shown is None else flat(jnp.broadcast_to(shown, source.shape))
    found: dict[int, Any] = {}
    free = jnp.ones(data.shape, np.bool_) if visible is None else visible
    for j in reversed(range(8)) if backwards else range(8):
        hit = (data == wanted[:, j : j + 1]) & free
        index = jnp.min(jnp.where(hit, place, _BIG), axis=1, keepdims=True)
        free = free & (place != index)
        data = jnp.where(place == index, np.float32(imm), data)
        found[j] = index
    target, *rest = instruction.writes
    context.write(target, fitted(data, target))
    if rest:
        index = jnp.concatenate([found[j] for j in range(8)], axis=1)
        missing = np.asarray(np.iinfo(rest[0].dtype).max, rest[0].dtype)
        context.write(rest[0], fitted(jnp.where(index == _BIG, missing, index.astype(rest[0].dtype)), rest[0]))


def nc_match_replace8(
    dst: NkiTensor | None,
    data: Any,
    vals: Any,
    imm: Any,
    dst_idx: NkiTensor | None = None,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    """Replaces the first match of each of eight values by `imm`, and writes its position to `dst_idx`."""
    data, vals = checks.on_chip(data, "data"), checks.on_chip(vals, "vals")
    _eight(data, "nc_match_replace8")
    if math.prod(vals.shape[1:]) != 8:
        raise NkiValueError("err_shape_mismatch", f"vals has 8 elements per partition, not {vals.shape}")
    target = destination(dst, data.shape, dtype or data.dtype, [], None)
    writes = [target]
    if dst_idx is not None:
        rows = None
        if mask is not None:
            rows = np.broadcast_to(np.asarray(mask, np.bool_), data.shape).reshape(data.shape[0], -1).any(1)
        writes.append(dst_idx if rows is None else dst_idx.with_mask(rows.reshape(-1, *(1,) * (dst_idx.ndim - 1))))
    emit("match_replace8", [data.with_mask(mask), vals], writes, (float(imm), not current().older))
    return target


@lowering("sequence_bounds")
def _lower_sequence_bounds(context: Context, instruction: Instruction) -> None:
    data = flat(to_float(context.read(instruction.reads[0])))
    rows, n = data.shape
    place = lax.broadcasted_iota(np.float32, data.shape, 1)
    edge = jnp.full((rows, 1), np.nan, np.float32)
    begins = data != jnp.concatenate([edge, data[:, :-1]], axis=1)
    ends = data != jnp.concatenate([data[:, 1:], edge], axis=1)
    start = lax.cummax(jnp.where(begins, place, np.float32(-1)), axis=1)
    stop = lax.cummin(jnp.where(ends, place + 1, np.float32(n)), axis=1, reverse=True)
    start, stop = jnp.where(data == 0, np.float32(n), start), jnp.where(data == 0, np.float32(-1), stop)
    target = instruction.writes[0]
    context.write(target, fitted(jnp.stack([start, stop], axis=1), target))


def sequence_bounds(dst: NkiTensor | None, segment_ids: Any, *, dtype: Any = None) -> NkiTensor:
    """Returns start and end of the run of equal segment ids around each element; [n, -1] for id 0 (padding)."""
    data = checks.on_chip(segment_ids, "segment_ids")
    shape = (data.shape[0], 2, math.prod(data.shape[1:]))
    target = destination(dst, shape, dtype or data.dtype, [], None)
    emit("sequence_bounds", [data], [target])
    return target
