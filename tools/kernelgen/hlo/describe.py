"""Describes an HLO module for people: `kernelgen inspect` prints it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kernelgen.hlo import proto


@dataclass(frozen=True, slots=True)
class HloDescription:
    """One module.

    Attributes:
        name: the module's name.
        parameters: (name, shape in HLO text form), by number.
        results: (name, shape), in order.
        aliases: (result's name, parameter's name) of pairs that share memory.
        opcodes: number of instructions of each opcode in the whole module.
        computations: number of computations, including the entry.
        size: bytes of the module.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    aliases: tuple[tuple[str, str], ...]
    opcodes: tuple[tuple[str, int], ...]
    computations: int
    size: int

    def __str__(self) -> str:
        lines = [f"HLO module {self.name}, {self.size} bytes, {self.computations} computation(s)"]
        lines += [f"  in   {name}: {shape}" for name, shape in self.parameters]
        lines += [f"  out  {name}: {shape}" for name, shape in self.results]
        lines += [f"       {result} shares the memory of {parameter}" for result, parameter in self.aliases]
        total = sum(n for _, n in self.opcodes)
        lines.append(f"  {total} instructions: " + ", ".join(f"{n} {opcode}" for opcode, n in self.opcodes))
        return "\n".join(lines)


def describe(hlo: bytes) -> HloDescription:
    """Returns the description of a serialized `HloModuleProto`, with the names of the NEFF's tensors if it has them.

    Raises:
        ValueError: `hlo` is not such a module.
    """
    module = proto.parse(hlo)
    entry = proto.entry(module)
    parameters = []
    for p in proto.parameters(entry):
        attributes = {a.key: a.value for a in p.frontend_attributes.map}
        parameters.append((attributes.get(proto.INPUT_NAMES, p.name), proto.shape_text(p.shape)))
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    shapes = list(root.shape.tuple_shapes) if root.opcode == "tuple" else [root.shape]
    attributes = {a.key: a.value for a in root.frontend_attributes.map}
    names = attributes.get(proto.OUTPUT_NAMES, "").split(",") if proto.OUTPUT_NAMES in attributes else []
    names += [f"output{k}" for k in range(len(names), len(shapes))]
    aliases = tuple(
        (names[e.output_shape_index[0] if e.output_shape_index else 0], parameters[e.parameter_number][0])
        for e in module.input_output_alias.entries
    )
    counts = Counter(i.opcode for c in module.computations for i in c.instructions)
    return HloDescription(
        module.name,
        tuple(parameters),
        tuple((name, proto.shape_text(shape)) for name, shape in zip(names, shapes, strict=False)),
        aliases,
        tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
        len(module.computations),
        len(hlo),
    )
