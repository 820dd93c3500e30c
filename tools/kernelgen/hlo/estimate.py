"""Estimates a compile and its program from the HLO alone: instructions, DMA descriptors, and memory on host and device.

This is only a model of neuronx-cc's tiling. Its fusion, unrolling and spilling are not public, and where it misses parallelism it
makes ten times as many instructions. docs/results/real-artifacts.md compares the estimates with real NEFFs;
`tools/corpus/estimates.py` measures that. The tensor engine's part is arithmetic (128 partitions, 512 columns, a load of weights
for each product and two instructions for each transpose of a tile); the constants below are fitted.

Instructions inside an NKI kernel are not counted: `Estimate.uncounted` names such calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from kernelgen.hlo import proto
from kernelgen.hlo.custom_calls import TARGET as NATIVE_KERNEL
from kernelgen.hlo.linted import NO_WORK, TRANSCENDENTAL, LintedModule, elements, size
from kernelgen.targets import COMPILE_KB, COMPILE_MB, INSTRUCTION_BYTES, PARTITIONS, TARGETS

MAX_DESCRIPTORS = 16_777_200
"""Maximum DMA descriptors of a ring that the runtime loads: "Descriptor limit reached"."""
RING_BYTES = 32
"""Memory of a run of a spill that the runtime reserves when it loads a program."""

MOVING = 512
"""Columns of a product's moving operand: the f32 elements of a PSUM bank."""
REUSE = 4
"""Products per load of weights, in a dot of many columns."""
FREE = 400
"""Fitted: elements per partition of an elementwise instruction."""
RUN = 4096
"""Maximum bytes of a DMA descriptor, from AWS's advice and real NEFFs."""
WEIGHT_RUN = 512
"""Fitted: the same, for a convolution's weights."""
OVERHEAD = 1.2
"""Fitted: instructions of a product, per instruction of the arithmetic."""
GATHERED_FREE, GATHERED_RUN = 172, 20
"""Elements of an instruction, and bytes of a spill's run, where a gather gives each row its own matrix. From a mixture of experts
that neuronx-cc 2.27 refused with 18.5 million instructions, and two that did not load."""
SPILL = 1 << 22
"""Fitted: bytes of a product's or gather's result from which it is spilled: written, and read again."""
FIXED = {"PE": 1, "Activation": 1, "DVE": 1, "Pool": 1, "SP": 1}
"""Instructions of each engine in an empty program; an input adds one of SP, and a result two of Pool."""

TRANSFORMER_SPILLS = 1 / 20
"""Factor on runs of spills with `--model-type transformer`: measured 15 to 35 times fewer with 2.27."""

ENGINES = tuple(FIXED)
"""Names of the engines, as in the names of a NEFF's members."""

_PASSES = {"batch-norm-training": 3, "batch-norm-inference": 1, "batch-norm-grad": 6, "rng-bit-generator": 10}
"""Instructions per tile, for opcodes that need several."""
_NAMED = {"AwsNeuronSoftmax": 4, "AwsNeuronRmsNorm": 4, "AwsNeuronSoftmaxBackward": 4}
"""The same for custom calls; AWS's other custom calls need one."""
_IN_PLACE = frozenset(("dynamic-update-slice", "scatter"))
_MATERIALIZED = _IN_PLACE | frozenset("concatenate convolution dot gather reduce reduce-window sort".split())
_MARKERS = ("Marker", "Sharding", "StaticRing")
"""Parts of names of custom calls that only return their operand."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated resources of a program.

    Attributes:
        instructions: per physical core, by engine (`ENGINES`).
        dma_descriptors: per physical core, of all its queues.
        code_bytes: memory of the instructions, over all physical cores.
        ring_bytes: memory of the rings of spills, over all physical cores.
        compile_memory_mb: memory that the compile needs on its host, in MiB.
        uncounted: targets of custom calls whose instructions are not counted.
    """

    instructions: Mapping[str, int]
    dma_descriptors: int
    code_bytes: int
    ring_bytes: int
    compile_memory_mb: int
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Instructions of all engines of a physical core."""
        return sum(self.instructions.values())


def estimate(
    module: bytes | LintedModule, target: str, lnc: int | None = None, *, model_type: str = "generic"
) -> Estimate:
    """Returns the estimated resources of a module.

    Args:
        module: a serialized `HloModuleProto`, or a parsed one.
        target: neuronx-cc's `--target`.
        lnc: physical cores of a logical one, which share the work; None for the target's default.
        model_type: neuronx-cc's `--model-type`.

    Raises:
        ValueError: `module` is not a serialized `HloModuleProto`.
    """
    m = module if isinstance(module, LintedModule) else LintedModule(module)
    cores = TARGETS[target].lnc if lnc is None else lnc
    count = _InstructionCount(m, TARGETS[target].state_buffer_mib)
    count.instructions()
    count.tensors()
    descriptors = count.runs + count.spilled
    for engine in ("PE", "Activation"):
        count.work[engine] *= OVERHEAD
    instructions = {engine: ceil(FIXED[engine] + count.work[engine] / cores) for engine in ENGINES}
    instructions["SP"] += int(descriptors / PARTITIONS / cores)
    total = sum(instructions.values()) * cores
    few = TRANSFORMER_SPILLS if model_type == "transformer" else 1
    memory = COMPILE_KB.get(model_type, COMPILE_KB["generic"]) * total // 1024
    return Estimate(
        instructions,
        ceil(descriptors / cores),
        INSTRUCTION_BYTES * total,
        ceil(RING_BYTES * count.spilled * few),
        COMPILE_MB + memory,
        tuple(sorted(count.uncounted)),
    )


def _is_marker(i: Any) -> bool:
    return any(word in i.custom_call_target for word in _MARKERS)


def _tiles(elements: float) -> int:
    return ceil(elements / (PARTITIONS * FREE))


class _InstructionCount:
    """Adds up the resources of a module's instructions."""

    def __init__(self, m: LintedModule, state_buffer_mib: int) -> None:
        self.m = m
        self.work = dict.fromkeys(ENGINES, 0.0)
        self.runs = self.spilled = 0.0
        self.uncounted: set[str] = set()

    def instructions(self) -> None:
        tiles: dict[int, dict[int, int]] = {}
        for computation, i, operands, times in self.m.executed():
            if computation.id not in tiles:
                tiles[computation.id] = self.reduced(computation)
            if i.opcode not in NO_WORK:
                self.instruction(computation, i, operands, times, tiles[computation.id])

    def reduced(self, computation: Any) -> dict[int, int]:
        """Returns the tiles of reduced values, and of the elementwise operands that they are fused with, by instruction.

        Kept dimensions lie along the partitions, and summed ones along the free dimension, however short it is.
        """
        tiles: dict[int, int] = {}
        for i in reversed(computation.instructions):
            if i.opcode == "reduce":
                operand = self.m.operands(computation, i)[0]
                total = prod(operand.shape.dimensions)
                summed = prod(operand.shape.dimensions[n] for n in i.dimensions)
                tiles[i.id] = max(_tiles(total), ceil(total / max(summed, 1) / PARTITIONS))
            elif i.id not in tiles or i.opcode in _MATERIALIZED:
                continue
            for o in self.m.operands(computation, i):
                if prod(o.shape.dimensions) * (i.opcode != "reduce") in (0, prod(i.shape.dimensions)):
                    tiles[o.id] = max(tiles.get(o.id, 0), tiles[i.id])
        return tiles

    def tensors(self) -> None:
        """Counts the program's reads and writes."""
        entry = proto.entry(self.m.message)
        convolutions = [i for i in entry.instructions if i.opcode == "convolution"]
        narrow = {self.parameter(entry, self.m.operands(entry, i)[1]).id for i in convolutions}
        for p in proto.parameters(entry):
            self.runs += _runs(p.shape, WEIGHT_RUN if p.id in narrow else RUN)
            self.work["SP"] += 1
        root = self.m.root(entry.id)
        for i in self.m.operands(entry, root) if root.opcode == "tuple" else [root]:
            self.runs += _runs(i.shape)
            # An unchanged input is copied from memory to memory.
            copied = self.m.source(entry, i).opcode == "parameter"
            self.work["SP" if copied else "Pool"] += 1 if copied else 2

    def parameter(self, computation: Any, i: Any) -> Any:
        """Returns the instruction whose values `i` repeats, also through a custom call that returns its operand."""
        i = self.m.source(computation, i)
        while i.opcode == "custom-call" and i.operand_ids and _is_marker(i):
            i = self.m.source(computation, self.m.operands(computation, i)[0])
        return i

    def instruction(self, computation: Any, i: Any, operands: list[Any], times: int, tiles: Mapping[int, int]) -> None:
        if i.opcode == "convert" and operands[0].opcode != "parameter":
            return  # the producer of a value can write it in any type, so a convert after it is free
        made = elements(i, operands)
        if i.opcode == "dot":
            self.dot(computation, i, operands, times)
        elif i.opcode == "convolution":
            self.convolution(i, operands, times)
        elif i.opcode == "transpose":
            self.transpose(i, times)
        elif i.opcode in ("reduce-window", "select-and-scatter"):
            self.work["DVE"] += times * _tiles(made * prod(d.size for d in i.window.dimensions))
        elif i.opcode in ("gather", "dynamic-slice", "dynamic-update-slice", "scatter"):
            self.indirect(i, operands, times)
        elif i.opcode == "sort":
            length = operands[0].shape.dimensions[i.dimensions[0]] if operands[0].shape.dimensions else 1
            rows = prod(operands[0].shape.dimensions) // max(length, 1)
            # The vector engine finds the 8 largest values at a time, and removes them.
            self.work["DVE"] += times * 2 * ceil(length / 8) * ceil(rows / PARTITIONS)
        elif i.opcode == "custom-call":
            if i.custom_call_target == NATIVE_KERNEL:
                self.uncounted.add(NATIVE_KERNEL)
            elif not _is_marker(i):
                self.work["DVE"] += times * _NAMED.get(i.custom_call_target, 1) * _tiles(made)
        else:
            engine = "Activation" if i.opcode in TRANSCENDENTAL else "DVE"
            self.work[engine] += times * _PASSES.get(i.opcode, 1) * tiles.get(i.id, _tiles(made))
        if i.opcode.startswith("batch-norm"):
            self.work["Activation"] += times * tiles.get(i.id, _tiles(made))
        # Elementwise instructions that follow are fused with it: one tensor for all of them. A tensor updated in place exists
        # already, and descriptors of the written part count: in a loop, a slice per iteration.
        made_anew = i.opcode in _MATERIALIZED - _IN_PLACE
        if made_anew and size(i.shape) > SPILL and i.id != computation.root_id:
            self.spilled += 2 * times * _runs(i.shape)

    def dot(self, computation: Any, i: Any, operands: list[Any], times: int) -> None:
        batch, inner, m, n = product_sizes(i, operands)
        k = ceil(inner / PARTITIONS)
        if batch > 1 and min(m, n) == 1 and any(self.gathered(computation, o) for o in operands):
            self.work["DVE"] += times * ceil(batch * inner * max(m, n) / GATHERED_FREE)
            self.spilled += times * batch * inner * max(m, n) * 2 / GATHERED_RUN
            return
        # The shorter side is stationary, the longer one moves.
        stays, moves = ceil(min(m, n) / PARTITIONS), ceil(max(m, n) / MOVING)
        products = batch * k * stays * moves
        self.work["PE"] += times * (products + ceil(products / min(REUSE, moves)))
        self.work["Activation"] += times * batch * stays * moves
        # An operand whose rows run along the contracted dimension has it along the free dimension, and must be transposed.
        for o, contracting, rows in zip(operands, (i.dot.lhs_contracting, i.dot.rhs_contracting), (m, n), strict=True):
            if len(o.shape.dimensions) - 1 in contracting and rows > 1:
                self.transposes(times * batch * k * ceil(rows / PARTITIONS))

    def gathered(self, computation: Any, i: Any) -> bool:
        """Whether an operand is the result of a gather, or an elementwise function of one."""
        total = prod(i.shape.dimensions)
        while i.opcode not in _MATERIALIZED and i.operand_ids:
            operands = self.m.operands(computation, i)
            i = next((o for o in operands if prod(o.shape.dimensions) == total), operands[0])
        return bool(i.opcode == "gather")

    def convolution(self, i: Any, operands: list[Any], times: int) -> None:
        c = i.convolution
        kernel = list(operands[1].shape.dimensions)
        inner, outer = kernel[c.kernel_input], kernel[c.kernel_output]
        taps = prod(kernel) // (inner * outer)
        groups = max(i.feature_group_count, 1)
        made = list(i.shape.dimensions)
        rows = [made[n] for n in c.output_spatial]
        if taps > prod(rows):  # a gradient of weights: the sum runs over the image
            k = ceil(inner * taps / PARTITIONS)
            stays, moves = ceil(outer / PARTITIONS), ceil(prod(made) / outer / MOVING)
            self.work["PE"] += times * 2 * k * stays * moves
            self.transposes(times * k * (stays + moves))
            return
        # A tile of the result is a fixed number of whole rows of one image.
        width = rows[-1] if rows else 1
        height = prod(rows) // width
        together = next(n for n in range(min(max(MOVING // width, 1), height), 0, -1) if height % n == 0)
        moves = made[c.output_batch] * height // together * ceil(width / MOVING)
        stays = groups * ceil(outer / groups / PARTITIONS)
        weights = taps * stays * ceil(inner / PARTITIONS)
        self.work["PE"] += times * 2 * weights * moves
        self.work["Activation"] += times * stays * moves
        self.transposes(times * weights)

    def transpose(self, i: Any, times: int) -> None:
        if i.shape.dimensions and list(i.dimensions)[-1] != len(i.dimensions) - 1:
            self.transposes(times * ceil(prod(i.shape.dimensions) / PARTITIONS**2))
        else:
            self.work["DVE"] += times * _tiles(prod(i.shape.dimensions))

    def transposes(self, tiles: int) -> None:
        """Counts transposes of 128 x 128 tiles: a product with the identity each, and copies of four banks each."""
        self.work["PE"] += 2 * tiles
        self.work["Activation"] += ceil(tiles * PARTITIONS / MOVING)

    def indirect(self, i: Any, operands: list[Any], times: int) -> None:
        """Counts a descriptor for each row that an index selects."""
        moved, row = found_by_index(i, operands)
        rows = prod(moved.dimensions) / max(row, 1)
        found = rows * max(ceil(size(moved) / max(rows, 1) / RUN), 1)
        self.runs += times * found
        self.work["Pool"] += times * ceil(found / PARTITIONS)


def _runs(shape: Any, run: int = RUN) -> int:
    """Returns the descriptors that move a tensor in runs of a given size in bytes."""
    return ceil(size(shape) / run)


def product_sizes(dot: Any, operands: list[Any]) -> tuple[int, int, int, int]:
    """Returns the number of matrices that a dot multiplies, the length of its sums, and the rows of both operands."""
    lhs, rhs = (list(o.shape.dimensions) for o in operands)
    batch = prod(lhs[n] for n in dot.dot.lhs_batch)
    inner = prod(lhs[n] for n in dot.dot.lhs_contracting)
    m, n = (prod(shape) // max(batch * inner, 1) for shape in (lhs, rhs))
    return batch, inner, m, n


def found_by_index(i: Any, operands: list[Any]) -> tuple[Any, int]:
    """Returns the shape that an indexed instruction moves, and the elements of one of its rows."""
    if i.opcode == "gather":
        return i.shape, prod(i.gather_slice_sizes)
    if i.opcode == "scatter":
        moved = operands[-1].shape
        return moved, prod(moved.dimensions) // max(prod(operands[len(operands) // 2].shape.dimensions[:1]), 1)
    moved = i.shape if i.opcode == "dynamic-slice" else operands[1].shape
    return moved, prod(moved.dimensions)
