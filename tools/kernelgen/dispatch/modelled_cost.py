"""What a kernel takes by the model of its language (`notes["costs"]`): DMA in cycles too, the bottleneck, sums, and lines of text.

A model and no measurement; docs/kernels-in-nki.md says of what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kernelgen.dispatch import costs

CLOCK_GHZ = 1.4
"""The clock of the engines at which the cost of DMA is set against theirs."""

WIDTH = 12
"""Of the names before values."""

_MEMORY = ("sbuf_bytes_per_partition", "psum_bytes_per_partition")


def of_noted(noted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a kernel takes: the figures that its language noted, DMA in cycles too, and what takes longest."""
    dma = math.ceil(noted["dma_bytes"] / costs.builtin().gb_per_s * CLOCK_GHZ)
    return _made({**noted, "cycles": {**noted["cycles"], "dma": dma}})


def _made(figures: dict[str, Any]) -> dict[str, Any]:
    cycles = figures["cycles"]
    return {"modelled": True, "bottleneck": max(sorted(cycles), key=lambda name: int(cycles[name])), **figures}


def total(made: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what several take one after another: sums, and the most that any has of SBUF and PSUM, as far as that is modelled.

    Args:
        made: at least one, from `of_noted`.
    """
    each = list(made)
    return _made(
        {
            **{
                name: {engine: sum(one[name][engine] for one in each) for engine in each[0][name]}
                for name in ("cycles", "instructions")
            },
            "dma_bytes": sum(one["dma_bytes"] for one in each),
            **{
                name: max(one[name] for one in each if name in one)
                for name in _MEMORY
                if any(name in one for one in each)
            },
        }
    )


def of_bundle(described: dict[str, Any]) -> dict[str, Any]:
    """Returns a bundle's description with `cost` of each of its kernels that has one noted, and `total_cost` if any has.

    `kernels` and `without` of the total count the kernels whose cost is in it, and those that have none.
    """
    kernels = []
    found: list[dict[str, Any]] = []
    without = 0
    for kernel in described["kernels"]:
        made = [of_noted(each) for each in (kernel.get("notes") or {}).get("costs", ())]
        kernels.append(kernel | ({"cost": made} if made else {}))
        found += made
        without += not made
    if not found:
        return described
    counts = {"kernels": len(kernels) - without, "without": without}
    return described | {"kernels": kernels, "total_cost": counts | total(found)}


def lines(made: Mapping[str, Any]) -> list[str]:
    """Returns a cost as lines for people."""
    of = ""
    if "kernels" in made:
        of = f", of {made['kernels']} of {made['kernels'] + made['without']} kernels together"
    found = [f"  {'cost':{WIDTH}} modelled, not measured{of}; the bottleneck is {made['bottleneck']}"]
    for engine, cycles in made["cycles"].items():
        moved = f", {made['dma_bytes']:,} bytes" if engine == "dma" else ""
        found.append(
            f"  {'':{WIDTH}} {engine:7} {made['instructions'][engine]:>9,} instructions {cycles:>12,} cycles{moved}"
        )
    if {*_MEMORY} <= made.keys():
        sbuf, psum = (made[name] for name in _MEMORY)
        found.append(f"  {'':{WIDTH}} at most {sbuf:,} bytes of SBUF and {psum:,} of PSUM per partition at once")
    else:  # of the older NKI
        found.append(f"  {'':{WIDTH}} SBUF and PSUM are not modelled: the compiler orders the kernel anew")
    return found
