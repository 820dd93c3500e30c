"""The memory of a NeuronCore that a kernel's program needs besides its tensors, available before it is loaded.

It is read from the NEFF if recorded there, else estimated from the HLO: a simulated NEFF has no instructions, and some compilers
write no copies into theirs. docs/reference/simulator-refusals.md has the sources of the figures.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass

from kernelgen.errors import KernelgenError
from kernelgen.hlo.estimate import RING_BYTES, estimate
from kernelgen.neff import scratchpad_estimate
from kernelgen.neff.program import program
from kernelgen.neff.scratchpad import scratchpad_bytes
from kernelgen.targets import INSTRUCTION_BYTES, TARGETS

MAX = 1 << 40
"""Maximum of a figure in a bundle, in bytes: more than any core has."""


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
        return NeffMemory(code, rings, max(scratchpad_estimate.scratchpad_bytes(hlo) - held, 0))
    return NeffMemory(code, rings, scratchpad_bytes(neff, source=source))
