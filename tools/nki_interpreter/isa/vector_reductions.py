"""The vector engine: reductions, scans, statistics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import is_float
from nki_interpreter.elementwise import BINARY, BITWISE, check_op, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import ReduceCmd, destination, flat, full, operand, register
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, lowering, masked, to_float
from nki_interpreter.operators import apply_binary, emit, immediate, neutral_of, reduce_values
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor


def reduced_shape(data: NkiTensor, axis: Any, keepdims: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of `tensor_reduce`, and the shape of its result, of two dimensions at least.

    The axes are the tile's free axes, or axes of a pattern padded to five dimensions. For a tile with more than one free axis, a
    single 1 means its axis 1. Numbers past the tile's rank count in [partition, 4 free axes].
    """
    axes = set()
    for one in [axis] if isinstance(axis, int | np.integer) else list(axis):
        place = int(one) + data.ndim if one < 0 else int(one)
        if place >= data.ndim:
            place -= 5 - data.ndim
        if not 0 < place < data.ndim:
            raise NkiValueError(
                "err_unsupported_reduce_axis", f"axis {one} is not a free axis of a tile of {data.ndim} dimensions"
            )
        axes.add(place)
    if keepdims:
        shape = tuple(1 if i in axes else n for i, n in enumerate(data.shape))
    else:
        shape = tuple(n for i, n in enumerate(data.shape) if i not in axes)
    return tuple(sorted(axes)), shape if len(shape) > 1 else (*shape, 1)


def tensor_reduce(dst: Any, op: Any, data: Any, axis: Any, negate: bool = False, keepdims: bool = False) -> None:
    data = checks.on_chip(data, "data")
    axes, shape = reduced_shape(data, axis, keepdims)
    target = destination(dst, shape)
    name = op_name(op)
    if name in BITWISE and (negate or is_float(data.dtype) or is_float(target.dtype)):
        raise NkiTypeError(
            "err_bitwise_on_float",
            f"'{name}' reduces integers to integers and does not negate: {data.dtype} to {target.dtype}",
        )
    emit("reduce", [data], [target], (name, axes, bool(negate), 0, True))


@lowering("partition_reduce")
def _lower_partition_reduce(context: Context, instruction: Instruction) -> Any:
    (source,) = instruction.reads
    name = str(instruction.attributes)
    value = context.read(source)
    return reduce_values(name, masked(value, source, neutral_of(name, value.dtype)), (0,))


def tensor_partition_reduce(dst: Any, op: Any, data: Any) -> None:
    data = checks.on_chip(data, "data")
    emit("partition_reduce", [data], [destination(dst, (1, *data.shape[1:]))], op_name(op))


def scan(step: Any, first: Any, columns: list[Any]) -> Any:
    """Returns the results of `step(carry, column…)` along the second dimension of [partitions, n] arrays."""

    def body(carry: Any, at: Any) -> Any:
        carry = step(carry, *at)
        return carry, carry

    _, out = lax.scan(body, first, tuple(jnp.transpose(c) for c in columns))
    return jnp.transpose(out)


def _step(op: str, swapped: bool, a: Any, b: Any) -> Any:
    return to_float(apply_binary(op, *((b, a) if swapped else (a, b))))


@lowering("scan")
def _lower_scan(context: Context, instruction: Instruction) -> Any:
    op0, op1, reverse0, reverse1, fixed = instruction.attributes
    a, b, *first = (flat(to_float(context.read(t))) for t in instruction.reads)
    initial = immediate(fixed).astype(np.float32) if fixed is not None else first[0][:, 0]

    # Columns run one after the other even for r = a·r + b: an associative form would round differently.
    def step(r: Any, x: Any, y: Any) -> Any:
        return _step(op1, reverse1, apply_binary(op0, *((r, x) if reverse0 else (x, r))), y)

    return scan(step, jnp.broadcast_to(initial, (a.shape[0],)), [a, b])


def tensor_tensor_scan(
    dst: Any,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """Computes `r = (data0 op0 r) op1 data1` along the flattened free dimensions, from `initial`."""
    a, b = checks.on_chip(data0, "data0"), checks.on_chip(data1, "data1")
    checks.one_in_psum("tensor_tensor_scan", a, b, "data0", "data1")
    if a.size != b.size:
        raise NkiValueError("err_shape_mismatch", f"data0 has shape {a.shape} and data1 {b.shape}")
    fixed, tiles = operand(initial, a, "initial")
    checks.operands_in_psum("tensor_tensor_scan", [a, b, *tiles])
    names = tuple(check_op(op_name(op), BINARY, "a scan") for op in (op0, op1))
    attributes = (*names, bool(reverse0), bool(reverse1), fixed)
    emit("scan", [a, b, *tiles], [destination(dst, a.shape)], attributes)


@lowering("cumulative")
def _lower_cumulative(context: Context, instruction: Instruction) -> Any:
    op0, op1, fixed, command, initial = instruction.attributes
    source, *reads = instruction.reads
    data = flat(to_float(context.read(source)))
    other = immediate(fixed) if fixed is not None else full(context.read(reads.pop(0)), None, data)
    values = jnp.broadcast_to(to_float(apply_binary(op0, data, other)), data.shape)
    if command == ReduceCmd.reset_reduce:
        before: Any = np.float32(0 if op1 == "subtract" else neutral_of(op1, np.float32))
    elif initial is not None:
        before = immediate(initial).astype(np.float32)
    else:
        before = flat(to_float(context.read(reads.pop(0))))[:, 0]
    first = jnp.broadcast_to(before, (data.shape[0],))
    out = scan(lambda r, x: _step(op1, False, x, r), first, [values])
    return out, out[:, -1:]


def tensor_scalar_cumulative(
    dst: Any, src: Any, op0: Any, op1: Any, imm0: Any, imm1: Any = None, reduce_cmd: Any = ReduceCmd.reset_reduce
) -> None:
    """Computes `r = (src op0 imm0) op1 r` along the flattened free dimensions; r is the engine's register."""
    src, dst = checks.on_chip(src, "src"), checks.on_chip(dst, "dst")
    if not current().older:
        checks.arithmetic("tensor_scalar_cumulative", op0, op1)
    command = ReduceCmd(int(reduce_cmd))
    fixed, reads = operand(imm0, src, "imm0")
    registers = register("vector", src.shape[0])
    initial = None
    if command is ReduceCmd.load_reduce:
        initial, loaded = operand(imm1, src, "imm1")
        reads = reads + loaded
    elif command is ReduceCmd.reduce:
        reads = [*reads, registers]
    emit("cumulative", [src, *reads], [dst, registers], (op_name(op0), op_name(op1), fixed, int(command), initial))


@lowering("bn_stats")
def _lower_bn_stats(context: Context, instruction: Instruction) -> Any:
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
    return jnp.concatenate(parts, axis=1)


def bn_stats(dst: Any, data: Any) -> None:
    """Writes, per partition, count, mean and variance · count of the even elements, then of the odd elements."""
    data = checks.on_chip(data, "data")
    width = math.prod(data.shape[1:])
    if width > checks.BN_STATS_FREE:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit",
            f"bn_stats takes {checks.BN_STATS_FREE} elements per partition, not {width}",
        )
    emit("bn_stats", [data], [destination(dst, (data.shape[0], 6))])


@lowering("bn_aggr")
def _lower_bn_aggr(context: Context, instruction: Instruction) -> Any:
    data = flat(to_float(context.read(instruction.reads[0])))
    groups = data.reshape((data.shape[0], -1, 3))
    count, mean, spread = groups[:, :, 0], groups[:, :, 1], groups[:, :, 2]
    total = jnp.sum(count, axis=1, keepdims=True)
    average = jnp.sum(count * mean, axis=1, keepdims=True) / total
    variance = jnp.sum(spread + count * lax.square(mean - average), axis=1, keepdims=True) / total
    return jnp.concatenate([average, variance], axis=1)


def bn_aggr(dst: Any, data: Any) -> None:
    """Combines the results of several `bn_stats` to mean and variance."""
    data = checks.on_chip(data, "data")
    if math.prod(data.shape[1:]) % 3:
        raise NkiValueError("err_bn_aggr_input", f"bn_aggr takes groups of 3 elements, not {data.shape}")
    emit("bn_aggr", [data], [destination(dst, (data.shape[0], 2))])
