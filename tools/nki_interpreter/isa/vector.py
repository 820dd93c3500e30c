"""The vector engine: elementwise operations on tiles and per-partition operands, selections, copies, random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import boolean, float32, int32, is_float, promoted, uint32
from nki_interpreter.elementwise import BINARY, BITWISE, COMPARISONS, check_op, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import (
    ReduceCmd,
    Reduction,
    destination,
    fitted,
    flat,
    full,
    operand,
    reduced,
    write_reduced,
)
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, converted, lowering, to_float
from nki_interpreter.operators import (
    apply_binary,
    apply_vector,
    assign,
    emit,
    immediate,
    number,
)
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor, in_register


def _result_dtype(name: str, *operands: NkiTensor) -> Any:
    if name in COMPARISONS and current().older:
        return boolean
    return promoted(*(t.dtype for t in operands))


# With tiles


_WIDE = (int32, uint32)


@lowering("tensor_tensor")
def _lower_tensor_tensor(context: Context, instruction: Instruction) -> None:
    name, engine = instruction.attributes
    a, b = (context.read(t) for t in instruction.reads)
    target = instruction.writes[0]
    if a.shape != b.shape:
        b = b.reshape(a.shape) if b.size == a.size else b
    tiles = (*instruction.reads, target)
    if engine == "gpsimd" and name not in BITWISE and all(t.dtype in _WIDE for t in tiles):
        value = apply_binary(name, a, b)
    else:
        value = apply_vector(name, a, b, _width(tiles))
    context.write(target, fitted(value, target), exact=True)


def _width(tiles: Sequence[NkiTensor]) -> int:
    """Returns the bytes of the widest integer operand: an instruction works on bit patterns of this width."""
    return max(t.dtype.itemsize for t in tiles)


def _bitwise(name: str, operands: Sequence[NkiTensor], target: NkiTensor) -> None:
    """Requires that operations on bit patterns read and write integers."""
    floats = [t.dtype for t in (*operands, target) if is_float(t.dtype)]
    if name in BITWISE and floats and current().check:
        raise NkiTypeError("err_bitwise_on_float", f"'{name}' reads and writes integers, not {floats[0]}")


def tensor_tensor(
    dst: NkiTensor | None, data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> NkiTensor:
    """Computes `data1 op data2` for two tiles of the same shape.

    The vector engine computes in float32. GpSimd computes with 32-bit integers if all tiles hold them. If the kernel
    names no engine, the newer generation chooses GpSimd for such tiles in SBUF.
    """
    name = check_op(op_name(op), BINARY, "tensor_tensor")
    engine = checks.engine("tensor_tensor", engine, "vector", "gpsimd")
    checks.gpsimd_arithmetic("tensor_tensor", engine)
    a, b = checks.on_chip(data1, "data1"), checks.on_chip(data2, "data2")
    if a.size != b.size or a.shape[0] != b.shape[0]:
        raise NkiValueError(
            "err_shape_mismatch", f"data1 has shape {a.shape} and data2 {b.shape}; they have to be equal"
        )
    checks.one_in_psum("tensor_tensor", a, b, "data1", "data2")
    target = destination(dst, a.shape, dtype or _result_dtype(name, a, b), [a, b], mask)
    _bitwise(name, [a, b], target)
    tiles = (a, b, target)
    if engine == "unknown":
        exact = not current().older and all(t.dtype in _WIDE and t.buffer.kind == "sbuf" for t in tiles)
        engine = "gpsimd" if name == "power" or (exact and name not in BITWISE) else "vector"
    checks.reachable("tensor_tensor", engine, tiles)
    emit("tensor_tensor", [a, b], [target], (name, engine))
    return target


# With one operand per partition


@lowering("tensor_scalar")
def _lower_tensor_scalar(context: Context, instruction: Instruction) -> None:
    steps, reduction = instruction.attributes
    reads = list(instruction.reads)
    source = reads.pop(0)
    target, *rest = instruction.writes
    value = context.read(source)
    shape = value.shape
    width = _width((source, target, *reads))
    for name, fixed, swapped, tile in steps:
        other = immediate(fixed) if fixed is not None else context.read(reads.pop(0))
        if fixed is None:
            other = other.reshape(shape) if tile else full(other, None, value)
        value = apply_vector(name, *((other, value) if swapped else (value, other)), width)
        value = jnp.broadcast_to(value, shape)
        if value.dtype == np.bool_:
            value = value.astype(np.float32)
    context.write(target, fitted(value, target), exact=True)
    if reduction is not None:
        values = [context.read(t) for t in reads]
        write_reduced(context, rest, reduced(reduction, values, value, source))


def _steps(data: NkiTensor, steps: list[tuple[Any, Any, bool, bool]]) -> tuple[list[Any], list[NkiTensor]]:
    described: list[Any] = []
    reads: list[NkiTensor] = []
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
        if fixed is not None and name not in BITWISE:
            fixed = float(fixed)
        elif fixed is not None and fixed != int(fixed):
            raise NkiTypeError("err_bitwise_on_float", f"operand{number_} of '{name}' is an integer, not {fixed}")
        elif fixed is not None:
            fixed = int(fixed)
        described.append((name, fixed, bool(swapped), False))
        reads += tensors
    if len(described) == 2 and len({name in BITWISE for name, *_ in described}) == 2:
        raise NkiTypeError("err_mixed_bitwise", "bitwise and arithmetic operations can't be mixed in one instruction")
    return described, reads


def _chain(
    dst: NkiTensor | None,
    data: Any,
    steps: list[tuple[Any, Any, bool, bool]],
    dtype: Any,
    mask: Any,
    reduction: Reduction | None = None,
) -> NkiTensor:
    data = checks.on_chip(data, "data")
    described, reads = _steps(data, steps)
    checks.operands_in_psum("an instruction with tensor operands", [data, *reads])
    if dtype is None and described:
        dtype = boolean if described[-1][0] in COMPARISONS and current().older else data.dtype
    target = destination(dst, data.shape, dtype or data.dtype, [data], mask)
    for name, *_ in described:
        _bitwise(name, [data, *reads], target)
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
    dst: NkiTensor | None,
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
    engine: Any = None,
) -> NkiTensor:
    """Computes `(data op0 operand0) op1 operand1`.

    An operand is a number or has one element per partition; `reverse` swaps a step's operands.
    """
    engine = checks.engine("tensor_scalar", engine, "vector", "scalar", "gpsimd")
    checks.gpsimd_arithmetic("tensor_scalar", engine)
    names = tuple(op_name(op) for op in (op0, op1) if op is not None)
    if current().check and engine in _CHAINS and not _CHAINS[engine](names):
        raise NkiValueError(
            "err_unsupported_engine",
            f"tensor_scalar with {' and '.join(names)} does not run on {engine}; use the vector engine",
        )
    checks.reachable("tensor_scalar", engine, [t for t in (dst, data, operand0, operand1) if isinstance(t, NkiTensor)])
    return _chain(dst, data, [(op0, operand0, reverse0, False), (op1, operand1, reverse1, False)], dtype, mask)


_CHAINS: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "scalar": lambda names: names in (("multiply", "add"), ("multiply",), ("add",)),
    "gpsimd": lambda names: current().older or names[:1] == ("rsqrt",),
}
"""The operations of tensor_scalar on engines other than the vector engine, from AWS's documentation."""


def arithmetic_only(what: str, *ops: Any) -> None:
    """Refuses operations on bit patterns for instructions that lack them."""
    bitwise = [op_name(op) for op in ops if op is not None and op_name(op) in BITWISE]
    if current().check and bitwise:
        raise NkiTypeError("err_unsupported_op", f"{what} takes arithmetic operations, not '{bitwise[0]}'")


def scalar_tensor_tensor(
    dst: NkiTensor | None,
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
) -> NkiTensor:
    """Computes `(data op0 operand0) op1 operand1` with a tile as operand1."""
    arithmetic_only("scalar_tensor_tensor", op0, op1)
    checks.one_in_psum("scalar_tensor_tensor", data, operand1, "data", "operand1")
    return _chain(dst, data, [(op0, operand0, reverse0, False), (op1, operand1, reverse1, True)], dtype, mask)


def tensor_scalar_reduce(
    dst: NkiTensor | None,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    reverse0: bool = False,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_init: Any = None,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    """Computes `data op0 operand0`, and reduces it over the free dimensions into `reduce_res`."""
    arithmetic_only("tensor_scalar_reduce", op0)
    data = checks.on_chip(data, "data")
    reduction = Reduction("vector", data, reduce_cmd, reduce_op, reduce_res, reduce_init)
    return _chain(dst, data, [(op0, operand0, reverse0, False)], dtype, mask, reduction)


# Copies


def tensor_copy(
    dst: NkiTensor | None, src: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> NkiTensor:
    """Copies bits if the dtypes are equal; otherwise converts through float32."""
    src = checks.on_chip(src, "src")
    target = destination(dst, src.shape, dtype or src.dtype, [src], mask)
    copies(engine, src, target)
    assign(target, src, mask=None)
    return target


def copies(engine: Any, src: NkiTensor, target: NkiTensor) -> None:
    """Checks that an engine can copy: GpSimd can't access PSUM, and the scalar engine of NeuronCore-v2 can't copy."""
    engine = checks.engine("tensor_copy", engine, "vector", "scalar", "gpsimd")
    checks.reachable("tensor_copy", engine, (src, target))
    if engine == "scalar" and not current().older:
        needs(nc_version.gen3, "tensor_copy on the scalar engine")


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
    if reduction is None:
        # Only selected elements are converted; the others keep their bits.
        dtype = target.storage.value_dtype if target.cast is None else target.cast
        value = jnp.where(condition, *(converted(source, dtype) for source in sources))
    else:
        value = jnp.where(condition, *map(to_float, sources))
        values = [context.read(t) for t in reads]
        write_reduced(context, rest, reduced(reduction, values, value, target.replaced(mask=predicate.mask)))
    context.write(target, fitted(jnp.broadcast_to(value, shape), target))


def _select(
    target: NkiTensor, predicate: NkiTensor, yes: Any, no: Any, swapped: bool, reduction: Reduction | None = None
) -> None:
    reads = [predicate]
    fixed = []
    for value in (yes, no):
        fixed.append(number(value))
        if fixed[-1] is None:
            reads.append(checks.on_chip(value, "an operand of a selection"))
    # The instruction does not read elements of the target that keep their values.
    checks.operands_in_psum("a selection", [t for t in reads if t.storage is not target.storage])
    writes = [target]
    attributes: Any = None
    if reduction is not None and reduction.active:
        reads += reduction.reads
        writes += reduction.writes
        attributes = reduction.attributes
    emit("select", reads, writes, (fixed[0], fixed[1], swapped, attributes))


def tensor_copy_predicated(
    dst: NkiTensor, src: Any, predicate: Any, reverse_pred: bool = False, *, mask: Any = None
) -> NkiTensor:
    """Copies `src` to `dst` where `predicate` is not 0; `dst` keeps the rest."""
    predicate = checks.on_chip(predicate, "predicate")
    checks.one_in_psum("tensor_copy_predicated", src, predicate, "src", "predicate")
    target = checks.on_chip(dst, "dst").with_mask(mask)
    _select(target, predicate, src, dst, reverse_pred)
    return dst


def select_reduce(
    dst: NkiTensor,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = ReduceCmd.idle,
    reduce_op: Any = np.maximum,
    reverse_pred: bool = False,
    *,
    mask: Any = None,
) -> NkiTensor:
    """Selects elements by a predicate and reduces them over the free dimensions."""
    predicate = checks.on_chip(predicate, "predicate")
    checks.on_chip(dst, "dst")
    checks.one_in_psum("select_reduce", on_true, predicate, "on_true", "predicate")
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
    dst: NkiTensor | None,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Any = np.maximum,
    range_start: Any = 0,
    on_false_value: Any = None,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    """Keeps the elements whose position plus `range_start` compares true with both bounds (one per partition)."""
    needs(nc_version.gen3, "range_select", "NCC_IBIR530")
    data = checks.on_chip(on_true_tile, "on_true_tile")
    names = tuple(op_name(op) for op in (comp_op0, comp_op1))
    for bound in (bound0, bound1):
        checks.per_partition(checks.on_chip(bound, "a bound"), data, "a bound")
        if bound.dtype != float32:
            raise NkiTypeError(
                "err_range_select_bound_dtype", f"the bounds of range_select are float32, not {bound.dtype}"
            )
    checks.operands_in_psum("range_select", [data, bound0, bound1])
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


def memset(
    dst: NkiTensor | None, value: Any, *, shape: Any = None, dtype: Any = None, mask: Any = None, engine: Any = None
) -> NkiTensor:
    given = destination(None, tuple(shape), dtype, [], None) if dst is None else checks.on_chip(dst, "dst")
    dst = given.with_mask(mask)
    checks.reachable("memset", checks.engine("memset", engine, "vector", "gpsimd"), [dst])
    if number(value) is None:
        emit("fill_tile", [in_register(value)], [dst])
    else:
        assign(dst, value)
    return dst


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


def random(target: NkiTensor, *, engine: Any = None) -> NkiTensor:
    engine = checks.engine("rng", engine, "vector", "gpsimd")
    checks.reachable("rng", engine, [target])
    if engine == "gpsimd":
        needs(nc_version.gen3, "rng on GpSimd")
    recorder = current()
    recorder.seed += 1
    emit("random", [], [target], (recorder.seed,))
    return target


def dropout(dst: NkiTensor | None, data: Any, prob: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Replaces elements by 0 with a probability; each instruction draws new random numbers from the kernel's seed."""
    data = checks.on_chip(data, "data")
    fixed, tensors = operand(prob, data, "prob")
    if fixed is not None:
        tile = in_register(float(fixed))
        tensors = [tile.broadcast(0, data.shape[0])]
    target = destination(dst, data.shape, dtype or data.dtype, [data], mask)
    recorder = current()
    recorder.seed += 1
    emit("random", [data, tensors[0]], [target], (recorder.seed,))
    return target
