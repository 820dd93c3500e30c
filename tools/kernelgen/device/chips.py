"""What a device is taken to take for launches and for reading, by target: figures that others measured with SDK 2.32.

backend/simulator/src/price.h has the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """What a logical core takes.

    Attributes:
        waited_us: microseconds of a launch that is waited for.
        queued_us: what a launch adds behind others in the queue.
        gb_per_s: the rate at which programs that XLA wrote read weights.
    """

    waited_us: float
    queued_us: float
    gb_per_s: float


_GEN2 = Chip(140, 15, 227)
_GEN3 = Chip(133, 70, 400)

CHIPS = {"trn1": _GEN2, "trn1n": _GEN2, "inf2": _GEN2, "trn2": _GEN3, "trn3": _GEN3}
"""trn1 and trn2 were measured; inf2 has trn1's cores, and trn3 is not known."""
