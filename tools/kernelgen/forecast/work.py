"""Counts a program's work from its HLO: bytes of device memory, columns and elements by engine, descriptors.

neuronx-cc's schedule is not public; the rules here are:

- A parameter, or the slice in use, is read once; only descriptors count for a gather from it. Results are written; of a result that
  updates a parameter, only the overwritten part.
- An instruction waits for its operands. The wait counts once for each instruction on the longest path from parameters to results.
- A product runs in tiles of 128 x 128 of one operand, through which the other operand's rows move, at least 128 columns. With more
  than 128 rows, using a weight takes longer than reading it, and the compiler alternates between loading and multiplying.
- Elementwise work counts the elements of one partition; all 128 work at once. The scalar engine computes functions such as `exp`,
  the vector engine two operands, and either one operand. With fewer than 128 rows, each row lies in one partition; a single row
  is spread over all.
- The result of a product of several matrices (scores of attention) has its rows in the partitions, and as many matrices beside each
  other as there are start positions (every 32nd partition).
- With few rows most partitions are idle in elementwise work, and since the next product waits for it, nothing overlaps it.
- A value from such a product that is larger than SBUF and has a reduction and another user (the maximum of scores, the sum of their
  exponentials) is written, and read by each user. Other values stay on the chip, tile by tile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any

from kernelgen.hlo import proto
from kernelgen.hlo.canonicalize import inline_calls
from kernelgen.hlo.custom_calls import TARGET as NATIVE_KERNEL
from kernelgen.hlo.estimate import found_by_index, product_sizes
from kernelgen.hlo.linted import NO_WORK, TRANSCENDENTAL, LintedModule, element_type, elements, size
from kernelgen.targets import PARTITIONS

_SAME_BYTES = frozenset("bitcast bitcast-convert optimization-barrier reshape".split())
_MADE = frozenset("custom-call dot sort while".split())
"""Opcodes at which the search for a matrix's rows ends."""
_SLICES = frozenset(("dynamic-slice", "slice"))
_VIEWS = _SAME_BYTES | {"get-tuple-element", "tuple"}
"""Opcodes that return their operand unchanged."""
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}

ROW_BYTES = 2048
"""Maximum bytes of a gathered row per descriptor (the size for which `descriptor_ns` is available)."""

QUADRANT = 32
"""Start positions of partitions are multiples of it (AWS's architecture guide for NKI: partitions 0, 32, 64 or 96)."""

LONG_ROW = 4096
"""Contiguous bytes from which DMA reaches its full rate (AWS's architecture guide for NKI)."""


@dataclass(slots=True)
class Work:
    """The work of a program, for a whole logical core.

    Attributes:
        read: bytes of parameters.
        narrow: of these, bytes of matrices with short rows, by bytes per row; a row is contiguous for DMA. Blocks of a quantized
            type form such a row, too.
        written: bytes of results.
        spilled: bytes that are written and read again because SBUF is too small.
        columns: columns that move through tiles of the tensor engine, by dtype, in products of at most 128 rows.
        columns_many: the same in products of more rows.
        vector, vector_two, scalar, either: elements of a partition; `vector_two` for two operands.
        waited: elements of a partition that are computed in few partitions while nothing else runs.
        depth: instructions on the longest path from parameters to results; each waits for the previous one.
        rows, elements: DMA descriptors of indexed accesses, and those among them for single elements.
        nki_calls: calls of kernels compiled by NKI's compiler; their work is not counted.
        all_reduces: number of sums over cores.
        reduced: bytes of these sums.
    """

    read: float = 0
    narrow: Counter[int] = field(default_factory=Counter)
    written: float = 0
    spilled: float = 0
    columns: Counter[str] = field(default_factory=Counter)
    columns_many: Counter[str] = field(default_factory=Counter)
    vector: float = 0
    vector_two: float = 0
    scalar: float = 0
    either: float = 0
    waited: float = 0
    depth: float = 0
    rows: float = 0
    elements: float = 0
    nki_calls: int = 0
    all_reduces: int = 0
    reduced: float = 0


def of_one_core(work: Work, cores: int) -> Work:
    """Returns the work of one of several cores that share a program's weights, heads and cache evenly.

    It also divides work that each core would repeat (norms, the choice of experts): that is small.
    """
    divided = ("read", "written", "spilled", "vector", "vector_two", "scalar", "either", "waited", "rows", "elements")
    counted: dict[str, Any] = {
        name: Counter({dtype: ceil(n / cores) for dtype, n in getattr(work, name).items()})
        for name in ("columns", "columns_many", "narrow")
    }
    return replace(work, **counted, **{name: getattr(work, name) / cores for name in divided})


def of_hlo(hlo: bytes, sbuf_bytes: int) -> Work:
    """Returns the work of a program.

    Args:
        hlo: a serialized `HloModuleProto`.
        sbuf_bytes: SBUF of a logical core.

    Raises:
        ValueError: it is not a serialized `HloModuleProto`.
    """
    module = proto.parse(hlo)
    if any(i.opcode == "call" for computation in module.computations for i in computation.instructions):
        inline_calls(module)  # as in the compiler's input: a function may slice or only convert its parameters
        hlo = proto.serialize(module)
    m = LintedModule(hlo)
    count = _WorkCount(m, sbuf_bytes)
    entry = m.computations[m.message.entry_computation_id]
    count.work.depth = count.computation(entry, 1, {p.parameter_number: True for p in proto.parameters(entry)})
    root = m.root(entry.id)
    for i in m.operands(entry, root) if root.opcode == "tuple" else [root]:
        if i.id not in count.updated and i.opcode != "parameter":
            count.work.written += size(i.shape)
    return count.work


class _WorkCount:
    def __init__(self, m: LintedModule, sbuf_bytes: int) -> None:
        self.m = m
        self.sbuf_bytes = sbuf_bytes
        self.work = Work()
        self.updated: set[int] = set()
        """Instructions of the entry that are parameters with an overwritten part."""
        self.inside = 0.0
        """The number of instructions on the longest path inside the current instruction."""
        self.partitions: dict[tuple[int, int], int] = {}
        """By computation and instruction, the number of partitions of a value from a product of several matrices."""

    def computation(self, computation: Any, times: float, stored: dict[Any, bool]) -> float:
        """Counts a computation, and returns the number of instructions on its longest path.

        Args:
            computation: the computation.
            times: number of times that it runs.
            stored: its parameters, or elements of its one tuple, that are in device memory.
        """
        users: Counter[int] = Counter(o for i in computation.instructions for o in set(i.operand_ids))
        reduced = {o for i in computation.instructions if i.opcode == "reduce" for o in i.operand_ids}
        memory: dict[int, Any] = {}  # whether a value is in device memory, or which elements of a tuple are
        seen: set[int] = set()
        depths: dict[int, float] = {}
        for i in computation.instructions:
            operands = self.m.operands(computation, i)
            self.inside = float(i.opcode not in NO_WORK)
            if i.opcode == "parameter":
                whole = bool(i.shape.tuple_shapes)
                memory[i.id] = stored if whole else stored.get(i.parameter_number, False)
            elif i.opcode == "tuple":
                memory[i.id] = {n: memory[o.id] for n, o in enumerate(operands)}
            elif i.opcode == "get-tuple-element":
                of = memory[operands[0].id]
                memory[i.id] = of.get(i.tuple_index, False) if isinstance(of, dict) else False
            elif i.opcode in _VIEWS:
                memory[i.id] = memory[operands[0].id] if operands else False
                if memory[i.id] and operands[0].id in self.updated:
                    self.updated.add(i.id)
            else:
                self.reads(computation, i, operands, memory, times, seen)
                memory[i.id] = self.instruction(computation, i, operands, memory, times)
            depths[i.id] = self.inside + max((depths[o.id] for o in operands), default=0.0)
            self.attend(computation, i, operands)
            if users[i.id] > 1 and i.id in reduced and (computation.id, i.id) in self.partitions:
                self.work.spilled += (1 + users[i.id]) * times * size(i.shape) * (size(i.shape) > self.sbuf_bytes)
        return max(depths.values(), default=0.0)

    def attend(self, computation: Any, i: Any, operands: list[Any]) -> None:
        """Records the number of partitions of a value from a product of several matrices."""
        if i.opcode == "dot":
            batch, _, m, n = product_sizes(i, operands)
            if batch > 1:
                rows = min(m, n, PARTITIONS)
                beside = min(batch, PARTITIONS // (ceil(rows / QUADRANT) * QUADRANT))
                self.partitions[computation.id, i.id] = rows * beside
            return
        made = prod(i.shape.dimensions)
        for o in operands:
            partitions = self.partitions.get((computation.id, o.id))
            if partitions and (i.opcode == "reduce" or prod(o.shape.dimensions) == made):
                self.partitions[computation.id, i.id] = partitions

    def elements(self, computation: Any, operands: list[Any], kind: str, n: float) -> None:
        """Counts an instruction's elements."""
        largest = max(operands, key=lambda o: prod(o.shape.dimensions), default=None)
        partitions = min(
            (self.partitions.get((computation.id, o.id), PARTITIONS) for o in operands),
            default=PARTITIONS,
        )
        partitions = min(partitions, of_rows(largest.shape.dimensions) if largest else PARTITIONS)
        if partitions < PARTITIONS:
            self.work.waited += n / partitions
        else:
            setattr(self.work, kind, getattr(self.work, kind) + n / PARTITIONS)

    def reads(
        self, computation: Any, i: Any, operands: list[Any], memory: dict[int, Any], times: float, seen: set[int]
    ) -> None:
        """Counts an instruction's reads of device memory."""
        if i.opcode in ("while", "fusion", "conditional"):
            return
        for n, o in enumerate(operands):
            if memory[o.id] is not True or (n == 0 and i.opcode in ("dynamic-update-slice", "scatter")):
                continue
            if n == 0 and i.opcode == "gather":
                continue
            if n == 0 and i.opcode in _SLICES:
                self.work.read += times * size(i.shape)
            elif (origin := self.origin(computation, o).id) not in seen:
                seen.add(origin)
                self.work.read += times * size(o.shape)
        if i.opcode == "dot":
            for o, batch in zip(operands, (i.dot.lhs_batch, i.dot.rhs_batch), strict=True):
                if all(o.shape.dimensions[n] == 1 for n in batch):
                    self.matrix(computation, o, memory, times, seen)

    def matrix(self, computation: Any, operand: Any, memory: dict[int, Any], times: float, seen: set[int]) -> None:
        """Counts a product's reads of device memory in short rows: an operand that is one matrix, or the operand's sources.

        Args:
            computation: the product's computation.
            operand: an operand of the product.
            memory: whether each value of the computation is in device memory.
            times: number of times that the product runs.
            seen: receives the values that were counted, as the complements of their ids.
        """
        rows = prod(operand.shape.dimensions[:-1])
        waiting = [operand] if rows > 1 and rows == operand.shape.dimensions[-2] else []
        while waiting:
            i = self.origin(computation, waiting.pop())
            if ~i.id in seen or i.opcode in _MADE:
                continue
            seen.add(~i.id)
            sliced = i.opcode in _SLICES and memory[i.operand_ids[0]] is True
            if not sliced and memory[i.id] is not True:
                waiting += self.m.operands(computation, i)[i.opcode == "gather" :]  # indices into a table of values
                continue
            source = self.m.operands(computation, i)[0] if sliced else i
            axis = next((n for n in range(len(i.shape.dimensions)) if prod(i.shape.dimensions[: n + 1]) == rows), None)
            if axis is not None and axis + 1 < len(i.shape.dimensions):
                row = size(source.shape) // prod(source.shape.dimensions[: axis + 1])
                if row < LONG_ROW:
                    self.work.narrow[row] += ceil(times * size(i.shape))

    def origin(self, computation: Any, i: Any) -> Any:
        """Returns the instruction whose bytes another one returns unchanged."""
        while i.opcode in _SAME_BYTES:
            (i,) = self.m.operands(computation, i)
        return i

    def instruction(self, computation: Any, i: Any, operands: list[Any], memory: dict[int, Any], times: float) -> Any:
        """Counts an instruction, and returns whether its value is in device memory."""
        if called := self.m.called(computation, i):
            body, turns = called[-1]
            loop = i.opcode == "while"
            stored = memory[operands[0].id] if loop else {n: memory[o.id] for n, o in enumerate(operands)}
            self.inside = turns * self.computation(body, times * turns, stored if isinstance(stored, dict) else {})
            return loop and stored
        if i.opcode in NO_WORK:
            return False
        made = elements(i, operands)
        if i.opcode == "dot":
            self.dot(i, operands, times)
        elif i.opcode in ("dynamic-update-slice", "scatter"):
            self.found(i, operands, times)
            if memory[operands[0].id] is True:
                self.updated.add(i.id)
                return True
        elif i.opcode in ("gather", "dynamic-slice"):
            self.found(i, operands, times)
        elif i.opcode == "transpose":
            if i.shape.dimensions and list(i.dimensions)[-1] != len(i.dimensions) - 1:
                self.work.columns[_dtype(i)] += ceil(times * made / PARTITIONS)
        elif i.opcode in ("reduce", "reduce-window", "sort"):
            self.elements(computation, operands, "vector", times * prod(operands[0].shape.dimensions))
        elif i.opcode == "custom-call":
            self.work.nki_calls += int(times) * (i.custom_call_target == NATIVE_KERNEL)
            self.elements(computation, operands, "vector", times * made)
        elif i.opcode == "all-reduce":
            self.work.all_reduces += int(times)
            self.work.reduced += times * size(i.shape)
        elif i.opcode == "convert" and {element_type(o.shape) for o in (i, *operands)} <= {"f32", "bf16", "f16"}:
            # The producer of any other value can write it in any type, so a convert after it is free.
            if memory[operands[0].id] is True:
                self.elements(computation, operands, "either", times * made)
        elif i.opcode in TRANSCENDENTAL:
            self.elements(computation, operands, "scalar", times * made)
        elif i.opcode != "copy":
            full = [
                o for o in operands if prod(o.shape.dimensions) == made and o.opcode not in ("broadcast", "constant")
            ]
            self.elements(computation, operands, "vector_two" if len(full) > 1 else "either", times * made)
        return False

    def dot(self, i: Any, operands: list[Any], times: float) -> None:
        batch, inner, m, n = product_sizes(i, operands)
        columns = min(ceil(a / PARTITIONS) * max(b, PARTITIONS) for a, b in ((m, n), (n, m)))
        dtype = max((_dtype(o) for o in operands), key=lambda name: name == "float32")
        found = self.work.columns if min(m, n) <= PARTITIONS else self.work.columns_many
        found[dtype] += ceil(times * batch * ceil(inner / PARTITIONS) * columns)

    def found(self, i: Any, operands: list[Any], times: float) -> None:
        """Counts the descriptors of indexed accesses, and overwritten parts."""
        moved, row = found_by_index(i, operands)
        if i.opcode in ("dynamic-update-slice", "scatter"):
            self.work.written += times * size(moved)
        count = times * prod(moved.dimensions) / max(row, 1)
        if row == 1:
            self.work.elements += count
        else:
            pieces = ceil(size(moved) * times / max(count, 1) / ROW_BYTES) if i.opcode == "gather" else 1
            self.work.rows += count * pieces


def of_rows(dimensions: Sequence[int]) -> int:
    """Returns the number of partitions of a value with this shape."""
    rows = prod(dimensions[:-1])
    return rows if 1 < rows < PARTITIONS else PARTITIONS


def _dtype(i: Any) -> str:
    """Returns the dtype under which products of an instruction's values are counted."""
    name = element_type(i.shape)
    return "float8" if name.startswith("f8") else _DTYPES.get(name, "float32")
