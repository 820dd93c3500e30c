"""Rewrites products of a matrix and a few rows so that XLA computes them on the CPU as fast as it reads the matrix.

As emitted, XLA for the CPU first writes the whole matrix out as float32, or dequantized, and then reads it again. When the same
product is written with the float32 matrix transposed, XLA puts all that makes the matrix's elements into the loop of the product.
Only the simulator's copy of the HLO changes, and results only in the order of their sums.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from kernelgen.hlo import proto

MAX_ROWS = 4
"""Rows of the smaller operand at most: each becomes a product of its own."""

MIN_ELEMENTS = 1 << 14
"""Of the matrix: there is nothing to gain with smaller ones."""

MAX_SUM = 4000
"""Elements of a row at most: with 16 KiB and more, XLA does not put anything into the loop of a product."""

_F32 = 11
_FLOATS = {_F32, 10, 16}  # float16, bfloat16

_Module = proto.module_class(
    {
        "Dot": """
            *int64 lhs_contracting 1
            *int64 rhs_contracting 2
            *int64 lhs_batch 3
            *int64 rhs_batch 4
        """,
        "SliceDimensions": """
            int64 start 1
            int64 limit 2
            int64 stride 3
        """,
        "PaddingDimension": """
            int64 edge_padding_low 1
            int64 edge_padding_high 2
            int64 interior_padding 3
        """,
        "Padding": "*PaddingDimension dimensions 1",
        # Numbers of a repeated field are together on the wire, as bytes are.
        "Literal": "bytes f32s 8",
        "Instruction": """
            *int64 dimensions 14
            Padding padding_config 21
            *SliceDimensions slice_dimensions 17
            Dot dot 30
        """,
    }
)


def rewrite(hlo: bytes) -> bytes:
    """Returns a serialized `HloModuleProto` that computes the same, its products of matrices and few rows rewritten.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo, _Module)
    number = max((i.id for c in module.computations for i in c.instructions), default=0)
    changed = False
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        out: list[Any] = []
        for instruction in computation.instructions:
            product = _product(instruction, by_id)
            if product is not None:
                number = product.write(instruction, number, out)
                changed = True
            out.append(instruction)
        if changed:
            computation.ClearField("instructions")
            computation.instructions.extend(out)
    return proto.serialize(module) if changed else hlo


class _Product:
    """A product of a matrix [m, k] and the rows [n, k].

    Attributes:
        rows: the instruction that makes the rows.
        matrix: the instruction that makes the matrix.
        n: how many rows.
        m: rows of the matrix.
        k: elements that are summed up.
        last: whether those are the matrix's last axis, else its first.
        swapped: whether the result is [m, n], else [n, m].
    """

    def __init__(self, rows: Any, matrix: Any, sizes: tuple[int, int, int], *, last: bool, swapped: bool) -> None:
        self.rows, self.matrix, (self.n, self.m, self.k) = rows, matrix, sizes
        self.last, self.swapped = last, swapped

    def write(self, dot: Any, number: int, out: list[Any]) -> int:
        """Appends the instructions that compute the product to `out`, the last of which `dot` becomes.

        Returns:
            The highest number of an instruction; `number` is the one before.
        """
        counter = number

        def add(opcode: str, shape: tuple[int, ...], *operands: Any) -> Any:
            nonlocal counter
            counter += 1
            made = type(dot)(name=f"product.{counter}", opcode=opcode, id=counter)
            made.operand_ids.extend(o.id for o in operands)
            _set_shape(made.shape, shape)
            out.append(made)
            return made

        def floats(x: Any) -> Any:
            return x if x.shape.element_type == _F32 else add("convert", tuple(x.shape.dimensions), x)

        def constant(shape: tuple[int, ...], *values: float) -> Any:
            made = add("constant", shape)
            _set_shape(made.literal.shape, shape)
            made.literal.f32s = struct.pack(f"<{len(values)}f", *values)
            return made

        def computed_once(rows: Any) -> Any:
            # XLA puts what makes the rows into the loop, too, and computes it for each row of the matrix, but for a product: here
            # of every element and 0, and 1 and 1.
            size = self.n * self.k
            column = add("reshape", (size, 1), rows)
            pairs = add("pad", (size, 2), column, constant((), 0.0))
            pairs.padding_config.dimensions.add()
            pairs.padding_config.dimensions.add(edge_padding_high=1)
            made = add("dot", (size,), pairs, constant((2,), 1.0, 1.0))
            made.dot.lhs_contracting.append(1)
            made.dot.rhs_contracting.append(0)
            return add("reshape", (self.n, self.k), made)

        rows = computed_once(floats(self.rows))
        matrix = floats(self.matrix)
        if self.last:
            matrix = add("transpose", (self.k, self.m), add("reshape", (self.m, self.k), matrix))
            matrix.dimensions.extend((1, 0))
        else:
            matrix = add("reshape", (self.k, self.m), matrix)

        results = []
        for i in range(self.n):
            row = rows
            if self.n > 1:
                row = add("slice", (1, self.k), rows)
                row.slice_dimensions.add(start=i, limit=i + 1, stride=1)
                row.slice_dimensions.add(start=0, limit=self.k, stride=1)
            made = add("dot", (self.m,), add("reshape", (self.k,), row), matrix)
            made.dot.lhs_contracting.append(0)
            made.dot.rhs_contracting.append(0)
            results.append(add("reshape", (1, self.m), made))
        result = results[0]
        if self.n > 1:
            result = add("concatenate", (self.n, self.m), *results)
            result.dimensions.append(0)
            if self.swapped:
                result = add("transpose", (self.m, self.n), result)
                result.dimensions.extend((1, 0))
        dot.opcode = "reshape"
        dot.ClearField("dot")
        del dot.operand_ids[:]
        dot.operand_ids.append(result.id)
        return counter


def _product(dot: Any, by_id: dict[int, Any]) -> _Product | None:
    """Returns the product that an instruction is, or None when it is none, or none that is rewritten."""
    if dot.opcode != "dot" or dot.shape.element_type != _F32:
        return None
    lhs, rhs = (by_id[i] for i in dot.operand_ids)
    numbers = dot.dot
    sides = [
        _Side.of(lhs, list(numbers.lhs_contracting), list(numbers.lhs_batch)),
        _Side.of(rhs, list(numbers.rhs_contracting), list(numbers.rhs_batch)),
    ]
    for swapped in (False, True):
        rows, matrix = reversed(sides) if swapped else sides
        if rows is None or matrix is None:
            return None
        few = rows.free <= MAX_ROWS and rows.free < matrix.free and rows.k <= MAX_SUM and rows.last
        if few and matrix.k * matrix.free >= MIN_ELEMENTS:
            sizes = (rows.free, matrix.free, matrix.k)
            return _Product(rows.made_by, matrix.made_by, sizes, last=matrix.last, swapped=swapped)
    return None


class _Side:
    """One operand of a product, seen as a matrix.

    Attributes:
        made_by: the instruction.
        k: elements that are summed up.
        free: all others.
        last: whether the axis that is summed up is the last one; else it is before all others.
    """

    def __init__(self, made_by: Any, k: int, free: int, *, last: bool) -> None:
        self.made_by, self.k, self.free, self.last = made_by, k, free, last

    @staticmethod
    def of(made_by: Any, contracting: list[int], batch: list[int]) -> _Side | None:
        """Returns the side; None when it is not of floats, has several matrices, or its axes are in another order."""
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
            return _Side(made_by, shape[axis], before, last=True)
        return _Side(made_by, shape[axis], after, last=False) if before == 1 else None


def _set_shape(shape: Any, dimensions: tuple[int, ...]) -> None:
    shape.element_type = _F32
    shape.dimensions.extend(dimensions)
    shape.is_dynamic_dimension.extend([False] * len(dimensions))
    shape.layout.minor_to_major.extend(reversed(range(len(dimensions))))
