"""Shared helpers of the instructions: destinations, immediate operands, and the engines' reduction registers."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np

from nki_interpreter import checks, tensors
from nki_interpreter.dtypes import float32
from nki_interpreter.elementwise import REDUCTIONS, op_name
from nki_interpreter.errors import NkiValueError
from nki_interpreter.lazy import jnp
from nki_interpreter.lower import masked, to_float
from nki_interpreter.operators import _operand, apply_binary, immediate, neutral_of, number, reduce_values
from nki_interpreter.program import REGISTERS, current
from nki_interpreter.tensors import NkiTensor


class ReduceCmd(IntEnum):
    """The commands for an engine's reduction registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


def destination(dst: Any, shape: Any) -> NkiTensor:
    """Returns the destination.

    Raises:
        NkiValueError: destination and result have different numbers of elements.
    """
    target = checks.on_chip(dst, "the destination")
    if target.size != math.prod(shape):
        raise NkiValueError(
            "err_shape_mismatch", f"the destination has shape {target.shape}, and the result {tuple(shape)}"
        )
    return target


def operand(value: Any, tile: NkiTensor, what: str) -> tuple[float | int | None, list[NkiTensor]]:
    """Returns an operand as an immediate number or a list with the tensor that holds one element per partition."""
    value = _operand(value)
    fixed = number(value)
    if fixed is not None:
        return fixed, []
    checks.on_chip(value, what)
    if value.shape[0] == 1 and tile.shape[0] > 1 and value.storage.initial is not None:
        value = value.broadcast(0, tile.shape[0])
    checks.per_partition(value, tile, what)
    return None, [value]


def full(value: Any, fixed: float | int | None, like: Any) -> Any:
    """Returns an operand's values in a shape that broadcasts over the free dimensions of `like`."""
    if fixed is not None:
        return immediate(fixed)
    return value.reshape((value.shape[0],) + (1,) * (like.ndim - 1))


def flat(value: Any) -> Any:
    """Returns a tile with its free dimensions flattened into one."""
    return value if value.ndim == 2 else value.reshape((value.shape[0], -1))


def register(engine: str, partitions: int) -> NkiTensor:
    """Returns an engine's reduction registers, one per partition; they keep their values between instructions."""
    registers = current().registers
    if engine not in registers:
        registers[engine] = tensors.new((checks.PARTITIONS, 1), float32, REGISTERS, name=f"{engine} registers")
    whole: NkiTensor = registers[engine]
    return whole[0:partitions]


Reduction = tuple[Any, list[NkiTensor], list[NkiTensor]]


def reduction(
    engine: str, tile: NkiTensor, command: Any, op: Any, res: NkiTensor | None, initial: Any = None
) -> Reduction:
    """Returns the attributes (None for no reduction), reads and writes of a reduction that an instruction does besides its result.

    Args:
        engine: the engine that owns the registers.
        tile: what is reduced.
        command: the command for the registers.
        op: the operation that reduces.
        res: the destination of the registers' values, or None.
        initial: the initial value for "load_reduce".
    """
    command = ReduceCmd(int(command))
    name = op_name(op) if op is not None else "add"
    if name not in REDUCTIONS:
        raise NkiValueError("err_unsupported_op", f"'{name}' does not reduce")
    if command is ReduceCmd.idle and res is None:
        return None, [], []
    registers = register(engine, tile.shape[0])
    reads, writes, fixed = [], [registers], None
    if command in (ReduceCmd.reduce, ReduceCmd.idle):
        reads.append(registers)
    if command is ReduceCmd.load_reduce:
        fixed, reads = operand(0.0 if initial is None else initial, tile, "reduce_init")
    if res is not None:
        checks.one_per_partition(checks.on_chip(res, "reduce_res"), "reduce_res")
        writes.append(res)
    return (int(command), name, fixed, res is not None), reads, writes


def reduced(attributes: Any, values: list[Any], data: Any, source: NkiTensor) -> list[Any]:
    """Returns the new values of the registers and of reduce_res: `data`, reduced over free dimensions, and combined."""
    if attributes is None:
        return []
    command, name, initial, has_result = attributes
    tile = flat(to_float(data))
    if source.mask is not None and source.shape == data.shape:
        tile = flat(masked(to_float(data), source, neutral_of(name, np.float32)))
    if command in (ReduceCmd.reset, ReduceCmd.idle):
        total = jnp.full((tile.shape[0], 1), neutral_of(name, np.float32), np.float32)
    else:
        total = reduce_values(name, tile, (1,))
    if command not in (ReduceCmd.reset_reduce, ReduceCmd.reset):
        before = flat(to_float(values[0])) if values else immediate(initial).astype(np.float32)
        total = apply_binary(name, jnp.broadcast_to(before, total.shape), total)
    return [total, total] if has_result else [total]
