"""What a recorded kernel takes by the documented formulas: instructions and cycles of each engine, DMA, and memory.

This is a model and no measurement.

Cycles (AWS's documentation of nki.isa): the vector and scalar engines take one per element of a partition, 64 at least; an
activation that reduces as well takes 64 more; GpSimd takes 150 more; the tensor engine takes max(min(64, columns of the stationary
tile), columns of the moving one), four times that for float32 or, where an operand is said to have ones and zeros alone, twice. DMA
is counted in bytes. What instructions wait for each other is not modelled. The kernel's notes have the figures; `kernelgen inspect
--cost` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nki_interpreter.checks import at_once
from nki_interpreter.dtypes import float32
from nki_interpreter.program import PSUM, SBUF, Block, Instruction, Loop, NkiMemory
from nki_interpreter.roll import Rolled
from nki_interpreter.tensors import NkiTensor

LEAST_CYCLES = 64
GPSIMD_CYCLES = 150
REDUCE_CYCLES = 64

ENGINES = ("tensor", "vector", "scalar", "gpsimd")

_GPSIMD = {
    "affine_select", "gather_flattened", "iota", "local_gather", "nonzero_with_count", "partition_reduce", "shuffle", "topk",
}  # fmt: skip
_DMA = {"dma_compute", "rmw"}


@dataclass(slots=True)
class Cost:
    """What a kernel takes.

    Attributes:
        instructions: of each engine, and of DMA.
        cycles: of each engine.
        dma_bytes: what DMA moves between memories.
        sbuf_bytes, psum_bytes: the most of SBUF and PSUM that is in use at once, per partition (`checks.at_once`); None for a
            kernel of the older NKI, whose compiler chooses.
    """

    instructions: dict[str, int] = field(default_factory=dict)
    cycles: dict[str, int] = field(default_factory=dict)
    dma_bytes: int = 0
    sbuf_bytes: int | None = None
    psum_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        memory = {"sbuf": self.sbuf_bytes, "psum": self.psum_bytes}
        return {
            "cycles": self.cycles,
            "instructions": self.instructions,
            "dma_bytes": self.dma_bytes,
            **{f"{kind}_bytes_per_partition": n for kind, n in memory.items() if n is not None},
        }


def cost(block: Block, storages: Sequence[NkiMemory], older: bool = False) -> Cost:
    """Returns what a kernel takes.

    Args:
        block: what was recorded; loops may be rolled.
        storages: all memory that it uses.
        older: whether it is of the older NKI.
    """
    found = Cost(dict.fromkeys((*ENGINES, "dma"), 0), dict.fromkeys(ENGINES, 0))
    for instruction, times in _instructions(block.items, 1):
        engine = _engine(instruction)
        found.instructions[engine] += times
        if engine == "dma":
            found.dma_bytes += times * _moved(instruction)
        else:
            found.cycles[engine] += times * _cycles(instruction, engine)
    if not older:
        found.sbuf_bytes, found.psum_bytes = (at_once(storages, buffer)[0] for buffer in (SBUF, PSUM))
    return found


def _instructions(items: Iterable[Any], times: int) -> Iterator[tuple[Instruction, int]]:
    for item in items:
        if isinstance(item, Instruction):
            yield item, times
        elif isinstance(item, Rolled):
            yield from _instructions(item.body.items, times * item.count)
        elif isinstance(item, Loop):
            for iteration in item.iterations:
                yield from _instructions(iteration.items, times)


def _engine(instruction: Instruction) -> str:
    op = instruction.op
    tensors = (*instruction.reads, *instruction.writes)
    if op in _DMA or (op in ("assign", "transpose", "fill") and any(not t.on_chip for t in tensors)):
        return "dma"
    if op == "matmul" or (op == "transpose" and instruction.writes[0].buffer.kind == "psum"):
        return "tensor"
    if op == "activation":
        return "scalar"
    if op == "tensor_tensor":
        return str(instruction.attributes[1])
    return "gpsimd" if op in _GPSIMD else "vector"


def _cycles(instruction: Instruction, engine: str) -> int:
    if engine == "tensor":
        stationary, moving = (instruction.reads * 2)[:2]
        double = bool(instruction.op == "matmul" and instruction.attributes[1])
        onezero = bool(instruction.op == "matmul" and instruction.attributes[2])
        columns, rows = (_per_partition(t) // (2 if double else 1) for t in (stationary, moving))
        return max(min(LEAST_CYCLES, columns), rows) * ((2 if onezero else 4) if moving.dtype == float32 else 1)
    most = max(map(_per_partition, (*instruction.reads, *instruction.writes)))
    taken = max(LEAST_CYCLES, most)
    if engine == "scalar" and len(instruction.writes) > 1:
        taken += REDUCE_CYCLES
    return taken + (GPSIMD_CYCLES if engine == "gpsimd" else 0)


def _per_partition(tensor: NkiTensor) -> int:
    return math.prod(tensor.shape[1:])


def _moved(instruction: Instruction) -> int:
    """Returns the bytes that a DMA writes, or reads where that is more."""
    read = sum(t.size * t.dtype.itemsize for t in instruction.reads)
    return max(read, sum(t.size * t.dtype.itemsize for t in instruction.writes))
