"""Shared helpers of the instructions: destinations, immediate operands, and the engines' reduction registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from nki_interpreter import checks, tensors
from nki_interpreter.dtypes import float32
from nki_interpreter.elementwise import REDUCTIONS, op_name
from nki_interpreter.errors import NkiValueError
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, masked, to_float
from nki_interpreter.operators import _operand, immediate, neutral_of, number, reduce_values, result
from nki_interpreter.program import REGISTERS, SBUF, Buffer, current
from nki_interpreter.tensors import NkiTensor


class ReduceCmd(IntEnum):
    """The commands for an engine's reduction registers."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


def destination(
    dst: NkiTensor | None, shape: Any, dtype: Any, like: Sequence[NkiTensor], mask: Any, buffer: Buffer = SBUF
) -> NkiTensor:
    """Returns the destination with the mask, or a new tile.

    Raises:
        NkiValueError: destination and result have different numbers of elements.
    """
    if dst is None:
        return result(shape, dtype, like, mask, buffer)
    checks.on_chip(dst, "the destination")
    if dst.size != math.prod(shape):
        raise NkiValueError(
            "err_shape_mismatch", f"the destination has shape {dst.shape}, and the result {tuple(shape)}"
        )
    return dst.with_mask(mask)


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


def fitted(value: Any, target: NkiTensor) -> Any:
    """Returns values in the destination's shape; only the number of elements must agree."""
    return value if value.shape == target.shape else value.reshape(target.shape)


def register(engine: str, partitions: int) -> NkiTensor:
    """Returns an engine's reduction registers, one per partition; they keep their values between instructions."""
    registers = current().registers
    if engine not in registers:
        registers[engine] = tensors.new((checks.PARTITIONS, 1), float32, REGISTERS, name=f"{engine} registers")
    whole: NkiTensor = registers[engine]
    return whole[0:partitions]


class Reduction:
    """A reduction into an engine's registers that an instruction does in addition to its result.

    Args:
        engine: the engine that owns the registers.
        command: the command for the registers.
        op: the operation that reduces.
        res: the destination of the registers' values, or None.
        initial: the initial value for "load_reduce".
    """

    def __init__(
        self, engine: str, tile: NkiTensor, command: Any, op: Any, res: NkiTensor | None, initial: Any = None
    ) -> None:
        self.command = ReduceCmd(int(command))
        self.name = op_name(op) if op is not None else "add"
        if self.name not in REDUCTIONS:
            raise NkiValueError("err_unsupported_op", f"'{self.name}' does not reduce")
        self.active = self.command is not ReduceCmd.idle or res is not None
        self.reads: list[NkiTensor] = []
        self.writes: list[NkiTensor] = []
        self.initial: float | int | None = None
        if not self.active:
            self.attributes: Any = None
            return
        registers = register(engine, tile.shape[0])
        if self.command in (ReduceCmd.reduce, ReduceCmd.idle):
            self.reads.append(registers)
        if self.command is ReduceCmd.load_reduce:
            self.initial, loaded = operand(0.0 if initial is None else initial, tile, "reduce_init")
            self.reads += loaded
        self.writes.append(registers)
        if res is not None:
            checks.on_chip(res, "reduce_res")
            self.writes.append(res)
        self.attributes = (int(self.command), self.name, self.initial, len(self.reads), res is not None)


def reduced(attributes: Any, values: list[Any], data: Any, source: NkiTensor) -> list[Any]:
    """Returns the new values of the registers and of reduce_res: `data`, reduced over free dimensions, and combined."""
    command, name, initial, _, has_result = attributes
    tile = flat(to_float(data))
    if source.mask is not None and source.shape == data.shape:
        tile = flat(masked(to_float(data), source, neutral_of(name, np.float32)))
    neutral = jnp.full((tile.shape[0], 1), neutral_of(name, np.float32), np.float32)
    now = reduce_values(name, tile, (1,)) if command != ReduceCmd.reset and command != ReduceCmd.idle else neutral
    if command in (ReduceCmd.reset_reduce, ReduceCmd.reset):
        total = now
    else:
        before = flat(to_float(values[0])) if values else immediate(initial).astype(np.float32)
        before = jnp.broadcast_to(before, now.shape)
        total = combine(name, before, now)
    return [total, total] if has_result else [total]


def combine(name: str, a: Any, b: Any) -> Any:
    functions: dict[str, Any] = {
        "add": lax.add,
        "multiply": lax.mul,
        "maximum": lax.max,
        "minimum": lax.min,
        "abs_max": lambda x, y: lax.max(lax.abs(x), lax.abs(y)),
    }
    return functions[name](a, b)


def write_reduced(context: Context, writes: Sequence[NkiTensor], values: Sequence[Any]) -> None:
    for tensor, value in zip(writes, values, strict=True):
        context.write(tensor, value.reshape(tensor.shape))
