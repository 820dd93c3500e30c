"""The common parts of HLO rewrites for XLA on the CPU: the schema of the instructions that they write, and their writer."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from kernelgen.hlo import proto

F32 = 11
"""XLA's number of the element type."""

S32 = 4
"""XLA's number of the element type."""

Module = proto.module_class(
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
        "GatherDimensions": """
            *int64 offset_dims 1
            *int64 collapsed_slice_dims 2
            *int64 start_index_map 3
            int64 index_vector_dim 4
        """,
        "ScatterDimensions": """
            *int64 update_window_dims 1
            *int64 inserted_window_dims 2
            *int64 scatter_dims_to_operand_dims 3
            int64 index_vector_dim 4
            *int64 input_batching_dims 5
        """,
        "ReplicaGroup": "*int64 ids 1",
        "DeviceList": "*ReplicaGroup groups 1",
        "SourceTarget": """
            int64 source 1
            int64 target 2
        """,
        # On the wire, the numbers of a packed repeated field have the form of bytes.
        "Literal": """
            bytes u8s 3
            *int64 s32s 4
            *uint64 u32s 6
            *int64 s64s 5
            bytes f32s 8
            bytes u16s 16
        """,
        "Instruction": """
            *int64 dimensions 14
            GatherDimensions gather 33
            *int64 gather_slice_sizes 34
            ScatterDimensions scatter 48
            string comparison_direction 63
            Padding padding_config 21
            *SliceDimensions slice_dimensions 17
            Dot dot 30
            *ReplicaGroup replica_groups 49
            *SourceTarget source_target_pairs 52
            DeviceList device_list 87
        """,
    }
)


class Writer:
    """Appends new instructions to a computation.

    Args:
        module: the computation's module, a `Module`.

    Attributes:
        out: the instructions so far, old and new.
    """

    def __init__(self, module: Any) -> None:
        self._number = max((i.id for c in module.computations for i in c.instructions), default=0)
        self.out: list[Any] = []

    def add(self, like: Any, opcode: str, shape: tuple[int, ...], *operands: Any, element_type: int = F32) -> Any:
        """Returns a new instruction, of the class of another one.

        Args:
            like: any instruction of the module.
            opcode: its opcode.
            shape: the shape of its result.
            operands: instructions that were appended before.
            element_type: the type of its result.
        """
        self._number += 1
        made = type(like)(name=f"written.{self._number}", opcode=opcode, id=self._number)
        made.operand_ids.extend(o.id for o in operands)
        set_shape(made.shape, shape, element_type)
        self.out.append(made)
        return made

    def again(self, instruction: Any) -> Any:
        """Returns a copy of an instruction under a new id."""
        self._number += 1
        made = type(instruction)()
        made.CopyFrom(instruction)
        made.name, made.id = f"written.{self._number}", self._number
        self.out.append(made)
        return made

    def slice(self, x: Any, axis: int, at: int) -> Any:
        """Returns the slice of `x` at a position of an axis; the axis stays, with one element."""
        shape = tuple(x.shape.dimensions)
        made = self.add(x, "slice", (*shape[:axis], 1, *shape[axis + 1 :]), x, element_type=x.shape.element_type)
        for i, n in enumerate(shape):
            made.slice_dimensions.add(start=at if i == axis else 0, limit=at + 1 if i == axis else n, stride=1)
        return made

    def constant(self, like: Any, shape: tuple[int, ...], *values: float) -> Any:
        """Returns a float32 constant."""
        made = self.add(like, "constant", shape)
        set_shape(made.literal.shape, shape)
        made.literal.f32s = struct.pack(f"<{len(values)}f", *values)
        return made

    def floats(self, x: Any) -> Any:
        """Returns `x` as float32."""
        return x if x.shape.element_type == F32 else self.add(x, "convert", tuple(x.shape.dimensions), x)

    def computed_once(self, x: Any) -> Any:
        """Returns `x`, finite float32, flat, and so that XLA does not compute it again in each use.

        XLA fuses the computation of an operand into the loops that use it, unless it is a product. So this multiplies each element
        and a 0 by 1 and 1.
        """
        size = math.prod(x.shape.dimensions)
        pairs = self.add(x, "pad", (size, 2), self.add(x, "reshape", (size, 1), x), self.constant(x, (), 0.0))
        pairs.padding_config.dimensions.add()
        pairs.padding_config.dimensions.add(edge_padding_high=1)
        made = self.add(x, "dot", (size,), pairs, self.constant(x, (2,), 1.0, 1.0))
        made.dot.lhs_contracting.append(1)
        made.dot.rhs_contracting.append(0)
        return made


def give(module: Any, writer: Writer, results: Sequence[Any]) -> Any:
    """Replaces the entry computation's instructions by the writer's and a new tuple of results. Returns the tuple."""
    entry = proto.entry(module)
    made = writer.add(results[0], "tuple", (), *results)
    made.ClearField("shape")
    made.shape.element_type = _TUPLE
    made.shape.tuple_shapes.extend(result.shape for result in results)
    entry.ClearField("instructions")
    entry.instructions.extend(writer.out)
    entry.root_id = made.id
    for shape in (entry.program_shape, module.host_program_shape):
        shape.result.CopyFrom(made.shape)
    return made


_TUPLE = 13
"""XLA's number of the element type."""


def become_reshape(instruction: Any, of: Any) -> None:
    """Turns an instruction into a reshape of another one. Its users do not change."""
    instruction.opcode = "reshape"
    for field in ("dot", "dimensions", "called_computation_ids", "operand_ids"):
        instruction.ClearField(field)
    instruction.operand_ids.append(of.id)


def set_shape(shape: Any, dimensions: tuple[int, ...], element_type: int = F32) -> None:
    """Fills in a `ShapeProto` with a row-major layout."""
    shape.element_type = element_type
    shape.dimensions.extend(dimensions)
    shape.is_dynamic_dimension.extend([False] * len(dimensions))
    shape.layout.minor_to_major.extend(reversed(range(len(dimensions))))
