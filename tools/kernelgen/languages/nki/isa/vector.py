"""The vector engine: element by element with tiles and per-partition operands, reductions, scans, statistics, searches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kernelgen.languages.nki import checks
from kernelgen.languages.nki.dtypes import boolean, float32, is_float, promoted, uint32
from kernelgen.languages.nki.elementwise import BINARY, BITWISE, COMPARISONS, check_op, op_name
from kernelgen.languages.nki.errors import NkiTypeError, NkiValueError
from kernelgen.languages.nki.isa.common import (
    ReduceCmd,
    Reduction,
    destination,
    fitted,
    flat,
    full,
    operand,
    reduced,
    register,
    write_reduced,
)
from kernelgen.languages.nki.lazy import jnp, lax
from kernelgen.languages.nki.lower import Context, lowering, masked, shown_of, to_float
from kernelgen.languages.nki.operators import (
    apply_binary,
    assign,
    emit,
    immediate,
    neutral_of,
    number,
    reduce_values,
    scalar_tensor,
)
from kernelgen.languages.nki.program import Instruction, current
from kernelgen.languages.nki.tensors import Tensor

_BIG = np.int32(1 << 30)


def _result_dtype(name: str, *operands: Tensor) -> Any:
    if name in COMPARISONS and current().older:
        return boolean
    return promoted(*(t.dtype for t in operands))


# With tiles


@lowering("tensor_tensor")
def _lower_tensor_tensor(context: Context, instruction: Instruction) -> None:
    a, b = (context.read(t) for t in instruction.reads)
    target = instruction.writes[0]
    if a.shape != b.shape:
        b = b.reshape(a.shape) if b.size == a.size else b
    context.write(target, fitted(apply_binary(str(instruction.attributes), a, b), target))


def tensor_tensor(
    dst: Tensor | None, data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> Tensor:
    """`data1 op data2`; equal shapes."""
    name = check_op(op_name(op), BINARY, "tensor_tensor")
    a, b = checks.on_chip(data1, "data1"), checks.on_chip(data2, "data2")
    if a.size != b.size or a.shape[0] != b.shape[0]:
        raise NkiValueError(
            "err_shape_mismatch", f"data1 has shape {a.shape} and data2 {b.shape}; they have to be equal"
        )
    if name in BITWISE and (is_float(a.dtype) or is_float(b.dtype)):
        raise NkiTypeError("err_bitwise_on_float", f"'{name}' takes integers, not {a.dtype} and {b.dtype}")
    checks.vector_operands("tensor_tensor", getattr(engine, "name", ""), [a, b])
    target = destination(dst, a.shape, dtype or _result_dtype(name, a, b), [a, b], mask)
    emit("tensor_tensor", [a, b], [target], name)
    return target


# With one operand per partition


@lowering("tensor_scalar")
def _lower_tensor_scalar(context: Context, instruction: Instruction) -> None:
    steps, reduction = instruction.attributes
    reads = list(instruction.reads)
    source = reads.pop(0)
    value = context.read(source)
    shape = value.shape
    for name, fixed, swapped, tile in steps:
        other = immediate(fixed) if fixed is not None else context.read(reads.pop(0))
        if fixed is None:
            other = other.reshape(shape) if tile else full(other, None, value)
        value = apply_binary(name, *((other, value) if swapped else (value, other)))
        value = jnp.broadcast_to(value, shape)
        if value.dtype == np.bool_:
            value = value.astype(np.float32)
    target, *rest = instruction.writes
    context.write(target, fitted(value, target))
    if reduction is not None:
        values = [context.read(t) for t in reads]
        write_reduced(context, rest, reduced(reduction, values, value, source))


def _steps(data: Tensor, steps: list[tuple[Any, Any, bool, bool]]) -> tuple[list[Any], list[Tensor]]:
    described: list[Any] = []
    reads: list[Tensor] = []
    for number_, (op, value, swapped, tile) in enumerate(steps):
        if op is None:
            continue
        name = check_op(op_name(op), BINARY, "tensor_scalar")
        if tile:
            other = checks.on_chip(value, f"operand{number_}")
            if other.size != data.size:
                raise NkiValueError(
                    "err_shape_mismatch", f"operand{number_} has shape {other.shape}, data {data.shape}"
                )
            described.append((name, None, bool(swapped), True))
            reads.append(other)
            continue
        fixed, tensors = operand(0 if value is None else value, data, f"operand{number_}")
        if name in BITWISE and is_float(data.dtype):
            raise NkiTypeError("err_bitwise_on_float", f"'{name}' takes integers, not {data.dtype}")
        described.append((name, fixed, bool(swapped), False))
        reads += tensors
    if len(described) == 2 and len({name in BITWISE for name, *_ in described}) == 2:
        raise NkiTypeError("err_mixed_bitwise", "bitwise and arithmetic operations can't be mixed in one instruction")
    return described, reads


def _chain(
    dst: Tensor | None,
    data: Any,
    steps: list[tuple[Any, Any, bool, bool]],
    dtype: Any,
    mask: Any,
    reduction: Reduction | None = None,
) -> Tensor:
    data = checks.on_chip(data, "data")
    described, reads = _steps(data, steps)
    if dtype is None and described:
        dtype = boolean if described[-1][0] in COMPARISONS and current().older else data.dtype
    target = destination(dst, data.shape, dtype or data.dtype, [data], mask)
    source = data.with_mask(mask)
    attributes: Any = (tuple(described), None)
    writes = [target]
    if reduction is not None:
        attributes = (tuple(described), reduction.attributes)
        reads += reduction.reads
        writes += reduction.writes
    emit("tensor_scalar", [source, *reads], writes, attributes)
    return target


def tensor_scalar(
    dst: Tensor | None,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """`(data op0 operand0) op1 operand1`, operands numbers or one element per partition; `reverse` swaps a step's sides."""
    return _chain(dst, data, [(op0, operand0, reverse0, False), (op1, operand1, reverse1, False)], dtype, mask)


def scalar_tensor_tensor(
    dst: Tensor | None,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """`(data op0 operand0) op1 operand1` with a tile as operand1."""
    return _chain(dst, data, [(op0, operand0, reverse0, False), (op1, operand1, reverse1, True)], dtype, mask)


def tensor_scalar_reduce(
    dst: Tensor | None,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Tensor | None,
    reverse0: bool = False,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_init: Any = None,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """`data op0 operand0`, and that reduced over the free dimensions into `reduce_res`."""
    data = checks.on_chip(data, "data")
    reduction = Reduction("vector", data, reduce_cmd, reduce_op, reduce_res, reduce_init)
    return _chain(dst, data, [(op0, operand0, reverse0, False)], dtype, mask, reduction)


# Copies


def tensor_copy(dst: Tensor | None, src: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    src = checks.on_chip(src, "src")
    target = destination(dst, src.shape, dtype or src.dtype, [src], mask)
    assign(target, src, mask=None)
    return target


@lowering("select")
def _lower_select(context: Context, instruction: Instruction) -> None:
    fixed_true, fixed_false, swapped, reduction = instruction.attributes
    reads = list(instruction.reads)
    predicate = reads.pop(0)
    target, *rest = instruction.writes
    shape = predicate.shape if fixed_true is not None else reads[0].shape
    condition = context.read(predicate).reshape(shape) != 0
    sources = []
    for fixed in (fixed_true, fixed_false):
        if fixed is not None:
            sources.append(immediate(fixed))
            continue
        value = context.read(reads.pop(0))
        sources.append(value.reshape(shape) if value.size == math.prod(shape) else full(value, None, condition))
    if swapped:
        condition = ~condition
    a, b = sources
    if a.dtype != b.dtype:
        a, b = to_float(a), to_float(b)
    value = jnp.where(condition, a, b)
    if reduction is not None:
        values = [context.read(t) for t in reads]
        write_reduced(context, rest, reduced(reduction, values, value, target.replaced(mask=predicate.mask)))
    context.write(target, fitted(jnp.broadcast_to(value, shape), target))


def _select(
    target: Tensor, predicate: Tensor, yes: Any, no: Any, swapped: bool, reduction: Reduction | None = None
) -> None:
    reads = [predicate]
    fixed = []
    for value in (yes, no):
        fixed.append(number(value))
        if fixed[-1] is None:
            reads.append(checks.on_chip(value, "an operand of a selection"))
    writes = [target]
    attributes: Any = None
    if reduction is not None and reduction.active:
        reads += reduction.reads
        writes += reduction.writes
        attributes = reduction.attributes
    emit("select", reads, writes, (fixed[0], fixed[1], swapped, attributes))


def tensor_copy_predicated(
    dst: Tensor, src: Any, predicate: Any, reverse_pred: bool = False, *, mask: Any = None
) -> Tensor:
    """Copies `src` to `dst` where `predicate` is not 0; `dst` keeps the rest."""
    predicate = checks.on_chip(predicate, "predicate")
    target = dst.with_mask(mask)
    _select(target, predicate, src, dst, reverse_pred)
    return dst


def select_reduce(
    dst: Tensor,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Tensor | None = None,
    reduce_cmd: Any = ReduceCmd.idle,
    reduce_op: Any = np.maximum,
    reverse_pred: bool = False,
    *,
    mask: Any = None,
) -> Tensor:
    """Selects by a predicate and reduces what was selected over the free dimensions."""
    predicate = checks.on_chip(predicate, "predicate")
    active = int(reduce_cmd) != ReduceCmd.idle
    reduction = Reduction("vector", predicate, reduce_cmd, reduce_op, reduce_res if active else None)
    _select(dst.with_mask(mask), predicate.with_mask(mask), on_true, on_false, reverse_pred, reduction)
    return dst


@lowering("range_select")
def _lower_range_select(context: Context, instruction: Instruction) -> None:
    first, second, start, otherwise, reduction = instruction.attributes
    reads = list(instruction.reads)
    data = to_float(context.read(reads[0]))
    index = lax.broadcasted_iota(np.float32, (data.shape[0], data.size // data.shape[0]), 1) + np.float32(start)
    shown = apply_binary(first, index, flat(to_float(context.read(reads[1]))))
    shown = shown & apply_binary(second, index, flat(to_float(context.read(reads[2]))))
    value = jnp.where(shown, flat(data), np.float32(otherwise))
    target, *rest = instruction.writes
    context.write(target, fitted(value, target))
    if reduction is not None:
        write_reduced(context, rest, reduced(reduction, [context.read(t) for t in reads[3:]], value, reads[0]))


def range_select(
    dst: Tensor | None,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_res: Tensor | None = None,
    reduce_op: Any = np.maximum,
    range_start: Any = 0,
    on_false_value: Any = None,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """Keeps the elements whose place plus `range_start` compares true with both bounds (one per partition)."""
    data = checks.on_chip(on_true_tile, "on_true_tile")
    names = tuple(op_name(op) for op in (comp_op0, comp_op1))
    for bound in (bound0, bound1):
        checks.per_partition(checks.on_chip(bound, "a bound"), data, "a bound")
        if bound.dtype != float32:
            raise NkiTypeError(
                "err_range_select_bound_dtype", f"the bounds of range_select are float32, not {bound.dtype}"
            )
    reduction = Reduction("vector", data, reduce_cmd, reduce_op, reduce_res)
    target = destination(dst, data.shape, dtype or data.dtype, [data], mask)
    otherwise = float(np.finfo(np.float32).min) if on_false_value is None else float(on_false_value)
    emit(
        "range_select",
        [data.with_mask(mask), bound0, bound1, *reduction.reads],
        [target, *reduction.writes],
        (*names, float(range_start), otherwise, reduction.attributes),
    )
    return target


@lowering("fill_tile")
def _lower_fill_tile(context: Context, instruction: Instruction) -> None:
    (target,) = instruction.writes
    value = context.read(instruction.reads[0])
    context.write(target, jnp.broadcast_to(value.reshape((1,) * len(target.shape)), target.shape))


def memset(dst: Tensor | None, value: Any, *, shape: Any = None, dtype: Any = None, mask: Any = None) -> Tensor:
    if dst is None:
        dst = destination(None, tuple(shape), dtype, [], mask)
    elif mask is not None:
        dst = dst.with_mask(mask)
    if number(value) is None:
        emit("fill_tile", [scalar_tensor(value)], [dst])
    else:
        assign(dst, value)
    return dst


# Reductions, scans, statistics


def reduce_axes(data: Tensor, axis: Any) -> tuple[int, ...]:
    """Returns the axes of `tensor_reduce`: real free axes, or those of a pattern padded to five dimensions.

    A single 1 of a tile with more free axes is its axis 1; numbers past its rank count in [partition, 4 free axes].
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
    dst: Tensor | None,
    op: Any,
    data: Any,
    axis: Any,
    negate: bool = False,
    keepdims: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
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
    emit("reduce", [source], [target], (op_name(op), axes, bool(negate), 0))
    return target


@lowering("partition_reduce")
def _lower_partition_reduce(context: Context, instruction: Instruction) -> None:
    (source,) = instruction.reads
    value = context.read(source)
    value = masked(value, source, neutral_of(str(instruction.attributes), value.dtype))
    target = instruction.writes[0]
    context.write(target, fitted(reduce_values(str(instruction.attributes), value, (0,)), target))


def tensor_partition_reduce(dst: Tensor | None, op: Any, data: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
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
    if op0 == "multiply" and op1 == "add" and not reverse0 and not reverse1:
        pass  # r = a·r + b, as below; an associative form would round differently

    def step(r: Any, x: Any, y: Any) -> Any:
        r = apply_binary(op0, *((r, x) if reverse0 else (x, r)))
        return to_float(apply_binary(op1, *((y, r) if reverse1 else (r, y))))

    context.write(target, fitted(scan(step, first, [a, b]), target))


def tensor_tensor_scan(
    dst: Tensor | None,
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
) -> Tensor:
    """`r = (data0 op0 r) op1 data1` along the flattened free dimensions, from `initial`."""
    a, b = checks.on_chip(data0, "data0"), checks.on_chip(data1, "data1")
    if a.size != b.size:
        raise NkiValueError("err_shape_mismatch", f"data0 has shape {a.shape} and data1 {b.shape}")
    fixed, tensors = operand(initial, a, "initial")
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
    dst: Tensor,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reverse0: bool = False,
) -> Tensor:
    """`r = (src op0 imm0) op1 r` along the flattened free dimensions; r is the engine's register."""
    src = checks.on_chip(src, "src")
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


def bn_stats(dst: Tensor | None, data: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Per partition: count, mean and variance · count of the even elements, then of the odd ones."""
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


def trimmed(data: Tensor, mask: Any) -> Tensor:
    """Returns the box that a mask shows of a tile."""
    if mask is None:
        return data
    from kernelgen.languages.nki.indices import box

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


def bn_aggr(dst: Tensor | None, data: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Mean and variance of what several `bn_stats` counted."""
    data = trimmed(checks.on_chip(data, "data"), mask)
    if math.prod(data.shape[1:]) % 3:
        raise NkiValueError("err_bn_aggr_input", f"bn_aggr takes groups of 3 elements, not {data.shape}")
    target = destination(dst, (data.shape[0], 2), dtype or data.dtype, [], None)
    emit("bn_aggr", [data], [target])
    return target


# Searches


def _eight(data: Tensor, what: str) -> None:
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


def max8(dst: Tensor | None, src: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """The eight largest elements per partition, the largest first."""
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
            # The same value again is looked for after where it was found.
            again = wanted[:, i : i + 1] == wanted[:, j : j + 1]
            hit = hit & ~(again & (place <= found[i]))
        found.append(jnp.min(jnp.where(hit, place, _BIG), axis=1, keepdims=True))
    index = jnp.concatenate(found, axis=1)
    target = instruction.writes[0]
    missing = np.asarray(np.iinfo(target.dtype).max, target.dtype)
    context.write(target, fitted(jnp.where(index == _BIG, missing, index.astype(target.dtype)), target))


def nc_find_index8(dst: Tensor | None, data: Any, vals: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Where the eight values are first found per partition; all ones where one is not; a value again: its next place."""
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
    dst: Tensor | None,
    data: Any,
    vals: Any,
    imm: Any,
    dst_idx: Tensor | None = None,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """Replaces the first match of each of eight values by `imm`, and notes where it was in `dst_idx`."""
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


def sequence_bounds(dst: Tensor | None, segment_ids: Any, *, dtype: Any = None) -> Tensor:
    """Where the run of equal segment ids that an element is in begins and ends; [n, -1] for id 0 (padding)."""
    data = checks.on_chip(segment_ids, "segment_ids")
    shape = (data.shape[0], 2, math.prod(data.shape[1:]))
    target = destination(dst, shape, dtype or data.dtype, [], None)
    emit("sequence_bounds", [data], [target])
    return target


@lowering("random")
def _lower_random(context: Context, instruction: Instruction) -> None:
    import jax

    (seed,) = instruction.attributes
    target = instruction.writes[0]
    values = jax.random.uniform(jax.random.key(seed), target.shape, np.float32)
    if instruction.reads:
        data = context.read(instruction.reads[0])
        probability = context.read(instruction.reads[1])
        keep = values >= full(to_float(probability), None, data)
        context.write(target, fitted(jnp.where(keep, data, jnp.zeros((), data.dtype)), target))
    else:
        context.write(target, values)


def random(target: Tensor) -> Tensor:
    recorder = current()
    recorder.seed += 1
    emit("random", [], [target], (recorder.seed,))
    return target


def dropout(dst: Tensor | None, data: Any, prob: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Replaces elements by 0 with a probability, drawn anew in every instruction from the kernel's seed."""
    data = checks.on_chip(data, "data")
    fixed, tensors = operand(prob, data, "prob")
    if fixed is not None:
        tile = scalar_tensor(float(fixed))
        tensors = [tile.broadcast(0, data.shape[0])]
    target = destination(dst, data.shape, dtype or data.dtype, [data], mask)
    recorder = current()
    recorder.seed += 1
    emit("random", [data, tensors[0]], [target], (recorder.seed,))
    return target
