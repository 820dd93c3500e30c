"""The memory of a NeuronCore that a kernel's program needs besides its tensors, available before it is loaded.

It is read from the NEFF if recorded there, else estimated from the HLO: a simulated NEFF has no instructions, and some compilers
write no copies into theirs. docs/reference/simulator-refusals.md has the sources of the figures.

The scratchpad is what a core's programs share. In `sgNN/def.json` of a NEFF a variable of type `virtual` is in it, at
`backing_variable_off`: spills, and values that one product leaves for another. Their ranges overlap, so the highest end is the
program's need. The compiler's log has the same figure (`Peak scratchpad usage`), but is no longer available when a NEFF is loaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, astuple, dataclass

from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto
from kernelgen.hlo.estimate import RING_BYTES, estimate
from kernelgen.hlo.linted import size
from kernelgen.neff import container
from kernelgen.neff.program import program
from kernelgen.targets import INSTRUCTION_BYTES, TARGETS

MAX = 1 << 40
"""Maximum of a figure in a bundle, in bytes: more than any core has."""

_MEMBER = re.compile(r"sg\d+/def\.json")
PAGE = 64 << 20
"""The runtime grows the scratchpad in multiples of these bytes since release 2.31, as AWS documents it."""

_ALIASES = {"reshape", "bitcast", "get-tuple-element", "tuple", "broadcast", "slice", "transpose", "convert"}
"""Instructions that are views of their operands, so they need no memory."""

_COMPUTED = {
    "dot",
    "convolution",
    "reduce",
    "reduce-window",
    "gather",
    "scatter",
    "sort",
    "while",
    "call",
    "custom-call",
}
"""Opcodes whose results other instructions read from memory; the others are elementwise."""


@dataclass(frozen=True, slots=True)
class NeffMemory:
    """Memory of a program in bytes, over all physical cores.

    Attributes:
        code: 64 for each instruction.
        rings: 32 for each run of a spill.
        scratchpad: its part of the scratchpad that a core's programs share, without the state buffer.
    """

    code: int
    rings: int
    scratchpad: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def words(self) -> tuple[int, ...]:
        """Returns the figures in the order of a pack's array."""
        return astuple(self)


def needed(
    neff: bytes, hlo: bytes, target: str, lnc: int, model_type: str, *, simulated: bool, source: str = "NEFF"
) -> NeffMemory:
    """Returns the memory of a NEFF's program.

    Args:
        neff: the NEFF.
        hlo: the serialized `HloModuleProto` of the NEFF.
        target: neuronx-cc's `--target`.
        lnc: physical cores of a logical core.
        model_type: neuronx-cc's `--model-type`.
        simulated: whether the simulator made the NEFF.
        source: its name in messages.

    Raises:
        KernelgenError: the NEFF is damaged or of an unknown form, or the HLO is invalid.
    """
    said = None if simulated else program(neff, source=source)
    if said is not None and said.all_instructions and said.descriptors:
        code, rings = said.all_instructions * INSTRUCTION_BYTES, said.spills * RING_BYTES
    else:
        try:
            made = estimate(hlo, target, lnc, model_type=model_type)
        except (ValueError, LookupError) as error:
            raise KernelgenError(
                f"{source}: the resources of its program can't be estimated from its HLO: {error}"
            ) from None
        code, rings = made.code_bytes, made.ring_bytes
        if said is not None and said.all_instructions:
            code = said.all_instructions * INSTRUCTION_BYTES
    if simulated:
        held = TARGETS[target].state_buffer_mib * lnc << 20
        return NeffMemory(code, rings, max(estimated_scratchpad_bytes(hlo) - held, 0))
    return NeffMemory(code, rings, scratchpad_bytes(neff, source=source))


def scratchpad_bytes(data: bytes, *, source: str = "NEFF") -> int:
    """Returns a NEFF's part of the scratchpad, in bytes over all physical cores; 0 for a simulated NEFF.

    Raises:
        KernelgenError: not a NEFF, damaged, or of an unknown form.
    """
    total = 0
    for name, content in container.unpack(data, source=source, only=lambda name: bool(_MEMBER.fullmatch(name))).items():
        try:
            variables = json.loads(content)["var"].values()
            total += max(
                (v["backing_variable_off"] + v["size"] for v in variables if v["type"] == "virtual"), default=0
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KernelgenError(f"{source}: the variables of {name} cannot be read: {error}") from None
    return total


def estimated_scratchpad_bytes(hlo: bytes) -> int:
    """Returns an estimate of a program's part of the scratchpad, in bytes, for a NEFF that does not contain it.

    It is the maximum of the values of the entry computation that are live at the same time, in its order, without

    - elementwise functions of inputs and constants alone, such as the floats of a quantized matrix: they are computed where they
      are read;
    - results, which have their own memory;
    - views of existing values: slices, transposes, broadcasts, conversions;
    - an elementwise result that replaces an operand that no later instruction reads.

    Args:
        hlo: a serialized `HloModuleProto`.

    Raises:
        ValueError: `hlo` is not a module.
    """
    entry = proto.entry(proto.parse(hlo))
    by_id = {i.id: i for i in entry.instructions}
    base: dict[int, set[int]] = {}  # the values that hold an instruction's value
    for i in entry.instructions:
        operands = [b for o in i.operand_ids for b in base[o]]
        if i.opcode in _ALIASES or (i.opcode not in _COMPUTED and not operands):
            base[i.id] = set(operands)
        else:
            base[i.id] = {i.id}
    last: dict[int, int] = {}
    for n, i in enumerate(entry.instructions):
        for b in (b for o in i.operand_ids for b in base[o]):
            last[b] = n
    kept = base[entry.root_id]
    live = most = 0
    for n, i in enumerate(entry.instructions):
        ending = {b for o in i.operand_ids for b in base[o] if last[b] == n} - kept
        gone = sum(size(by_id[b].shape) for b in ending)
        made = size(i.shape) if base[i.id] == {i.id} and i.id not in kept else 0
        if i.opcode in _COMPUTED:  # reads its operands while it writes
            most = max(most, live + made)
        live += made - gone
        most = max(most, live)
    return most
