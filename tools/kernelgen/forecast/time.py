"""Forecasts a program's time on a target from the times of its parts, some of which overlap, and of the launch.

DMA and products of up to 128 rows overlap: the longer counts. Products of more rows are added: layers and products that others
measured take the time of their bytes plus the time of their columns. Elementwise work is added, too, since the next product waits
for it: the longer of the vector and the scalar engine's. Also added are attention's work in few partitions, its spills, and
indexed accesses, which use the same DMA. docs/results/forecast-judged.md compares the forecast with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.forecast.work import LONG_ROW, Work
from kernelgen.targets import TARGETS


@dataclass(frozen=True, slots=True)
class Time:
    """The time of a program, in microseconds.

    Attributes:
        launch: the launch.
        memory: weights, cache and results, streamed.
        spills: values that exceed SBUF, written and read again.
        waited: work in few partitions during which nothing else runs.
        tensor: products of at most 128 rows.
        products: products of more than 128 rows.
        vector, scalar: elementwise work; work that either can do is shared between both.
        descriptors: indexed accesses.
        latency: time that instructions wait for earlier ones.
        calls: starts of NKI kernels within a graph.
        reductions: sums over cores.
    """

    launch: float
    memory: float
    spills: float
    waited: float
    tensor: float
    products: float
    vector: float
    scalar: float
    descriptors: float
    latency: float
    calls: float
    reductions: float

    @property
    def parts(self) -> dict[str, float]:
        """The sequential parts: streaming with multiplication, elementwise work, and the rest."""
        streams = {"memory": self.memory, "tensor": self.tensor}
        longest = max(sorted(streams), key=streams.__getitem__)
        return {
            "launch": self.launch,
            longest: streams[longest],
            "products": self.products,
            "descriptors": self.descriptors,
            "elements": max(self.vector, self.scalar),
            "spills": self.spills,
            "waited": self.waited,
            "latency": self.latency,
            "calls": self.calls,
            "reductions": self.reductions,
        }

    @property
    def bound(self) -> str:
        """The longest part."""
        parts = self.parts
        return max(sorted(parts), key=parts.__getitem__)

    @property
    def total(self) -> float:
        """The whole time."""
        return sum(self.parts.values())


def sbuf_bytes(chip: Chip) -> int:
    """Returns the bytes of SBUF of a logical core."""
    return chip.lnc * TARGETS[chip.target].state_buffer_mib << 20


def summed_us(chip: Chip, count: float, n_bytes: float) -> float:
    """Returns the microseconds of sums over cores, from their number and total bytes."""
    return count * chip.number("all_reduce_us") + n_bytes / (chip.number("all_reduce_gb_per_s") * 1e3)


def of_work(work: Work, chip: Chip, *, queued: bool = True) -> Time:
    """Returns the time of a program.

    Args:
        work: its work.
        chip: the figures of its target.
        queued: whether its launch is queued behind another, rather than waited for.
    """
    cores = chip.lnc
    rate = chip.number("gb_per_s") * 1e3  # bytes per microsecond
    vector = work.vector * chip.by("vector_ns_per_element", "one")
    vector += work.vector_two * chip.by("vector_ns_per_element", "two")
    scalar = work.scalar * chip.number("scalar_ns_per_element")
    one, other = chip.by("vector_ns_per_element", "one"), chip.number("scalar_ns_per_element")
    part = 0.0
    if work.either:
        part = min(max((scalar + work.either * other - vector) / (work.either * (one + other)), 0.0), 1.0)
    vector += part * work.either * one
    scalar += (1 - part) * work.either * other
    tensor, products = (
        sum(n * chip.by("tensor_ns_per_column", dtype) for dtype, n in columns.items()) / cores / 1e3
        for columns in (work.columns, work.columns_many)
    )
    full = chip.at("dma_gb_per_s", LONG_ROW)
    slower = sum(n * (full / max(chip.at("dma_gb_per_s", row), 1.0) - 1) for row, n in work.narrow.items())
    found = work.rows * chip.by("descriptor_ns", "row") + work.elements * chip.by("descriptor_ns", "element")
    return Time(
        launch=chip.by("launch_us", "queued" if queued else "waited"),
        memory=(work.read + slower + work.written) / rate,
        spills=work.spilled / rate,
        waited=work.waited * one / cores / 1e3,
        tensor=tensor,
        products=products,
        vector=vector / cores / 1e3,
        scalar=scalar / cores / 1e3,
        descriptors=found / 1e3,
        latency=work.depth * chip.number("dependent_ns") / 1e3,
        calls=work.nki_calls * chip.number("nki_call_us"),
        reductions=summed_us(chip, work.all_reduces, work.reduced),
    )
