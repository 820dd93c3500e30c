"""The part of the scratchpad, which a core's programs share, that a NEFF's program needs: as neuronx-cc allocated it.

In `sgNN/def.json` a variable of type `virtual` is in the scratchpad, at `backing_variable_off`: spills, and values that one product
leaves for another. Their ranges overlap, so the highest end is the program's need. The compiler's log has the same figure (`Peak
scratchpad usage`), but is no longer available when a NEFF is loaded.
"""

from __future__ import annotations

import json
import re

from kernelgen.errors import KernelgenError
from kernelgen.neff import container

_MEMBER = re.compile(r"sg\d+/def\.json")
PAGE = 64 << 20
"""The runtime grows the scratchpad in multiples of these bytes since release 2.31, as AWS documents it."""


def scratchpad_bytes(data: bytes, *, source: str = "NEFF") -> int:
    """Returns the bytes over all physical cores; 0 for a simulated NEFF, which has no such variables.

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
