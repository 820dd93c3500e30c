"""How long a call of a model takes: its launches one after another, and what goes over the host.

A graph's groups are found as the backend finds them (`kernelgen.dispatch.grouping`); a node in none is computed by a kernel of its
own, whether there is one or not, and those that there is none for are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.dispatch.grouping import Groups
from kernelgen.forecast.time import Time
from kernelgen.model.graphs import Graph
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import KernelSpec

INPUTS = 5
"""Writes that a call of llama.cpp makes before it is computed: tokens, positions, mask, rows of keys and of values."""
MASK_BYTES = 4
"""Of an element of the mask, which is written as F32."""


@dataclass(frozen=True, slots=True)
class Launches:
    """A kernel that a call launches.

    Attributes:
        spec: the kernel.
        count: how often.
        time: of one launch.
    """

    spec: KernelSpec | GraphSpec
    count: int
    time: Time


@dataclass(frozen=True, slots=True)
class CallForecast:
    """What a call takes.

    Attributes:
        n_tokens, n_kv: of the call.
        launches: the kernels, those first that take longest in all.
        missing: nodes that there is no kernel for: the CPU computes them, and what that takes is not known here.
        transfers_us: microseconds of what goes over the host: inputs in, logits out, and the wait for the last launch.
        logits_bytes: of these.
    """

    n_tokens: int
    n_kv: int
    launches: tuple[Launches, ...]
    missing: int
    transfers_us: float
    logits_bytes: int

    @property
    def count(self) -> int:
        """How many launches there are."""
        return sum(one.count for one in self.launches)

    @property
    def ms(self) -> float:
        """Milliseconds of the call."""
        return (sum(one.count * one.time.total for one in self.launches) + self.transfers_us) / 1e3

    def part_ms(self, name: str) -> float:
        """Returns the milliseconds of a part of `Time`, summed; parts overlap."""
        return sum(one.count * float(getattr(one.time, name)) for one in self.launches) / 1e3

    @property
    def parts_ms(self) -> dict[str, float]:
        """The milliseconds of what is done one after another (`Time.parts`), summed: with the transfers they are `ms`."""
        found: dict[str, float] = {}
        for one in self.launches:
            for part, us in one.time.parts.items():
                found[part] = found.get(part, 0.0) + one.count * us / 1e3
        return found


def forecast(
    graph: Graph,
    kernels: Collection[KernelSpec],
    groups: Groups,
    chip: Chip,
    time_of: Callable[[KernelSpec | GraphSpec], Time | None],
) -> CallForecast:
    """Returns what a call takes.

    Args:
        graph: what llama.cpp computes for it.
        kernels: those for ops that there are.
        groups: those for groups that there are.
        chip: the figures of the target.
        time_of: what a launch of a kernel takes; None where no kernel can be made.
    """
    grouping = groups.find(graph)
    counts: Counter[KernelSpec | GraphSpec] = Counter(grouping.groups)
    missing = 0
    for number, _ in grouping.outside:
        node = graph.nodes[number]
        if node.empty:
            continue
        spec = node.spec()
        if spec in kernels:
            counts[spec] += 1
        else:
            missing += 1
    launches = []
    for one, count in counts.items():
        time = time_of(one)
        if time is None:
            missing += count
        else:
            launches.append(Launches(one, count, time))
    launches.sort(key=lambda one: -one.count * one.time.total)
    sizes = graph.sizes
    n_tokens, n_kv = sizes.get("n_tokens", 1), sizes.get("n_kv", 0)
    logits = graph.nodes[-1].spec().output.storage_bytes
    written = INPUTS * chip.number("host_transfer_us") + MASK_BYTES * n_tokens * n_kv / (
        chip.by("host_gb_per_s", "to_device") * 1e3
    )
    waited = chip.by("launch_us", "waited") - chip.by("launch_us", "queued")
    read = chip.number("host_transfer_us") + logits / (chip.by("host_gb_per_s", "from_device") * 1e3)
    return CallForecast(n_tokens, n_kv, tuple(launches), missing, written + waited + read, logits)
