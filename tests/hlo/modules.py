"""HLO modules as text, for modules that JAX does not write: each line is `name = shape opcode(operands) field=value …`."""

from __future__ import annotations

import json
import re
from typing import Any

from kernelgen.hlo import proto
from kernelgen.hlo.linted import LintedModule, element_type

_MODULE = LintedModule.MESSAGE
_NUMBERS = {name: number for number, name in proto.ELEMENT_TYPES.items()}
_LINE = re.compile(r"(\w+) = (.+?) ([\w-]+)\(([\w, ]*)\) *(.*)")


def set_shape(shape: Any, text: str) -> None:
    if text.startswith("("):
        shape.element_type = _NUMBERS["tuple"]
        for part in re.findall(r"\w+\[[\d,]*\]", text):
            set_shape(shape.tuple_shapes.add(), part)
        return
    name, sizes = re.fullmatch(r"(\w+)\[([\d,]*)\]", text).groups()
    shape.element_type = _NUMBERS[name]
    shape.dimensions[:] = [int(n) for n in sizes.split(",") if n]


def module(text: str, combiner: str | None = None) -> bytes:
    """Returns a module of these lines; the last line is the root.

    Args:
        text: the lines. Field values are JSON: numbers, lists, objects (for messages) and strings.
        combiner: the opcode of the computation of two scalars that scatters and reductions call, or None.
    """
    made = _MODULE(name="made", entry_computation_name="main", entry_computation_id=1)
    numbers: dict[str, int] = {}
    parameters = 0
    computation = made.computations.add(name="main", id=1)
    for line in filter(None, map(str.strip, text.splitlines())):
        name, shape, opcode, operands, fields = _LINE.fullmatch(line).groups()
        i = computation.instructions.add(name=name, opcode=opcode, id=len(numbers) + 1)
        numbers[name] = i.id
        set_shape(i.shape, shape)
        i.operand_ids[:] = [numbers[o] for o in operands.replace(" ", "").split(",") if o]
        if opcode == "parameter":
            i.parameter_number = parameters
            parameters += 1
        elif combiner and opcode in ("scatter", "reduce-window", "all-reduce", "reduce-scatter"):
            i.called_computation_ids.append(2)
        for field, value in re.findall(r"(\w+)=(\S+)", fields):
            _assign(i, field, json.loads(value) if field != "backend_config" else value.encode())
        computation.root_id = i.id
    if combiner:
        called = made.computations.add(name="combine", id=2, root_id=103)
        kind = element_type(computation.instructions[0].shape)
        for n in (101, 102):
            set_shape(
                called.instructions.add(name=f"p{n}", opcode="parameter", id=n, parameter_number=n - 101).shape,
                kind + "[]",
            )
        root = called.instructions.add(name="combined", opcode=combiner, id=103, operand_ids=[101, 102])
        set_shape(root.shape, kind + "[]")
        if combiner == "parameter":
            called.root_id = 102
            del called.instructions[2]
    return proto.serialize(made)


def _assign(message: Any, field: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _assign(getattr(message, field), key, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            getattr(message, field).add(**inner)
    elif isinstance(value, list):
        getattr(message, field)[:] = value
    else:
        setattr(message, field, value)
