"""The contents of a NEFF's program: instructions by engine, and the runs of bytes that its queues copy.

An engine's instructions are in `sgNN/<engine>.bin`, 64 bytes each, and its copies in `sgNN/<engine>.json`; from 2.24 on the names
for trn3 end in 0. For trn2 neuronx-cc 2.23 writes few copies there: the engines generate their descriptors at run time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from kernelgen.errors import KernelgenError
from kernelgen.neff import container
from kernelgen.targets import INSTRUCTION_BYTES

_MEMBER = re.compile(r"sg(\d+)/(PE|Pool|Activation|DVE|SP)0?\.(bin|json)")
_SPILLS = "SpillReload"


@dataclass(frozen=True, slots=True)
class NeffProgram:
    """The contents of a NEFF's program.

    Attributes:
        instructions: by engine, of the physical core with the most.
        descriptors: runs of bytes that the queues of all cores copy.
        spills: the number of these in queues for spills.
        all_instructions: over all engines of all cores.
    """

    instructions: Mapping[str, int]
    descriptors: int
    spills: int
    all_instructions: int = 0

    @property
    def total(self) -> int:
        """Instructions of all engines of that core."""
        return sum(self.instructions.values())


def program(data: bytes, *, source: str = "NEFF") -> NeffProgram:
    """Returns the contents of a NEFF's program; empty for a simulated one.

    Raises:
        KernelgenError: not a NEFF, damaged, or of an unknown form.
    """
    cores: dict[str, Counter[str]] = {}
    descriptors = spills = 0
    for name, content in container.unpack(data, source=source, only=lambda name: bool(_MEMBER.fullmatch(name))).items():
        found = _MEMBER.fullmatch(name)
        assert found
        core, engine, form = found.groups()
        if form == "bin":
            cores.setdefault(core, Counter())[engine] += len(content) // INSTRUCTION_BYTES
            continue
        try:
            for queued in json.loads(content).get("dma", []):
                runs = sum(
                    max(prod(d[side][1:]) for side in ("from_sizes", "to_sizes") if side in d) for d in queued["desc"]
                )
                descriptors += runs
                spills += runs * (_SPILLS in queued["queue"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KernelgenError(f"{source}: the copies of {name} cannot be read: {error}") from None
    most = max(cores.values(), key=lambda core: core.total(), default=Counter[str]())
    everything = sum(core.total() for core in cores.values())
    return NeffProgram(dict(sorted(most.items())), descriptors, spills, everything)
