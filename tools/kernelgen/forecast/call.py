"""Forecasts the time of a model's call: its launches in sequence, and the transfers through the host.

A graph's groups are found by the backend's rules (`kernelgen.dispatch.grouping`). A node in no group counts as its own kernel,
whether or not that kernel exists; missing kernels are counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.dispatch.grouping import Grouping, Groups
from kernelgen.forecast.memory import Memory, of_graph
from kernelgen.forecast.time import Time, of_work, summed_us
from kernelgen.forecast.work import Work, of_one_core
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.model.graphs import Graph
from kernelgen.spec.kernel import GraphSpec, KernelSpec

INPUTS = 5
"""Writes of llama.cpp before it computes a call: tokens, positions, mask, rows of keys and of values."""
MASK_BYTES = 4
"""Bytes per element of the mask, which is written as F32."""


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches of one kernel in a call.

    Attributes:
        spec: the kernel.
        nodes: the graph's nodes that each launch computes.
        time: time of one launch.
    """

    spec: KernelSpec | GraphSpec
    nodes: tuple[range, ...]
    time: Time

    @property
    def count(self) -> int:
        """The number of launches."""
        return len(self.nodes)


@dataclass(frozen=True, slots=True)
class CallForecast:
    """The forecast of a call.

    Attributes:
        n_tokens, n_kv: sizes of the call.
        launches: the kernels, sorted by total time, longest first.
        missing: nodes without a kernel: the CPU computes them, and their time is not included.
        transfers_us: microseconds of host transfers: inputs, logits, and the wait for the last launch.
        logits_bytes: bytes of the logits.
        memory: the model's memory on a core.
        cores: number of cores that the weights are split over.
        reductions_us: microseconds of sums over cores, besides those in kernels with sums.
        split: whether this is one core's part, as llama.cpp splits the model; otherwise work is divided evenly.
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
        """The number of launches."""
        return sum(one.count for one in self.launches)

    @property
    def ms(self) -> float:
        """Milliseconds of the call."""
        return (sum(one.count * one.time.total for one in self.launches) + self.reductions_us + self.transfers_us) / 1e3

    def part_ms(self, name: str) -> float:
        """Returns the sum of the milliseconds of a part of `Time`; parts overlap."""
        return sum(one.count * float(getattr(one.time, name)) for one in self.launches) / 1e3

    @property
    def parts_ms(self) -> dict[str, float]:
        """The summed milliseconds of the sequential parts (`Time.parts`): with the transfers they give `ms`."""
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
    """Returns the forecast of a call.

    The graph of one of several devices counts as it is, with its slices and sums. An execution with a sum is a barrier; in a queue
    only one of them costs time. The host computes a missing kernel's sum, as in the backend. For any other graph with more than one
    core, each kernel's work is divided, and the cores sum up twice per layer: after attention and after the feed-forward network.

    Args:
        graph: llama.cpp's graph of the call.
        kernels: the available op kernels.
        groups: the available graph kernels, or the groups of the graph's nodes.
        chip: the figures of the target.
        work_of: returns a kernel's work; None if no kernel can be made.
        queued: whether launches are queued, rather than waited for one by one.
        layers: number of the model's layers.
        cores: number of cores that share weights, heads and cache; for a graph that is not one of several devices.
        widened: weights, in ggml's form, that have the layout `bf16`.
    """
    grouping = groups if isinstance(groups, Grouping) else groups.find(graph)
    computed: dict[KernelSpec | GraphSpec, list[range]] = defaultdict(list)
    for group, start, size in zip(grouping.groups, grouping.starts, grouping.sizes, strict=True):
        computed[group].append(range(start, start + size))
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
            computed[spec].append(range(number, number + 1))
        elif spec.op == "all_reduce":
            over_host.append(spec.output.storage_bytes)
        else:
            missing += 1
    launches = []
    summing = 0
    for one, nodes in computed.items():
        work = work_of(one)
        if work is None:
            missing += len(nodes)
        else:
            summing += len(nodes) * bool(work.all_reduces)
            launches.append(Launches(one, tuple(nodes), of_work(of_one_core(work, cores), chip, queued=queued)))
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
