"""The vector engine: the eight largest elements and their positions, and runs of equal ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import is_float
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import destination, flat
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, lowering, masked, to_float
from nki_interpreter.operators import emit
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor, shown_of

_BIG = np.int32(1 << 30)


def _searched(data: Any, what: str, vals: Any = None) -> tuple[NkiTensor, NkiTensor]:
    """Checks a tile of 8 to 16,384 elements per partition, and eight values per partition if some are given."""
    name = "src" if vals is None else "data"
    data = checks.on_chip(data, name)
    vals = data if vals is None else checks.on_chip(vals, "vals")
    width = math.prod(data.shape[1:])
    if not 8 <= width <= 16_384:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit", f"{what} takes 8 to 16384 elements per partition, not {width}"
        )
    if vals is not data and math.prod(vals.shape[1:]) != 8:
        raise NkiValueError("err_shape_mismatch", f"vals has 8 elements per partition, not {vals.shape}")
    return data, vals


@lowering("max8")
def _lower_max8(context: Context, instruction: Instruction) -> Any:
    (source,) = instruction.reads
    value = flat(masked(to_float(context.read(source)), source, -math.inf))
    return lax.rev(lax.sort(value, dimension=1)[:, -8:], (1,))


def max8(dst: Any, src: Any) -> None:
    """Finds the eight largest elements per partition, in descending order."""
    src, _ = _searched(src, "max8")
    emit("max8", [src], [destination(dst, (src.shape[0], 8))])


def _inputs(context: Context, instruction: Instruction) -> tuple[Any, Any, Any, Any]:
    """Returns a search's data, values, each element's position, and which elements its mask shows."""
    source, vals = instruction.reads
    data = flat(to_float(context.read(source)))
    shown = shown_of(source)
    visible = np.bool_(True) if shown is None else flat(jnp.broadcast_to(shown, source.shape))
    return data, flat(to_float(context.read(vals))), lax.broadcasted_iota(np.int32, data.shape, 1), visible


def _positions(indices: list[Any], target: NkiTensor) -> Any:
    """Returns the found positions, and all ones for values that are absent."""
    index = jnp.concatenate(indices, axis=1)
    return jnp.where(index == _BIG, np.asarray(np.iinfo(target.dtype).max, target.dtype), index.astype(target.dtype))


@lowering("find_index8")
def _lower_find_index8(context: Context, instruction: Instruction) -> Any:
    data, vals, place, visible = _inputs(context, instruction)
    found: list[Any] = []
    for j in range(8):
        hit = (data == vals[:, j : j + 1]) & visible
        for i in range(j):
            # The search for a repeated value starts after its last match.
            again = vals[:, i : i + 1] == vals[:, j : j + 1]
            hit = hit & ~(again & (place <= found[i]))
        found.append(jnp.min(jnp.where(hit, place, _BIG), axis=1, keepdims=True))
    return _positions(found, instruction.writes[0])


def nc_find_index8(dst: Any, data: Any, vals: Any) -> None:
    """Finds each of eight values per partition.

    Writes the first position of each; for a repeated value the next position, for an absent value all ones.
    """
    data, vals = _searched(data, "nc_find_index8", vals)
    target = destination(dst, (data.shape[0], 8))
    if is_float(target.dtype):
        raise NkiTypeError("err_unsupported_dtype", f"indices are uint16 or uint32, not {target.dtype}")
    emit("find_index8", [data, vals], [target])


@lowering("match_replace8")
def _lower_match_replace8(context: Context, instruction: Instruction) -> Any:
    imm, backwards = instruction.attributes
    data, vals, place, visible = _inputs(context, instruction)
    found: dict[int, Any] = {}
    free = jnp.broadcast_to(visible, data.shape)
    for j in reversed(range(8)) if backwards else range(8):
        hit = (data == vals[:, j : j + 1]) & free
        index = jnp.min(jnp.where(hit, place, _BIG), axis=1, keepdims=True)
        free = free & (place != index)
        data = jnp.where(place == index, np.float32(imm), data)
        found[j] = index
    return data, *(_positions([found[j] for j in range(8)], t) for t in instruction.writes[1:])


def nc_match_replace8(dst: Any, data: Any, vals: Any, imm: Any, dst_idx: Any = None) -> None:
    """Replaces the first match of each of eight values by `imm`, and writes its position to `dst_idx`."""
    data, vals = _searched(data, "nc_match_replace8", vals)
    writes = [destination(dst, data.shape)] + ([] if dst_idx is None else [dst_idx])
    emit("match_replace8", [data, vals], writes, (float(imm), not current().older))


@lowering("sequence_bounds")
def _lower_sequence_bounds(context: Context, instruction: Instruction) -> Any:
    data = flat(to_float(context.read(instruction.reads[0])))
    rows, n = data.shape
    place = lax.broadcasted_iota(np.float32, data.shape, 1)
    edge = jnp.full((rows, 1), np.nan, np.float32)
    begins = data != jnp.concatenate([edge, data[:, :-1]], axis=1)
    ends = data != jnp.concatenate([data[:, 1:], edge], axis=1)
    start = lax.cummax(jnp.where(begins, place, np.float32(-1)), axis=1)
    stop = lax.cummin(jnp.where(ends, place + 1, np.float32(n)), axis=1, reverse=True)
    start, stop = jnp.where(data == 0, np.float32(n), start), jnp.where(data == 0, np.float32(-1), stop)
    return jnp.stack([start, stop], axis=1)


def sequence_bounds(dst: Any, segment_ids: Any) -> None:
    """Returns start and end of the run of equal segment ids around each element; [n, -1] for id 0 (padding)."""
    data = checks.on_chip(segment_ids, "segment_ids")
    for tile, what in ((dst, "dst of sequence_bounds"), (data, "segment_ids")):
        checks.dtype(tile, what, np.float32, np.int32)
    emit("sequence_bounds", [data], [destination(dst, (data.shape[0], 2, math.prod(data.shape[1:])))])
