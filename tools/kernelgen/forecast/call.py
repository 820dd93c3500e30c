"""How long a call of a model takes: its launches one after another, and what goes over the host.

A graph's groups are found as the backend finds them (`kernelgen.dispatch.grouping`); a node in none is computed by a kernel of its
own, whether there is one or not, and those that there is none for are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.dispatch.grouping import Grouping, Groups
from kernelgen.forecast.memory import Memory, of_graph
from kernelgen.forecast.time import Time, of_work, summed_us
from kernelgen.forecast.work import Work, of_one_core
from kernelgen.ggml.tensor import TensorDesc
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
        memory: what a core holds of the model.
        cores: over how many weights are split.
        reductions_us: microseconds of what these sum up together, beside what kernels with sums take.
        split: whether this is what one of the cores computes, as llama.cpp splits the model; otherwise work is divided evenly.
    """

    n_tokens: int
    n_kv: int
    launches: tuple[Launches, ...]
    missing: int
    transfers_us: float
    logits_bytes: int
    memory: Memory
    cores: int = 1
    reductions_us: float = 0.0
    split: bool = False

    @property
    def count(self) -> int:
        """How many launches there are."""
        return sum(one.count for one in self.launches)

    @property
    def ms(self) -> float:
        """Milliseconds of the call."""
        return (sum(one.count * one.time.total for one in self.launches) + self.reductions_us + self.transfers_us) / 1e3

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
        found["reductions"] = found.get("reductions", 0.0) + self.reductions_us / 1e3
        return found


def forecast(
    graph: Graph,
    kernels: Collection[KernelSpec],
    groups: Groups | Grouping,
    chip: Chip,
    work_of: Callable[[KernelSpec | GraphSpec], Work | None],
    *,
    queued: bool = True,
    layers: int = 0,
    cores: int = 1,
    widened: Collection[TensorDesc] = (),
) -> CallForecast:
    """Returns what a call takes.

    A graph of one of several devices counts as it is: its slices and its sums. An execution with a sum in it is a barrier; in a
    queue only one of them costs time. The host adds what has no kernel for its sum, as the backend does.
    Of another graph with more than one core the work of each kernel is divided, and cores sum up twice in a layer, behind attention
    and behind the feed-forward network.

    Args:
        graph: what llama.cpp computes for it.
        kernels: those for ops that there are.
        groups: those for groups that there are, or which of them nodes run in.
        chip: the figures of the target.
        work_of: what a kernel moves and computes; None where no kernel can be made.
        queued: whether launches are queued, or each is waited for.
        layers: how many the model has.
        cores: over how many weights, heads and cache are split, of a graph that is not one of several devices.
        widened: weights, as ggml has them, that are in the layout `bf16`.
    """
    grouping = groups if isinstance(groups, Grouping) else groups.find(graph)
    counts: Counter[KernelSpec | GraphSpec] = Counter(grouping.groups)
    split = graph.devices > 1
    if split:
        cores = 1
    missing = 0
    over_host: list[int] = []  # bytes of each sum
    for number, _ in grouping.outside:
        node = graph.nodes[number]
        if node.empty:
            continue
        spec = node.spec()
        if spec in kernels:
            counts[spec] += 1
        elif spec.op == "all_reduce":
            over_host.append(spec.output.storage_bytes)
        else:
            missing += 1
    launches = []
    summing = 0
    for one, count in counts.items():
        work = work_of(one)
        if work is None:
            missing += count
        else:
            summing += count * bool(work.all_reduces)
            launches.append(Launches(one, count, of_work(of_one_core(work, cores), chip, queued=queued)))
    launches.sort(key=lambda one: -one.count * one.time.total)
    sizes = graph.sizes
    n_tokens, n_kv = sizes.get("n_tokens", 1), sizes.get("n_kv", 0)
    logits = graph.nodes[-1].spec().output.storage_bytes
    written = INPUTS * chip.number("host_transfer_us") + MASK_BYTES * n_tokens * n_kv / (
        chip.by("host_gb_per_s", "to_device") * 1e3
    )
    waited = chip.by("launch_us", "waited") - chip.by("launch_us", "queued")
    read = chip.number("host_transfer_us") + logits / (chip.by("host_gb_per_s", "from_device") * 1e3)
    reductions = 0.0
    if split:
        barriers = min(summing, 1) if queued else summing
        reductions = barriers * chip.at("collectives_us", graph.devices) if barriers else 0.0
        rate = 1 / chip.by("host_gb_per_s", "from_device") + 1 / chip.by("host_gb_per_s", "to_device")
        reductions += len(over_host) * (2 * chip.number("host_transfer_us") + waited) + sum(over_host) * rate / 1e3
    elif cores > 1:
        barriers = 1 if queued else sum(one.count for one in launches)
        products = (node.spec() for node in reversed(graph.nodes) if node.op == "mul_mat")
        width = next((spec.inputs[0].ne[0] for spec in products if spec.inputs[0]), 0)  # of the logits' weights
        reductions = barriers * chip.at("collectives_us", cores)
        reductions += summed_us(chip, 2 * layers, 2 * layers * 4 * n_tokens * width)
    memory = of_graph(graph, chip, cores, widened)
    return CallForecast(
        n_tokens,
        n_kv,
        tuple(launches),
        missing,
        written + waited + read,
        logits,
        memory,
        graph.devices if split else cores,
        reductions,
        split,
    )
