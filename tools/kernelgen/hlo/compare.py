"""Finds the first difference between two HLO modules, for people."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from kernelgen.hlo import proto


def first_difference(one: bytes, other: bytes) -> str:
    """Returns the first instruction in which two serialized modules differ, or that they are equal.

    Raises:
        ValueError: one of them is not an `HloModuleProto`.
    """
    if one == other:
        return "they are equal"
    a, b = proto.parse(one), proto.parse(other)
    # The entry first: a difference in a callee shows at the call.
    for x, y in zip_longest(_ordered(a), _ordered(b)):
        if x is None or y is None:
            return f"{len(a.computations)} computations, then {len(b.computations)}"
        for number, (i, j) in enumerate(zip_longest(x.instructions, y.instructions), 1):
            if i != j:
                where = f"instruction {number} of computation {x.name}"
                if i is None or j is None:
                    return f"{where} is there only once: {_text(i or j)}"
                return f"{where}: {_text(i)}, then {_text(j)} (differs in {_fields(i, j)})"
    return f"the module's {_fields(a, b)}"


def _ordered(module: Any) -> list[Any]:
    entry = module.entry_computation_id
    return sorted(module.computations, key=lambda c: (c.id != entry, c.id))


def _text(instruction: Any) -> str:
    operands = ", ".join(f"%{id}" for id in instruction.operand_ids)
    return f"%{instruction.id} = {proto.shape_text(instruction.shape)} {instruction.opcode}({operands})"


def _fields(one: Any, other: Any) -> str:
    names = [f.name for f in one.DESCRIPTOR.fields if getattr(one, f.name) != getattr(other, f.name)]
    return ", ".join(names) or "fields that kernelgen does not know"
