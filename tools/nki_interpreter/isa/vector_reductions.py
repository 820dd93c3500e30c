"""The vector engine: reductions, scans, statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import is_float, promoted
from nki_interpreter.elementwise import BINARY, BITWISE, check_op, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import (
    ReduceCmd,
    destination,
    fitted,
    flat,
    full,
    operand,
    register,
)
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, lowering, masked, to_float
from nki_interpreter.operators import (
    apply_binary,
    emit,
    immediate,
    neutral_of,
    reduce_values,
)
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor


def reduce_axes(data: NkiTensor, axis: Any) -> tuple[int, ...]:
    """Returns the axes of `tensor_reduce`: the tile's free axes, or axes of a pattern padded to five dimensions.

    For a tile with more than one free axis, a single 1 means its axis 1. Numbers past the tile's rank count in
    [partition, 4 free axes].
    """
    given = [axis] if isinstance(axis, int | np.integer) else list(axis)
    found = []
    for one in given:
        place = int(one) + data.ndim if one < 0 else int(one)
        if place >= data.ndim:
            place -= 5 - data.ndim
        if not 0 < place < data.ndim:
            raise NkiValueError(
                "err_unsupported_reduce_axis", f"axis {one} is not a free axis of a tile of {data.ndim} dimensions"
            )
        found.append(place)
    return tuple(sorted(set(found)))


def tensor_reduce(
    dst: NkiTensor | None,
    op: Any,
    data: Any,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    data = checks.on_chip(data, "data")
    axes = reduce_axes(data, axis)
    kept = tuple(1 if i in axes else n for i, n in enumerate(data.shape))
    shape = kept if keepdims else tuple(n for i, n in enumerate(kept) if i not in axes)
    shape = shape if len(shape) > 1 else (*shape, 1)
    target = destination(dst, shape, dtype or data.dtype, [], None)
    source = data.with_mask(mask)
    if source.mask is not None:
        rows = np.broadcast_to(source.mask, data.shape).any(axis=axes, keepdims=True)
        target = target.with_mask(rows.reshape(target.shape))
    name = op_name(op)
    if name in BITWISE and (negate or is_float(data.dtype) or is_float(target.dtype)) and current().check:
        raise NkiTypeError(
            "err_bitwise_on_float",
            f"'{name}' reduces integers to integers and does not negate: {data.dtype} to {target.dtype}",
        )
    emit("reduce", [source], [target], (name, axes, bool(negate), 0, True))
    return target


@lowering("partition_reduce")
def _lower_partition_reduce(context: Context, instruction: Instruction) -> None:
    (source,) = instruction.reads
    value = context.read(source)
    value = masked(value, source, neutral_of(str(instruction.attributes), value.dtype))
    target = instruction.writes[0]
    context.write(target, fitted(reduce_values(str(instruction.attributes), value, (0,)), target))


def tensor_partition_reduce(
    dst: NkiTensor | None, op: Any, data: Any, *, dtype: Any = None, mask: Any = None
) -> NkiTensor:
    data = checks.on_chip(data, "data")
    target = destination(dst, (1, *data.shape[1:]), dtype or data.dtype, [], None)
    emit("partition_reduce", [data.with_mask(mask)], [target], op_name(op))
    return target


def scan(step: Any, first: Any, columns: list[Any]) -> Any:
    """Returns the results of `step(carry, column…)` along the second dimension of [partitions, n] arrays."""

    def body(carry: Any, at: Any) -> Any:
        carry = step(carry, *at)
        return carry, carry

    _, out = lax.scan(body, first, tuple(jnp.transpose(c) for c in columns))
    return jnp.transpose(out)


@lowering("scan")
def _lower_scan(context: Context, instruction: Instruction) -> None:
    op0, op1, reverse0, reverse1, fixed = instruction.attributes
    reads = list(instruction.reads)
    a, b = (flat(to_float(context.read(t))) for t in reads[:2])
    initial = immediate(fixed).astype(np.float32) if fixed is not None else flat(to_float(context.read(reads[2])))[:, 0]
    first = jnp.broadcast_to(initial, (a.shape[0],))
    target = instruction.writes[0]

    # Columns run one after the other even for r = a·r + b: an associative form would round differently.
    def step(r: Any, x: Any, y: Any) -> Any:
        r = apply_binary(op0, *((r, x) if reverse0 else (x, r)))
        return to_float(apply_binary(op1, *((y, r) if reverse1 else (r, y))))

    context.write(target, fitted(scan(step, first, [a, b]), target))


def tensor_tensor_scan(
    dst: NkiTensor | None,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    """Computes `r = (data0 op0 r) op1 data1` along the flattened free dimensions, from `initial`."""
    a, b = checks.on_chip(data0, "data0"), checks.on_chip(data1, "data1")
    checks.one_in_psum("tensor_tensor_scan", a, b, "data0", "data1")
    if a.size != b.size:
        raise NkiValueError("err_shape_mismatch", f"data0 has shape {a.shape} and data1 {b.shape}")
    fixed, tensors = operand(initial, a, "initial")
    checks.operands_in_psum("tensor_tensor_scan", [a, b, *tensors])
    target = destination(dst, a.shape, dtype or promoted(a.dtype, b.dtype), [a, b], mask)
    names = tuple(check_op(op_name(op), BINARY, "a scan") for op in (op0, op1))
    emit("scan", [a, b, *tensors], [target], (*names, bool(reverse0), bool(reverse1), fixed))
    return target


@lowering("cumulative")
def _lower_cumulative(context: Context, instruction: Instruction) -> None:
    op0, op1, reverse0, fixed, command, initial = instruction.attributes
    reads = list(instruction.reads)
    data = flat(to_float(context.read(reads.pop(0))))
    other = immediate(fixed) if fixed is not None else full(context.read(reads.pop(0)), None, data)
    values = to_float(apply_binary(op0, *((other, data) if reverse0 else (data, other))))
    values = jnp.broadcast_to(values, data.shape)
    if command == ReduceCmd.reset_reduce:
        before: Any = np.float32(0 if op1 == "subtract" else neutral_of(op1, np.float32))
    elif initial is not None:
        before = immediate(initial).astype(np.float32)
    else:
        before = flat(to_float(context.read(reads.pop(0))))[:, 0]
    first = jnp.broadcast_to(before, (data.shape[0],))
    out = scan(lambda r, x: to_float(apply_binary(op1, x, r)), first, [values])
    target, registers = instruction.writes
    context.write(target, fitted(out, target))
    context.write(registers, out[:, -1:])


def tensor_scalar_cumulative(
    dst: NkiTensor,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reverse0: bool = False,
) -> NkiTensor:
    """Computes `r = (src op0 imm0) op1 r` along the flattened free dimensions; r is the engine's register."""
    src, dst = checks.on_chip(src, "src"), checks.on_chip(dst, "dst")
    command = ReduceCmd(int(reduce_cmd))
    fixed, reads = operand(imm0, src, "imm0")
    registers = register("vector", src.shape[0])
    initial = None
    if command is ReduceCmd.load_reduce:
        initial, loaded = operand(imm1, src, "imm1")
        reads = reads + loaded
    elif command is ReduceCmd.reduce:
        reads = [*reads, registers]
    attributes = (op_name(op0), op_name(op1), bool(reverse0), fixed, int(command), initial)
    emit("cumulative", [src, *reads], [dst, registers], attributes)
    return dst


@lowering("bn_stats")
def _lower_bn_stats(context: Context, instruction: Instruction) -> None:
    data = flat(to_float(context.read(instruction.reads[0])))
    parts = []
    for half in (data[:, 0::2], data[:, 1::2]):
        n = half.shape[1]
        if not n:
            parts.append(jnp.zeros((data.shape[0], 3), np.float32))
            continue
        mean = jnp.mean(half, axis=1, keepdims=True)
        spread = jnp.sum(lax.square(half - mean), axis=1, keepdims=True)
        parts.append(jnp.concatenate([jnp.full_like(mean, n), mean, spread], axis=1))
    target = instruction.writes[0]
    context.write(target, fitted(jnp.concatenate(parts, axis=1), target))


def bn_stats(dst: NkiTensor | None, data: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Writes, per partition, count, mean and variance · count of the even elements, then of the odd elements."""
    data = checks.on_chip(data, "data")
    source = trimmed(data, mask)
    width = math.prod(source.shape[1:])
    if current().check and width > checks.BN_STATS_FREE:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit",
            f"bn_stats takes {checks.BN_STATS_FREE} elements per partition, not {width}",
        )
    target = destination(dst, (data.shape[0], 6), dtype or data.dtype, [], None)
    if source.shape[0] != data.shape[0]:
        target = target[0 : source.shape[0]]
    emit("bn_stats", [source], [target])
    return target


def trimmed(data: NkiTensor, mask: Any) -> NkiTensor:
    """Returns the box of a tile's elements that a mask selects."""
    if mask is None:
        return data
    from nki_interpreter.indices import box

    bounds = box(np.broadcast_to(np.asarray(mask, np.bool_), data.shape))
    if bounds is None:
        raise NkiValueError("err_mask_shape", "the mask of this instruction has to show a box")
    if all(a == 0 and b == n for (a, b), n in zip(bounds, data.shape, strict=True)):
        return data
    return data[tuple(slice(a, b) for a, b in bounds)]


@lowering("bn_aggr")
def _lower_bn_aggr(context: Context, instruction: Instruction) -> None:
    data = flat(to_float(context.read(instruction.reads[0])))
    groups = data.reshape((data.shape[0], -1, 3))
    count, mean, spread = groups[:, :, 0], groups[:, :, 1], groups[:, :, 2]
    total = jnp.sum(count, axis=1, keepdims=True)
    average = jnp.sum(count * mean, axis=1, keepdims=True) / total
    variance = jnp.sum(spread + count * lax.square(mean - average), axis=1, keepdims=True) / total
    target = instruction.writes[0]
    context.write(target, fitted(jnp.concatenate([average, variance], axis=1), target))


def bn_aggr(dst: NkiTensor | None, data: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Combines the results of several `bn_stats` to mean and variance."""
    data = trimmed(checks.on_chip(data, "data"), mask)
    if math.prod(data.shape[1:]) % 3:
        raise NkiValueError("err_bn_aggr_input", f"bn_aggr takes groups of 3 elements, not {data.shape}")
    target = destination(dst, (data.shape[0], 2), dtype or data.dtype, [], None)
    emit("bn_aggr", [data], [target])
    return target
