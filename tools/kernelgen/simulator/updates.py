"""Rewrites a program that updates a part of a tensor so that it returns this part instead of the whole tensor.

On a device, a kernel writes a row of a cache in place: the result shares the memory of the input. XLA may not write to its inputs,
so it would copy the whole cache, more than once, and the helper would copy the result to the input's memory. The rewritten program
returns the row, and the helper writes it to the cache after the computation.

This rewrite changes only the simulator's copy of the HLO. Results stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernelgen.hlo import proto
from kernelgen.simulator.writing import S32, Module, Writer, give, set_shape

S64 = 5
"""XLA's number of the element type."""

_STARTS = {S32, S64}
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 16: 2}
"""Bytes of an element, by XLA's number of its type."""


@dataclass(frozen=True)
class UpdatingHlo:
    """HLO that returns parts of some results.

    Attributes:
        hlo: a serialized `HloModuleProto`. Its last result has the offset in bytes of each part in its tensor, s64 [parts].
        parts: the numbers of these results. If there are none, `hlo` has no such last result.
    """

    hlo: bytes
    parts: tuple[int, ...]


def aliases(module: Any) -> dict[int, int]:
    """Returns the number of the parameter that shares its memory with a result, by the result's number."""
    entries = [e for e in module.input_output_alias.entries if not e.parameter_shape_index]
    return {next(iter(e.output_shape_index), 0): e.parameter_number for e in entries if len(e.output_shape_index) <= 1}


def rewrite(hlo: bytes, in_place: Mapping[int, int]) -> UpdatingHlo:
    """Returns a module that returns only the written part of a result that is an updated input.

    Args:
        hlo: a serialized `HloModuleProto`.
        in_place: the result of `aliases`.

    Raises:
        ValueError: `hlo` is not a module.
    """
    if not in_place:
        return UpdatingHlo(hlo, ())
    module = proto.parse(hlo, Module)
    entry = proto.entry(module)
    by_id = {i.id: i for i in entry.instructions}
    root = by_id[entry.root_id]
    if root.shape.tuple_shapes and root.opcode != "tuple":
        return UpdatingHlo(hlo, ())
    results = [by_id[i] for i in root.operand_ids] if root.opcode == "tuple" else [root]
    found: dict[int, Update] = {}
    for number, parameter in in_place.items():
        update = Update.of(same_bytes(results[number], by_id), by_id)
        if update is None:
            continue
        array = same_bytes(update.array, by_id)
        if array.opcode == "parameter" and array.parameter_number == parameter:
            found[number] = update
    if not found:
        return UpdatingHlo(hlo, ())
    writer = Writer(module)
    writer.out = list(entry.instructions)
    places = []
    for number, update in found.items():
        results[number] = update.part
        size = _BYTES[update.part.shape.element_type]
        places.append(writer.add(root, "reshape", (1,), update.first(writer, size), element_type=S64))
    every = writer.add(root, "concatenate", (len(places),), *places, element_type=S64)
    every.dimensions.append(0)
    made = give(module, writer, [*results, every])
    for shape in (module.host_program_shape, entry.program_shape):
        for result in shape.result.tuple_shapes:
            result.layout.minor_to_major[:] = reversed(range(len(result.dimensions)))
    made.shape.CopyFrom(entry.program_shape.result)
    return UpdatingHlo(proto.serialize(module), tuple(found))


@dataclass(frozen=True)
class Update:
    """A `dynamic-update-slice` that writes contiguous elements.

    Attributes:
        array: the instruction that produces the array to update.
        part: the instruction that produces the written part.
        starts: the instructions that produce the part's start on each axis.
    """

    array: Any
    part: Any
    starts: tuple[Any, ...]

    @staticmethod
    def of(instruction: Any, by_id: Mapping[int, Any]) -> Update | None:
        """Returns an instruction as an update; None if it is not an update of contiguous elements."""
        if instruction.opcode != "dynamic-update-slice" or instruction.shape.element_type not in _BYTES:
            return None
        array, part, *starts = (by_id[i] for i in instruction.operand_ids)
        whole, written = tuple(array.shape.dimensions), tuple(part.shape.dimensions)
        # A contiguous part has one element of the first axes, some of the next axis, and all of the rest.
        axis = next((a for a, n in enumerate(written) if n != 1), len(written))
        if written[axis + 1 :] != whole[axis + 1 :] or not all((*whole, *written)):
            return None
        return Update(array, part, tuple(starts)) if all(s.shape.element_type in _STARTS for s in starts) else None

    @property
    def size(self) -> int:
        """The number of written elements."""
        return math.prod(self.part.shape.dimensions)

    @property
    def grain(self) -> int:
        """A number of elements: updates begin at multiples of it."""
        whole, written = tuple(self.array.shape.dimensions), tuple(self.part.shape.dimensions)
        apart = [a for a in range(len(whole)) if whole[a] != written[a]]
        return math.prod(whole[apart[-1] + 1 :]) if apart else self.size

    def first(self, writer: Writer, times: int = 1) -> Any:
        """Returns the number of the first written element, multiplied by `times`: s64 []."""
        whole, written = tuple(self.array.shape.dimensions), tuple(self.part.shape.dimensions)
        total = _number(writer, self.array, 0)
        for axis, start in enumerate(self.starts):
            if whole[axis] == written[axis]:
                continue
            # Clamps the start like `dynamic-update-slice`, so that the whole part is inside.
            wide = writer.add(start, "convert", (), start, element_type=S64)
            lowest, highest = (_number(writer, start, n) for n in (0, whole[axis] - written[axis]))
            held = writer.add(start, "clamp", (), lowest, wide, highest, element_type=S64)
            stride = _number(writer, start, times * math.prod(whole[axis + 1 :]))
            term = writer.add(start, "multiply", (), held, stride, element_type=S64)
            total = writer.add(start, "add", (), total, term, element_type=S64)
        return total


def same_bytes(instruction: Any, by_id: Mapping[int, Any]) -> Any:
    """Returns the operand of a reshape; the instruction itself if it is not a reshape."""
    while instruction.opcode in ("reshape", "bitcast") and len(instruction.operand_ids) == 1:
        before = by_id[instruction.operand_ids[0]]
        if before.shape.element_type != instruction.shape.element_type:
            break
        instruction = before
    return instruction


def _number(writer: Writer, like: Any, value: int) -> Any:
    made = writer.add(like, "constant", (), element_type=S64)
    set_shape(made.literal.shape, (), S64)
    made.literal.s64s.append(value)
    return made
