"""A kernel's cost by the model of its language (`notes["costs"]`): nanoseconds by engine, the bottleneck, sums, and text.

It is a model, not a measurement; docs/reference/kernels-in-nki.md describes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernelgen.dispatch import chips
from kernelgen.dispatch.chips import Chip

WIDTH = 12
"""Width of the names before values."""

TARGET = "trn1"
"""The target whose figures apply to a kernel without a target."""

UNHIDDEN = 0.6
"""Fraction of the other engines' time that the longest engine waits: they exchange tiles of SBUF and PSUM.

Fitted on half of the kernels of `//benchmarks:nki_judged`, among 0, 0.1 to 1. DMA prefetches tiles.
"""

_MEMORY = ("sbuf_bytes_per_partition", "psum_bytes_per_partition")


def of_noted(noted: Mapping[str, Any], target: str = TARGET) -> dict[str, Any]:
    """Returns a kernel's cost on a target: nanoseconds of each engine, and the longest engine.

    A logical core of several physical cores is no faster: a program of the kernel runs on one.
    """
    work = noted["work"]
    figures = {
        "target": target,
        "ns": {name: round(ns) for name, ns in nanoseconds(work, noted["instructions"], chips.of(target, 1)).items()},
        "dma_bytes": sum(work["dma"].values()),
    }
    return _made({**{name: value for name, value in noted.items() if name != "work"}, **figures})


def nanoseconds(work: Mapping[str, Mapping[str, int]], instructions: Mapping[str, int], chip: Chip) -> dict[str, float]:
    """Returns the nanoseconds of each engine and of DMA; for the arguments see `alone`."""
    return shared(*alone(work, instructions, chip))


def alone(
    work: Mapping[str, Mapping[str, int]], instructions: Mapping[str, int], chip: Chip
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the nanoseconds of each engine and of DMA, and of the vector and the scalar engine each for shared work.

    Args:
        work: columns by dtype, elements, and bytes by run length, as nki_interpreter.cost counts them.
        instructions: number of each engine's instructions.
        chip: figures of one physical core.
    """
    found = {
        "tensor": sum(n * chip.by("tensor_ns_per_column", kind) for kind, n in work["tensor"].items()),
        "vector": sum(n * chip.by("vector_ns_per_element", kind) for kind, n in work["vector"].items()),
        "scalar": sum(work["scalar"].values()) * chip.number("scalar_ns_per_element"),
        "gpsimd": sum(work["gpsimd"].values()) * chip.number("gpsimd_ns_per_element"),
    }
    for engine in found:
        found[engine] += instructions[engine] * chip.by("instruction_ns", engine)
    found["dma"] = sum(n / dma_gb_per_s(chip, int(run)) for run, n in work["dma"].items())
    elements, count = sum(work.get("either", {}).values()), instructions.get("either", 0)
    rates = {"vector": chip.by("vector_ns_per_element", "one"), "scalar": chip.number("scalar_ns_per_element")}
    return found, {name: elements * ns + count * chip.by("instruction_ns", name) for name, ns in rates.items()}


def shared(found: Mapping[str, float], either: Mapping[str, float]) -> dict[str, float]:
    """Returns the engines' times with the shared work of two engines split so that the later one ends as early as possible.

    Args:
        found: time of each engine without the shared work.
        either: time of vector and scalar engine each for all of the shared work.
    """
    both = either["vector"] + either["scalar"]
    part = (found["scalar"] + either["scalar"] - found["vector"]) / both if both else 0.0
    part = min(max(part, 0.0), 1.0)
    more = {"vector": part * either["vector"], "scalar": (1 - part) * either["scalar"]}
    return {engine: ns + more.get(engine, 0.0) for engine, ns in found.items()}


def elapsed(ns: Mapping[str, float]) -> float:
    """Returns a kernel's nanoseconds from the times of its engines and DMA: the longest engine and its waits, or DMA."""
    engines = [n for name, n in ns.items() if name != "dma"]
    longest = max(engines)
    return max(longest + UNHIDDEN * (sum(engines) - longest), ns["dma"])


def dma_gb_per_s(chip: Chip, run: int) -> float:
    """Returns the DMA rate for pieces of `run` bytes; below the table's smallest size, a piece takes the time of that size."""
    least = chip.pairs("dma_gb_per_s")[0][0]
    return chip.at("dma_gb_per_s", run) * min(1.0, run / least)


def _made(figures: dict[str, Any]) -> dict[str, Any]:
    ns = figures["ns"]
    bottleneck = max(sorted(ns), key=lambda name: int(ns[name]))
    return {"modelled": True, "bottleneck": bottleneck, "elapsed_ns": round(elapsed(ns)), **figures}


def total(made: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the cost of several kernels in sequence: sums, and the maximum use of SBUF and PSUM, where modelled.

    Args:
        made: at least one result of `of_noted`, all for one target.
    """
    each = list(made)
    names = [dict.fromkeys(name for one in each for name in one[kind]) for kind in ("instructions", "ns")]
    return _made(
        {
            "target": each[0]["target"],
            "elapsed_ns": sum(one["elapsed_ns"] for one in each),
            **{
                kind: {engine: sum(one[kind].get(engine, 0) for one in each) for engine in engines}
                for kind, engines in zip(("instructions", "ns"), names, strict=True)
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
    """Returns a bundle's description with the `cost` of each kernel that has one in its notes, and `total_cost` if any has.

    In the total, `kernels` and `without` count the kernels with and without a cost.
    """
    kernels = []
    found: list[dict[str, Any]] = []
    without = 0
    for kernel in described["kernels"]:
        noted = (kernel.get("notes") or {}).get("costs", ())
        made = [of_noted(each, described["target"]) for each in noted]
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
    found = [
        f"  {'cost':{WIDTH}} {made['elapsed_ns'] / 1e3:,.1f} µs, modelled for {made['target']}, not measured{of}; "
        f"the bottleneck is {made['bottleneck']}"
    ]
    for engine, count in made["instructions"].items():
        taken = f"{made['ns'][engine] / 1e3:>12,.1f} µs" if engine in made["ns"] else ", of vector or scalar engine"
        moved = f", {made['dma_bytes']:,} bytes" if engine == "dma" else ""
        found.append(f"  {'':{WIDTH}} {engine:7} {count:>9,} instructions{taken}{moved}")
    if {*_MEMORY} <= made.keys():
        sbuf, psum = (made[name] for name in _MEMORY)
        found.append(f"  {'':{WIDTH}} at most {sbuf:,} bytes of SBUF and {psum:,} of PSUM per partition at once")
    else:  # for the older NKI
        found.append(f"  {'':{WIDTH}} SBUF and PSUM are not modelled: the compiler reorders the kernel")
    return found
