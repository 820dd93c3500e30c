"""What a NEFF's program needs of the scratchpad that a core's programs share, as neuronx-cc placed it.

In `sgNN/def.json` a variable of type `virtual` is in the scratchpad, from its `backing_variable_off` on: spills, and what one
product leaves for another. They share places, so the end of the last one is what the program needs. Others read the same from the
compiler's log (`Peak scratchpad usage`), which is not there any more when a NEFF is loaded.
"""

from __future__ import annotations

import json
import re

from kernelgen.errors import KernelgenError
from kernelgen.neff import container

_MEMBER = re.compile(r"sg\d+/def\.json")
PAGE = 64 << 20
"""Bytes in multiples of which the runtime grows the scratchpad since release 2.31, as AWS documents it."""


def scratchpad_bytes(data: bytes, *, source: str = "NEFF") -> int:
    """Returns the bytes, of all physical cores; 0 of a simulated NEFF, which has no such variables.

    Raises:
        KernelgenError: not a NEFF, damaged, or of a form that is not known.
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
