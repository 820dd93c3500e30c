"""Counts a recorded kernel's work per engine: instructions, elements, columns, DMA bytes by run length, and memory.

The module counts work, not time. `kernelgen inspect --cost` converts the work to nanoseconds with the rates in
`kernelgen.dispatch.chips`, so this module does not depend on kernelgen. The result is a model, not a measurement.

- The tensor engine moves columns through a stationary tile: the moving operand's columns, or the stationary operand's if it has
  more, up to 64. Two rows at once halve the columns. An operand that is declared to hold only ones and zeros halves the columns
  of float32.
- Vector, scalar and GpSimd engines process the elements of a partition. Instructions of the vector engine with two operands in
  SBUF take twice as long, so they have a count of their own. An activation that also reduces takes 64 more elements.
- In the older NKI, the compiler chooses the vector or the scalar engine for work that names no engine (`either`). An assignment
  of a tile to a tile on the chip does not count as a copy, nor does a sum in PSUM. The tensor engine broadcasts a row to many
  partitions by a product with ones. The inputs of an activation that also reduces count twice: the compiler recomputes them for
  the second result, including the reads from memory (counters of Jerry2423/kda-for-trainium's gqa_full_v7b: 21 % more products
  than without the reduction, 75 % more bytes).
- The count of DMA is in bytes, by the length of the contiguous runs, rounded down to a power of two.

The count leaves out the time that instructions wait for each other (`kernelgen.dispatch.modelled_cost.elapsed` adds a share).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nki_interpreter.checks import at_once
from nki_interpreter.dtypes import float32
from nki_interpreter.program import PSUM, SBUF, Block, Instruction, Loop, NkiMemory
from nki_interpreter.roll import RolledLoop
from nki_interpreter.tensors import NkiTensor

LEAST_COLUMNS = 64
REDUCE_ELEMENTS = 64

ENGINES = ("tensor", "vector", "scalar", "gpsimd")

_GPSIMD = {
    "affine_select", "gather_flattened", "iota", "local_gather", "nonzero_with_count", "partition_reduce", "shuffle", "topk",
}  # fmt: skip
_DMA = {"dma_compute", "rmw"}
_EITHER = {"unary", "tensor_scalar", "fill"}
"""Instructions of the older NKI with one tile operand; their other operands have one element per partition."""


@dataclass(slots=True)
class Cost:
    """A kernel's work and memory.

    Attributes:
        instructions: the number per engine, for `either` (vector or scalar engine), and for DMA.
        work: the amount for each of these: columns by dtype for the tensor engine, bytes by run length for DMA, elements of a
            partition for the others (`one`, and `two` for instructions that read two operands in SBUF).
        sbuf_bytes, psum_bytes: the peak use of SBUF and PSUM per partition (`checks.at_once`); None for a kernel of the older
            NKI, whose compiler places the memory.
    """

    instructions: dict[str, int] = field(default_factory=dict)
    work: dict[str, dict[str, int]] = field(default_factory=dict)
    sbuf_bytes: int | None = None
    psum_bytes: int | None = None

    @property
    def dma_bytes(self) -> int:
        """Returns the number of bytes that DMA moves between memories."""
        return sum(self.work["dma"].values())

    def to_json(self) -> dict[str, Any]:
        memory = {"sbuf": self.sbuf_bytes, "psum": self.psum_bytes}
        return {
            "instructions": self.instructions,
            "work": self.work,
            **{f"{kind}_bytes_per_partition": n for kind, n in memory.items() if n is not None},
        }


def cost(block: Block, storages: Sequence[NkiMemory], older: bool = False) -> Cost:
    """Returns a kernel's cost.

    Args:
        block: the recorded instructions; loops may be rolled.
        storages: all memory that the kernel uses.
        older: whether the kernel uses the older NKI.
    """
    names = (*ENGINES, *(("either",) if older else ()), "dma")
    found = Cost(dict.fromkeys(names, 0), {name: {} for name in names})

    def add(engine: str, kind: str, n: int) -> None:
        found.work[engine][kind] = found.work[engine].get(kind, 0) + n

    recorded = [*_instructions(block.items, 1)]
    anew = _computed_anew(one for one, _ in recorded) if older else set()
    for instruction, times in recorded:
        engine = _engine(instruction, older)
        if not _reduces(instruction) and any(t.storage.number in anew for t in instruction.writes):
            times *= 2
        if engine is None:
            continue
        found.instructions[engine] += times
        kind, n = _work(instruction, engine)
        add(engine, kind, n * times)
        if older and engine != "dma" and (row := _broadcast_row(instruction)) is not None:
            found.instructions["tensor"] += times
            add("tensor", _kind(row), times * _per_partition(row))
    if not older:
        found.sbuf_bytes, found.psum_bytes = (at_once(storages, buffer)[0] for buffer in (SBUF, PSUM))
    return found


def _instructions(items: Iterable[Any], times: int) -> Iterator[tuple[Instruction, int]]:
    for item in items:
        if isinstance(item, Instruction):
            yield item, times
        elif isinstance(item, RolledLoop):
            yield from _instructions(item.body.items, times * item.count)
        elif isinstance(item, Loop):
            for iteration in item.iterations:
                yield from _instructions(iteration.items, times)


def _computed_anew(instructions: Iterable[Instruction]) -> set[int]:
    """Returns the numbers of the memories on the chip from which activations with a reduction are computed, directly or not."""
    sources: dict[int, set[int]] = {}
    left: list[int] = []
    for one in instructions:
        read = {t.storage.number for t in one.reads if t.on_chip}
        for t in one.writes:
            sources.setdefault(t.storage.number, set()).update(read)
        if _reduces(one):
            left += read
    found: set[int] = set()
    while left:
        number = left.pop()
        if number not in found:
            found.add(number)
            left += sources.get(number, ())
    return found


def _reduces(instruction: Instruction) -> bool:
    """Returns whether an instruction is an activation with a reduction as its second result."""
    return instruction.op == "activation" and len(instruction.writes) > 1


def _engine(instruction: Instruction, older: bool) -> str | None:
    """Returns an instruction's engine, or None if the device has no such instruction."""
    op = instruction.op
    tensors = (*instruction.reads, *instruction.writes)
    if op in _DMA or (op in ("assign", "transpose", "fill") and any(not t.on_chip for t in tensors)):
        return "dma"
    if op == "matmul" or (op == "transpose" and instruction.writes[0].buffer.kind == "psum"):
        return "tensor"
    if older and op in ("assign", "accumulate"):
        return None
    if op == "activation":
        return "scalar"
    if op == "tensor_tensor":
        return str(instruction.attributes[1])
    if op in _GPSIMD:
        return "gpsimd"
    return "either" if older and op in _EITHER else "vector"


def _work(instruction: Instruction, engine: str) -> tuple[str, int]:
    """Returns an instruction's work on its engine: the kind that is counted, and the amount."""
    if engine == "tensor":
        stationary, moving = (instruction.reads * 2)[:2]
        double = bool(instruction.op == "matmul" and instruction.attributes[1])
        onezero = bool(instruction.op == "matmul" and instruction.attributes[2])
        columns, rows = (_per_partition(t) // (2 if double else 1) for t in (stationary, moving))
        taken = max(min(LEAST_COLUMNS, columns), rows)
        return _kind(moving), taken // 2 if onezero and moving.dtype == float32 else taken
    if engine == "dma":
        tensors = (*instruction.reads, *instruction.writes)
        return str(min(map(_run, tensors))), max(_bytes(instruction.reads), _bytes(instruction.writes))
    most = max(map(_per_partition, (*instruction.reads, *instruction.writes)))
    if _reduces(instruction):
        most += REDUCE_ELEMENTS
    wide = sum(t.buffer.kind == "sbuf" and 1 < most == _per_partition(t) for t in instruction.reads)
    return ("two" if engine == "vector" and wide > 1 else "one"), most


def _kind(tensor: NkiTensor) -> str:
    """Returns the kind under which products of a tensor are counted."""
    size = tensor.dtype.itemsize
    return "float32" if size > 2 else "float8" if size == 1 else str(tensor.dtype)


def _broadcast_row(instruction: Instruction) -> NkiTensor | None:
    """Returns the operand that has one partition in SBUF and is used on many."""
    for tensor in instruction.reads:
        if tensor.on_chip and tensor.gather is None and tensor.shape and tensor.shape[0] > 1 and tensor.strides[0] == 0:
            return tensor
    return None


def _per_partition(tensor: NkiTensor) -> int:
    return math.prod(tensor.shape[1:])


def _bytes(tensors: Sequence[NkiTensor]) -> int:
    return sum(t.size * t.dtype.itemsize for t in tensors)


def _run(tensor: NkiTensor) -> int:
    """Returns the contiguous bytes of a tensor, or of its partition on the chip, rounded down to a power of two."""
    run = tensor.dtype.itemsize
    if tensor.gather is None:
        for stride, size in reversed(tuple(zip(tensor.strides, tensor.shape, strict=True))[tensor.on_chip :]):
            if size > 1 and stride * tensor.dtype.itemsize != run:
                break
            run *= size
    return 1 << (run.bit_length() - 1)
