"""The vector engine: elementwise operations on tiles and per-partition operands, selections, copies, random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import float32, int32, is_float, uint32
from nki_interpreter.elementwise import BINARY, BITWISE, check_op, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import ReduceCmd, Reduction, destination, flat, full, operand, reduced, reduction
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, converted, lowering, to_float
from nki_interpreter.operators import apply_binary, apply_vector, assign, emit, immediate, number
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor, in_register

# With tiles


_WIDE = (int32, uint32)


@lowering("tensor_tensor", exact=True)
def _lower_tensor_tensor(context: Context, instruction: Instruction) -> Any:
    name, engine = instruction.attributes
    a, b = (context.read(t) for t in instruction.reads)
    b = b.reshape(a.shape)
    tiles = (*instruction.reads, *instruction.writes)
    if engine == "gpsimd" and name not in BITWISE and all(t.dtype in _WIDE for t in tiles):
        return apply_binary(name, a, b)
    return apply_vector(name, a, b, _width(tiles))


def _width(tiles: Sequence[NkiTensor]) -> int:
    """Returns the bytes of the widest integer operand: an instruction works on bit patterns of this width."""
    return max(t.dtype.itemsize for t in tiles)


def _bitwise(name: str, operands: Sequence[NkiTensor], target: NkiTensor) -> None:
    """Requires that operations on bit patterns read and write integers."""
    floats = [t.dtype for t in (*operands, target) if is_float(t.dtype)]
    if name in BITWISE and floats:
        raise NkiTypeError("err_bitwise_on_float", f"'{name}' reads and writes integers, not {floats[0]}")


def tensor_tensor(dst: Any, data1: Any, data2: Any, op: Any, engine: Any = None) -> None:
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
    target = destination(dst, a.shape)
    _bitwise(name, [a, b], target)
    tiles = (a, b, target)
    if engine == "unknown":
        exact = not current().older and all(t.dtype in _WIDE and t.buffer.kind == "sbuf" for t in tiles)
        engine = "gpsimd" if name == "power" or (exact and name not in BITWISE) else "vector"
    checks.reachable("tensor_tensor", engine, tiles)
    emit("tensor_tensor", [a, b], [target], (name, engine))


# With one operand per partition


@lowering("tensor_scalar", exact=True)
def _lower_tensor_scalar(context: Context, instruction: Instruction) -> Any:
    steps, reduction = instruction.attributes
    source, *reads = instruction.reads
    value = context.read(source)
    shape = value.shape
    width = _width((*instruction.reads, instruction.writes[0]))
    for name, fixed, swapped, tile in steps:
        other = immediate(fixed) if fixed is not None else context.read(reads.pop(0))
        if fixed is None:
            other = other.reshape(shape) if tile else full(other, None, value)
        value = apply_vector(name, *((other, value) if swapped else (value, other)), width)
        value = jnp.broadcast_to(value, shape)
        if value.dtype == np.bool_:
            value = value.astype(np.float32)
    return value, *reduced(reduction, [context.read(t) for t in reads], value, source)


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
    dst: Any, data: Any, steps: list[tuple[Any, Any, bool, bool]], reduction: Reduction = (None, [], [])
) -> None:
    data = checks.on_chip(data, "data")
    described, operands = _steps(data, steps)
    checks.operands_in_psum("an instruction with tensor operands", [data, *operands])
    target = destination(dst, data.shape)
    for name, *_ in described:
        _bitwise(name, [data, *operands], target)
    attributes, reads, writes = reduction
    emit("tensor_scalar", [data, *operands, *reads], [target, *writes], (tuple(described), attributes))


def tensor_scalar(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = None,
) -> None:
    """Computes `(data op0 operand0) op1 operand1`.

    An operand is a number or has one element per partition; `reverse` swaps a step's operands.
    """
    engine = checks.engine("tensor_scalar", engine, "vector", "scalar", "gpsimd")
    checks.gpsimd_arithmetic("tensor_scalar", engine)
    names = tuple(op_name(op) for op in (op0, op1) if op is not None)
    if engine in _CHAINS and not _CHAINS[engine](names):
        raise NkiValueError(
            "err_unsupported_engine",
            f"tensor_scalar with {' and '.join(names)} does not run on {engine}; use the vector engine",
        )
    checks.reachable("tensor_scalar", engine, [t for t in (dst, data, operand0, operand1) if isinstance(t, NkiTensor)])
    _chain(dst, data, [(op0, operand0, reverse0, False), (op1, operand1, reverse1, False)])


_CHAINS: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "scalar": lambda names: names in (("multiply", "add"), ("multiply",), ("add",)),
    "gpsimd": lambda names: current().older or names[:1] == ("rsqrt",),
}
"""The operations of tensor_scalar on engines other than the vector engine, from AWS's documentation."""


def scalar_tensor_tensor(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """Computes `(data op0 operand0) op1 operand1` with a tile as operand1."""
    checks.arithmetic("scalar_tensor_tensor", op0, op1)
    checks.one_in_psum("scalar_tensor_tensor", data, operand1, "data", "operand1")
    _chain(dst, data, [(op0, operand0, reverse0, False), (op1, operand1, reverse1, True)])


def tensor_scalar_reduce(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> None:
    """Computes `data op0 operand0`, and reduces it over the free dimensions into `reduce_res`."""
    checks.arithmetic("tensor_scalar_reduce", op0)
    data = checks.on_chip(data, "data")
    sums = reduction("vector", data, reduce_cmd, reduce_op, reduce_res, reduce_init)
    _chain(dst, data, [(op0, operand0, reverse0, False)], sums)
    if reduce_res_negate and reduce_res is not None:
        tensor_scalar(reduce_res, reduce_res, np.multiply, -1.0)


# Copies


def tensor_copy(dst: Any, src: Any, engine: Any = None) -> None:
    """Copies bits if the dtypes are equal; otherwise converts through float32."""
    src = checks.on_chip(src, "src")
    target = destination(dst, src.shape)
    copies(engine, src, target)
    assign(target, src)


def copies(engine: Any, src: NkiTensor, target: NkiTensor) -> None:
    """Checks that an engine can copy: GpSimd can't access PSUM, and the scalar engine of NeuronCore-v2 can't copy."""
    engine = checks.engine("tensor_copy", engine, "vector", "scalar", "gpsimd")
    checks.reachable("tensor_copy", engine, (src, target))
    if engine == "scalar" and not current().older:
        needs(nc_version.gen3, "tensor_copy on the scalar engine")


@lowering("select")
def _lower_select(context: Context, instruction: Instruction) -> Any:
    fixed_true, fixed_false, swapped, reduction = instruction.attributes
    predicate, *reads = instruction.reads
    target = instruction.writes[0]
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
        return jnp.where(condition, *(converted(source, dtype) for source in sources))
    value = jnp.broadcast_to(jnp.where(condition, *map(to_float, sources)), shape)
    source = target.replaced(mask=predicate.mask)
    return value, *reduced(reduction, [context.read(t) for t in reads], value, source)


def _select(
    target: NkiTensor, predicate: NkiTensor, yes: Any, no: Any, swapped: bool, reduction: Reduction = (None, [], [])
) -> None:
    tiles = [predicate]
    fixed = []
    for value in (yes, no):
        fixed.append(number(value))
        if fixed[-1] is None:
            tiles.append(checks.on_chip(value, "an operand of a selection"))
    # The instruction does not read elements of the target that keep their values.
    checks.operands_in_psum("a selection", [t for t in tiles if t.storage is not target.storage])
    attributes, reads, writes = reduction
    emit("select", [*tiles, *reads], [target, *writes], (fixed[0], fixed[1], swapped, attributes))


def tensor_copy_predicated(dst: Any, src: Any, predicate: Any, reverse_pred: bool = False) -> None:
    """Copies `src` to `dst` where `predicate` is not 0; `dst` keeps the rest."""
    predicate = checks.on_chip(predicate, "predicate")
    checks.one_in_psum("tensor_copy_predicated", src, predicate, "src", "predicate")
    checks.dtype(predicate, "predicate", np.uint8, np.uint16, np.uint32, np.bool_)
    checks.equal_dtypes(dst, src, "dst of tensor_copy_predicated")
    _select(checks.on_chip(dst, "dst"), predicate, src, dst, reverse_pred)


def select_reduce(
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = ReduceCmd.idle,
    reduce_op: Any = np.maximum,
    reverse_pred: bool = False,
) -> None:
    """Selects elements by a predicate and reduces them over the free dimensions."""
    predicate = checks.on_chip(predicate, "predicate")
    target = checks.on_chip(dst, "dst")
    checks.one_in_psum("select_reduce", on_true, predicate, "on_true", "predicate")
    if int(reduce_cmd) == ReduceCmd.idle:
        reduce_res = None
    sums = reduction("vector", predicate, reduce_cmd, reduce_op, reduce_res)
    _select(target, predicate, on_true, on_false, reverse_pred, sums)
    checks.dtype(predicate, "predicate", np.int8, np.uint8, np.int16, np.uint16, np.bool_)
    _only_max("select_reduce", reduce_op)
    if not current().older and on_true.dtype in _WIDE:
        raise NkiTypeError("err_unsupported_dtype", f"on_true of select_reduce can't be {on_true.dtype}")


def _only_max(what: str, reduce_op: Any) -> None:
    if not current().older and op_name(reduce_op) != "maximum":
        raise NkiTypeError("err_unsupported_op", f"{what} reduces to the maximum, not by {op_name(reduce_op)}")


@lowering("range_select")
def _lower_range_select(context: Context, instruction: Instruction) -> Any:
    first, second, start, otherwise, reduction = instruction.attributes
    data, *bounds = (to_float(context.read(t)) for t in instruction.reads)
    index = lax.broadcasted_iota(np.float32, (data.shape[0], data.size // data.shape[0]), 1) + np.float32(start)
    shown = apply_binary(first, index, flat(bounds[0])) & apply_binary(second, index, flat(bounds[1]))
    value = jnp.where(shown, flat(data), np.float32(otherwise))
    return value, *reduced(reduction, bounds[2:], value, instruction.reads[0])


_COMPARES = ("equal", "less", "less_equal", "greater", "greater_equal")


def range_select(
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = ReduceCmd.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = np.maximum,
    range_start: Any = 0,
    on_false_value: Any = None,
) -> None:
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
    if not current().older and not is_float(data.dtype):
        raise NkiTypeError("err_unsupported_dtype", f"on_true_tile of range_select is a float, not {data.dtype}")
    _only_max("range_select", reduce_op)
    for name in names:
        if not current().older and name not in _COMPARES:
            raise NkiTypeError("err_unsupported_op", f"range_select compares, it does not compute {name}")
    attributes, reads, writes = reduction("vector", data, reduce_cmd, reduce_op, reduce_res)
    lowest = on_false_value is None or on_false_value is ...
    otherwise = float(np.finfo(np.float32).min if lowest else on_false_value)
    emit(
        "range_select",
        [data, bound0, bound1, *reads],
        [destination(dst, data.shape), *writes],
        (*names, float(range_start), otherwise, attributes),
    )


@lowering("fill_tile")
def _lower_fill_tile(context: Context, instruction: Instruction) -> Any:
    return jnp.broadcast_to(context.read(instruction.reads[0]).reshape(()), instruction.writes[0].shape)


def memset(dst: Any, value: Any, engine: Any = None) -> None:
    dst = checks.on_chip(dst, "dst")
    checks.reachable("memset", checks.engine("memset", engine, "vector", "gpsimd"), [dst])
    if number(value) is None:
        emit("fill_tile", [in_register(value)], [dst])
    else:
        assign(dst, value)


@lowering("random")
def _lower_random(context: Context, instruction: Instruction) -> Any:
    import jax

    values = jax.random.uniform(jax.random.key(instruction.attributes), instruction.writes[0].shape, np.float32)
    if not instruction.reads:
        return values
    data, probability = (context.read(t) for t in instruction.reads)
    keep = values.reshape(data.shape) >= full(to_float(probability), None, data)
    return jnp.where(keep, data, jnp.zeros((), data.dtype))


def random(target: NkiTensor, *reads: NkiTensor) -> None:
    """Writes random numbers from 0 to 1; with data and probability, the data or 0. Each instruction draws new numbers."""
    recorder = current()
    recorder.seed += 1
    emit("random", reads, [target], recorder.seed)


def rng(dst: Any, engine: Any = None) -> None:
    target = checks.on_chip(dst, "dst")
    engine = checks.engine("rng", engine, "vector", "gpsimd")
    checks.reachable("rng", engine, [target])
    if engine == "gpsimd":
        needs(nc_version.gen3, "rng on GpSimd")
    checks.dtype(dst, "dst of rng", np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)
    random(target)


def rand2(dst: Any, min: Any, max: Any) -> None:
    needs(nc_version.gen4, "rand2")
    random(checks.on_chip(dst, "dst"))
    low, high = number(min), number(max)
    if low is None or high is None:
        raise NkiTypeError("err_immediate_expected", "rand2 takes numbers as bounds here")
    tensor_scalar(dst, dst, np.multiply, float(high - low), op1=np.add, operand1=float(low))


def set_rng_seed(src_seeds: Any) -> None:
    checks.dtype(checks.on_chip(src_seeds, "src_seeds"), "src_seeds", np.int32, np.uint32, np.float32)
    if src_seeds.size != 1:
        raise NkiValueError("err_shape_mismatch", f"src_seeds has the shape (1, 1), not {src_seeds.shape}")
    current().notes.append("set_rng_seed is ignored: random numbers come from the kernel's own seed")


def dropout(dst: Any, data: Any, prob: Any) -> None:
    """Replaces elements by 0 with a probability."""
    data = checks.on_chip(data, "data")
    fixed, tiles = operand(prob, data, "prob")
    if fixed is not None:
        tiles = [in_register(float(fixed)).broadcast(0, data.shape[0])]
    checks.equal_dtypes(dst, data, "dst of dropout")
    random(destination(dst, data.shape), data, *tiles)
