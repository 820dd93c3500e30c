"""Chooses the cut of a graph into kernels for each target: `kernelgen model --fuse auto`.

Kernels of different cuts differ in their launches, in their memory traffic between kernels, and in their sums over devices; the
rest takes the same time. So the forecast has launches, bytes that leave a kernel and products by weights, from shapes alone.

A cut is excluded if one of its kernels has more instructions than neuronx-cc accepts, or needs more memory or time to compile
than available. Among those within `EQUAL` of the fastest, the one with the least to compile is chosen: the remaining differences
are below the forecast's precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kernelgen.dispatch.chips import Chip
from kernelgen.dispatch.grouping import Groups
from kernelgen.forecast.call import forecast
from kernelgen.forecast.products import added, of_product
from kernelgen.forecast.weights import EQUAL
from kernelgen.forecast.work import Work
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import BF16, WEIGHTS
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import Cut, cut_of, instructions, readers_of, segment_spec
from kernelgen.spec.kernel import GraphSpec, KernelSpec
from kernelgen.targets import COMPILE_KB, COMPILE_MB, MAX_INSTRUCTIONS

FUSES = ("none", "layer", "layers:2", "layers:4", "layers:8", "step")
"""The compared values of `--fuse`."""
FUSES_OF_DEVICES = ("none", "parts", "parts+sums", *FUSES[1:])
"""The same, for tensors split over devices."""

COMPILE_GIB = 32
"""Maximum memory of a compile, in GiB: the memory of a trn1.2xlarge."""
COMPILE_US = 550
"""Microseconds to compile an instruction: neuronx-cc 2.27 with `--model-type transformer` took 294 s for 532,000 (foxl-ai/kiln)."""
COMPILE_HOURS = 8
"""Maximum time for all kernels of a cut for a target, compiled one after another."""

_TRANSFORMER_KB = COMPILE_KB["transformer"]
_NOT_READ = {"get_rows": 0, "set_rows": 2}
"""The input whose rows an op reads or overwrites only in part, by op."""


@dataclass(frozen=True, slots=True)
class Size:
    """The amount to compile.

    Attributes:
        kernels: number of graph kernels.
        instructions: estimate for the products of all of them.
        most: instructions of the largest.
    """

    kernels: int
    instructions: int
    most: int

    @property
    def hours(self) -> float:
        """Hours of all compiles in sequence."""
        return self.instructions * COMPILE_US / 3.6e9

    @property
    def time(self) -> str:
        """The same as text."""
        return f"{self.hours:.1f} h" if self.hours >= 1 else f"{self.hours * 60:.0f} min"

    @property
    def gib(self) -> float:
        """GiB of memory for the largest compile."""
        return (COMPILE_MB + self.most * _TRANSFORMER_KB / 1024) / 1024

    @property
    def beyond(self) -> str:
        """The exceeded limit, in words; empty if there is none."""
        if self.most > MAX_INSTRUCTIONS:
            return f"a kernel of {self.most / 1e6:.1f} million instructions"
        if self.gib > COMPILE_GIB:
            return f"a compile takes {self.gib:.0f} GiB"
        return f"compiles take {self.time}" if self.hours > COMPILE_HOURS else ""


@dataclass(frozen=True, slots=True)
class Option:
    """A possible cut.

    Attributes:
        ms: milliseconds of a call.
        launches: number of its launches.
        size: the amount to compile.
    """

    ms: float
    launches: int
    size: Size


@dataclass(frozen=True, slots=True)
class Fusion:
    """The choice for a target.

    Attributes:
        target: its name.
        n_tokens: number of the call's tokens.
        devices: number of devices that tensors are split over.
        options: by their `--fuse` names.
    """

    target: str
    n_tokens: int
    devices: int
    options: Mapping[str, Option]

    @property
    def name(self) -> str:
        """Among the options within all limits and within `EQUAL` of the fastest, the one with the least to compile."""
        within = {name: one for name, one in self.options.items() if not one.size.beyond}
        least = min(one.ms for one in within.values())
        near = [name for name, one in within.items() if one.ms <= EQUAL * least]
        return min(near, key=lambda name: (within[name].size.instructions, within[name].ms))

    @property
    def text(self) -> str:
        """The choice and its alternatives, in a line."""
        cores = "one core" if self.devices == 1 else f"{self.devices} cores"
        tokens = f"{self.n_tokens} token{'s' * (self.n_tokens > 1)}"
        rest = [name for name in self.options if name != self.name]
        return (
            f"fuse {self.name}, by a forecast of the launches and products by weights of {tokens} on {cores}: "
            f"{'; '.join(map(self._one, [self.name, *rest]))}; modelled, not measured"
        )

    def _one(self, name: str) -> str:
        one = self.options[name]
        parts = [f"{one.launches} launch{'es' * (one.launches > 1)}"]
        if one.size.kernels:
            parts.append(f"{one.size.time} to compile" if not one.size.beyond else f"left out: {one.size.beyond}")
        return f"{name} {one.ms:.1f} ms ({', '.join(parts)})"


def choose(
    call: Graph, graphs: Sequence[Graph], chips: Sequence[Chip], widened: Mapping[str, Collection[TensorDesc]]
) -> list[Fusion]:
    """Returns the choice for each target.

    Args:
        call: the graph of a call; of one token, if there is one.
        graphs: all graphs that need kernels.
        chips: figures of the targets.
        widened: by target, the weights, in ggml's form, that have the layout `bf16`.
    """
    split = max(graph.devices for graph in graphs) > 1
    ops = frozenset(node.spec() for node in call.nodes if not node.empty)
    cuts = {name: cut_of(name) for name in (FUSES_OF_DEVICES if split else FUSES)}
    groups = {name: _groups(call, cut).find(call) for name, cut in cuts.items()}
    counts = {id(node): instructions(node) for graph in graphs for node in set(graph.nodes)}
    sizes = {name: _size(graphs, counts, cut) for name, cut in cuts.items()}
    found = []
    for chip in chips:
        options = {}
        for name, of in groups.items():
            taken = forecast(call, ops, of, chip, partial(_work, widened=widened.get(chip.target, ())))
            options[name] = Option(taken.ms, taken.count, sizes[name])
        found.append(Fusion(chip.target, call.sizes.get("n_tokens", 1), call.devices, options))
    return found


def _groups(graph: Graph, cut: Cut | None) -> Groups:
    readers = readers_of(graph)
    specs = set()
    for segment in cut(graph) if cut else ():
        if len(segment) > 1 and not any(node.empty for node in graph.nodes[segment.start : segment.end]):
            specs.add(segment_spec(graph, segment, readers))
    return Groups(specs)


def _size(graphs: Sequence[Graph], counts: Mapping[int, int], cut: Cut | None) -> Size:
    """Returns the amount to compile for groups; groups with equal nodes are one kernel."""
    found: dict[tuple[int, ...], int] = {}
    for graph in graphs:
        for segment in cut(graph) if cut else ():
            if len(segment) > 1:
                nodes = tuple(map(id, graph.nodes[segment.start : segment.end]))
                found[nodes] = sum(map(counts.__getitem__, nodes))
    return Size(len(found), sum(found.values()), max(found.values(), default=0))


def _work(spec: KernelSpec | GraphSpec, widened: Collection[TensorDesc]) -> Work:
    """Returns the work that differs between cuts, and products: a kernel's other reads and writes, and its sums."""
    total = Work()
    works = []
    slots = set()
    for node in spec.nodes:
        for number, operand in enumerate(node.inputs):
            if operand is None or number == _NOT_READ.get(node.op):
                continue
            if number == WEIGHTS.get(node.op):
                weight = operand.tensor
                works.append(
                    (of_product(node.op, weight.in_layout(BF16) if weight in widened else weight, node.output), 1)
                )
            elif operand.place.slot and operand not in slots:
                slots.add(operand)
                total.read += operand.tensor.storage_bytes
        total.written += node.output.storage_bytes * node.escapes
        if node.op == "all_reduce":
            total.all_reduces += 1
            total.reduced += node.output.storage_bytes
    products = added(works)
    products.read += total.read
    return replace(products, written=total.written, all_reduces=total.all_reduces, reduced=total.reduced)
