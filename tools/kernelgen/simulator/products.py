"""Rewrites products of a matrix and a few rows so that XLA computes them on the CPU as fast as it reads the matrix.

For the emitted HLO, XLA first writes the whole matrix to memory, converted to float32 or dequantized, and then reads it again. If
the product has the transposed float32 matrix, XLA fuses the computation of its elements into the loop of the product.
This rewrite changes only the simulator's copy of the HLO. Results differ only in the order of sums.
"""

from __future__ import annotations

import math
from typing import Any

from kernelgen.hlo import proto
from kernelgen.simulator.writing import F32, Module, Writer, become_reshape

MAX_ROWS = 4
"""The most rows of the smaller operand; each becomes a product of its own."""

MAX_ROWS_UNPACKED = 1
"""The most rows if the matrix is dequantized, because every product repeats that."""

MIN_ELEMENTS = 1 << 14
"""The fewest elements of the matrix. The rewrite does not speed up smaller ones."""

MAX_SUM = 4000
"""The most elements of a row. With rows of 16 KiB and more, XLA fuses nothing into the loop of a product."""

_FLOATS = {F32, 10, 16}  # float16, bfloat16


def rewrite(hlo: bytes) -> bytes:
    """Returns a serialized `HloModuleProto` that computes the same, its products of matrices and few rows rewritten.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo, Module)
    writer = Writer(module)
    changed = False
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        # Find all products before the first rewrite: the computation of a matrix may contain a product, which the rewrite replaces.
        products = {i.id: _product(i, by_id) for i in computation.instructions}
        writer.out = []
        for instruction in computation.instructions:
            product = products[instruction.id]
            if product is not None:
                product.write(instruction, writer)
                changed = True
            writer.out.append(instruction)
        if changed:
            computation.ClearField("instructions")
            computation.instructions.extend(writer.out)
    return proto.serialize(module) if changed else hlo


class _Product:
    """A product of a matrix [m, k] and the rows [n, k].

    Attributes:
        rows: the instruction that produces the rows.
        matrix: the instruction that produces the matrix.
        n: the number of rows.
        m: the number of rows of the matrix.
        k: the size of the contracted axis.
        last: whether the contracted axis is the matrix's last; else it is its first.
        swapped: whether the result is [m, n]; else it is [n, m].
    """

    def __init__(self, rows: Any, matrix: Any, sizes: tuple[int, int, int], *, last: bool, swapped: bool) -> None:
        self.rows, self.matrix, (self.n, self.m, self.k) = rows, matrix, sizes
        self.last, self.swapped = last, swapped

    def write(self, dot: Any, writer: Writer) -> None:
        """Writes the instructions that compute the product; `dot` becomes the last one."""
        # XLA would compute the rows again for each row of the matrix.
        flat = writer.computed_once(writer.floats(self.rows))
        rows = writer.add(dot, "reshape", (self.n, self.k), flat)
        matrix = writer.floats(self.matrix)
        if self.last:
            matrix = writer.add(
                dot, "transpose", (self.k, self.m), writer.add(dot, "reshape", (self.m, self.k), matrix)
            )
            matrix.dimensions.extend((1, 0))
        else:
            matrix = writer.add(dot, "reshape", (self.k, self.m), matrix)

        results = []
        for i in range(self.n):
            row = writer.slice(rows, 0, i) if self.n > 1 else rows
            made = writer.add(dot, "dot", (self.m,), writer.add(dot, "reshape", (self.k,), row), matrix)
            made.dot.lhs_contracting.append(0)
            made.dot.rhs_contracting.append(0)
            results.append(writer.add(dot, "reshape", (1, self.m), made))
        result = results[0]
        if self.n > 1:
            result = writer.add(dot, "concatenate", (self.n, self.m), *results)
            result.dimensions.append(0)
            if self.swapped:
                result = writer.add(dot, "transpose", (self.m, self.n), result)
                result.dimensions.extend((1, 0))
        become_reshape(dot, result)


def _product(dot: Any, by_id: dict[int, Any]) -> _Product | None:
    """Returns an instruction as a product; None if it can't be rewritten."""
    if dot.opcode != "dot" or dot.shape.element_type != F32:
        return None
    lhs, rhs = (by_id[i] for i in dot.operand_ids)
    numbers = dot.dot
    sides = [
        MatrixOperand.of(lhs, list(numbers.lhs_contracting), list(numbers.lhs_batch)),
        MatrixOperand.of(rhs, list(numbers.rhs_contracting), list(numbers.rhs_batch)),
    ]
    for swapped in (False, True):
        rows, matrix = reversed(sides) if swapped else sides
        if rows is None or matrix is None:
            return None
        few = rows.free <= MAX_ROWS and rows.free < matrix.free and rows.k <= MAX_SUM and rows.last
        if few and rows.free <= _max_rows(matrix.made_by, by_id) and matrix.k * matrix.free >= MIN_ELEMENTS:
            sizes = (rows.free, matrix.free, matrix.k)
            return _Product(rows.made_by, matrix.made_by, sizes, last=matrix.last, swapped=swapped)
    return None


_MOVED = {"bitcast-convert", "broadcast", "convert", "reshape", "slice", "transpose"}
"""Opcodes that move numbers or change only their type."""
_COMPUTED = {
    "add",
    "and",
    "compare",
    "concatenate",
    "multiply",
    "or",
    "select",
    "shift-left",
    "shift-right-logical",
    "subtract",
}
"""The other opcodes of dequantizing."""


def _max_rows(matrix: Any, by_id: dict[int, Any]) -> int:
    """Returns the most rows of a product that is rewritten, by the computation of its matrix that XLA would fuse into its loop.

    The result is 0 if the computation concatenates arrays, such as the scales of Q4_K and Q5_K: the loop would select the array for
    each element.
    """
    seen: set[int] = set()
    opcodes: set[str] = set()
    ahead = [matrix]
    while ahead:
        instruction = ahead.pop()
        if instruction.id in seen or instruction.opcode not in _MOVED | _COMPUTED:
            continue
        seen.add(instruction.id)
        opcodes.add(instruction.opcode)
        ahead += (by_id[i] for i in instruction.operand_ids)
    if "concatenate" in opcodes:
        return 0
    return MAX_ROWS if opcodes <= _MOVED else MAX_ROWS_UNPACKED


class MatrixOperand:
    """One operand of a product as a matrix.

    Attributes:
        made_by: the instruction that produces it.
        k: the size of the contracted axis.
        free: the number of elements over all other axes.
        last: whether the contracted axis is the last one; else it is the first one.
    """

    def __init__(self, made_by: Any, k: int, free: int, *, last: bool) -> None:
        self.made_by, self.k, self.free, self.last = made_by, k, free, last

    @staticmethod
    def of(made_by: Any, contracting: list[int], batch: list[int]) -> MatrixOperand | None:
        """Returns the operand; None if it does not have floats, is several matrices, or has its axes in another order."""
        shape = list(made_by.shape.dimensions)
        if (
            made_by.shape.element_type not in _FLOATS
            or len(contracting) != 1
            or math.prod(shape[b] for b in batch) != 1
        ):
            return None
        (axis,) = contracting
        before, after = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if after == 1:
            return MatrixOperand(made_by, shape[axis], before, last=True)
        return MatrixOperand(made_by, shape[axis], after, last=False) if before == 1 else None
