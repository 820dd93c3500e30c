"""Graph kernels as entries: at which sizes and for which targets each is asked for, and why it can't be built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kernelgen.model import groups
from kernelgen.model.formulas import Fitter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import Cut, GraphEntry, GraphFormula
from kernelgen.model.kernel_formulas import Point, constant
from kernelgen.model.reasons import Reasons
from kernelgen.model.sizes import NAMES
from kernelgen.spec.graph_kernel import GraphSpec

Cuts = Mapping[tuple[str, ...], Cut | None]
"""How graphs are cut into graph kernels, by targets; the only one is by none where it is for all."""


def graph_kernels(graphs: Iterable[Graph], cut: Cut, reasons: Reasons) -> list[GraphEntry]:
    """Returns the graph kernels of graphs as they are, each with the reason why it can't be built."""
    found: dict[GraphFormula, GraphEntry] = {}
    for graph in graphs:
        note_as_it_is(found, graph, {}, cut)
    return with_reasons(found.values(), reasons)


def note_as_it_is(
    found: dict[GraphFormula, GraphEntry], graph: Graph, point: Point, cut: Cut, *, fallback: bool = True
) -> None:
    """Adds the graph kernels of one graph, without formulas."""
    kernels = [None if node.empty else constant(node.spec()) for node in graph.nodes]
    grouped, _ = groups.fit([graph], [point], kernels, cut, Fitter(NAMES if point else (), [point]))
    note(found, grouped, [point], fallback=fallback)


def note(
    found: dict[GraphFormula, GraphEntry], grouped: Iterable[GraphFormula], points: Sequence[Point], *, fallback: bool
) -> None:
    """Adds graph kernels that are asked for at some sizes."""
    for graph in grouped:
        entry = found.setdefault(graph, GraphEntry(graph, [], graph.nodes[-1].name, fallback=fallback))
        entry.points += points


def with_reasons(entries: Iterable[GraphEntry], reasons: Reasons) -> list[GraphEntry]:
    """Returns the graph kernels, each with the reason why it can't be built; without those that others stand for already."""
    found = []
    covered: set[GraphSpec] = set()
    for entry in sorted(entries, key=lambda entry: -len(entry.kernel.names)):
        specs = entry.specs()
        if specs <= covered:
            continue
        covered |= specs
        members = {node.kernel for spec in specs for node in spec.nodes}
        entry.reason = next(
            (why for spec in sorted(members, key=lambda m: m.id) if (why := reasons.of_spec(spec))), None
        )
        found.append(entry)
    order = {id(entry): i for i, entry in enumerate(entries)}
    return sorted(found, key=lambda entry: order[id(entry)])


def of_targets(graphs: Mapping[tuple[str, ...], Sequence[GraphEntry]]) -> list[GraphEntry]:
    """Returns the graph kernels of all targets, each once with the targets that have it; none where all have it."""
    everywhere = {target for targets in graphs for target in targets}
    found: dict[object, GraphEntry] = {}
    for targets, entries in graphs.items():
        for entry in entries:
            one = found.setdefault((entry.kernel, frozenset(entry.values)), entry)
            one.targets += targets
    for entry in found.values():
        if len(entry.targets) == len(everywhere):
            entry.targets = ()
    return list(found.values())
