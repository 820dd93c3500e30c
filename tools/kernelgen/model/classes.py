"""Graphs side by side: those with the same ops one after another, and the formulas of what stands at one place in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kernelgen.model import graph_entries, groups
from kernelgen.model.causal import Causal, causal_kernel
from kernelgen.model.derived import DerivedKernel
from kernelgen.model.formulas import Fitter
from kernelgen.model.graph_entries import Cuts
from kernelgen.model.graphs import ExportedNode, Graph
from kernelgen.model.groups import Cut, GraphEntry, GraphFormula
from kernelgen.model.kernel_formulas import KernelFormula, Point, fit
from kernelgen.model.sizes import NAMES, DecodeCall, Settings

Sampled = tuple[int, str]
"""Calls with so many sequences and these samplers."""

OF_STREAMS = ("flash_attn_ext", "set_rows", "concat")
"""Ops of groups that are a node for each sequence where sequences have a cache each, and what puts their results together.
Alone they are computed by kernels for one sequence: attention of one after the other, and a write by a kernel that has the rows of
all caches."""


def is_in_turn(settings: Settings, n_seqs: int, flash_attn: bool) -> bool:
    """Whether a graph's attention was made one of each sequence, of a cache of any length."""
    return flash_attn and settings.in_turn(n_seqs)


def is_together(settings: Settings, n_seqs: int, n_tokens: int, n_outputs: int) -> bool:
    """Whether there are groups for a call of several sequences with a cache each; several tokens of each have all outputs."""
    together = settings.tokens_in_turn(n_seqs)
    return n_tokens in together and (n_tokens == n_seqs or n_outputs in (0, n_tokens) or settings.n_outputs is not None)


def is_alone(settings: Settings, call: DecodeCall) -> bool:
    """Whether kernels of single nodes are asked for in a call: those of other calls serve a token of each sequence."""
    return bool(call.samplers) or call.n_tokens in settings.n_tokens


def point_of(settings: Settings, call: DecodeCall, graph: Graph) -> dict[str, int]:
    """The sizes of a graph by name; 0 for a cache that the model lacks."""
    return {
        "n_tokens": call.n_tokens,
        "n_outputs": call.n_outputs,
        "n_kv": graph.sizes.get("n_kv", 0),
        "n_kv_swa": graph.sizes.get("n_kv_swa", 0),
        "n_ctx": settings.all_cells(call.n_ctx),
    }


@dataclass
class _Class:
    """Graphs that have the same ops one after another, of the same devices and samplers."""

    n_seqs: int
    samplers: str
    flash_attn: bool
    devices: int
    of: tuple[int, ...]
    names: tuple[str, ...]
    calls: list[DecodeCall] = field(default_factory=list)
    points: list[dict[str, int]] = field(default_factory=list)
    columns: list[list[ExportedNode]] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)


class Classes:
    def __init__(self, settings: Settings, keep: bool, causal: bool) -> None:
        self._settings = settings
        self._keep = keep  # graphs, to be cut
        self._causal = Causal() if causal else None
        self.cuts: Cuts = {}
        self.graphs: dict[tuple[str, ...], dict[GraphFormula, GraphEntry]] = {}
        self._found: dict[object, _Class] = {}
        self._kinds: dict[int, int] = {}
        self._kept: dict[object, int] = {}

    def add(self, call: DecodeCall, graph: Graph) -> None:
        flash = bool(graph.context["flash_attn"])
        whose = (call.n_seqs, call.samplers, flash, graph.devices, graph.of)
        key = (whose, tuple(map(self._kind, graph.nodes)), graph.zeroed)
        one = self._found.setdefault(key, _Class(*whose, graph.names, columns=[[] for _ in graph.nodes]))
        one.calls.append(call)
        one.points.append(point_of(self._settings, call, graph))
        for column, node in zip(one.columns, graph.nodes, strict=True):
            column.append(node)
        if self._keep:
            one.graphs.append(self._for_groups(graph))

    def _for_groups(self, graph: Graph) -> Graph:
        return graph if self._causal is None else self._causal.of(graph)

    def _kind(self, node: ExportedNode) -> int:
        """A number for what nodes of one column have in common."""
        if id(node) not in self._kinds:
            types = tuple(None if t is None else t.dtype for t in node.inputs)
            key = (node.op, types, node.output.dtype, node.alias)
            self._kinds[id(node)] = self._kept.setdefault(key, len(self._kept))
        return self._kinds[id(node)]

    def _some_cuts(self) -> list[tuple[tuple[str, ...], Cut]]:
        return [(targets, cut) for targets, cut in self.cuts.items() if cut is not None]

    def note_as_it_is(self, graph: Graph, point: Point, *, fallback: bool) -> None:
        """Adds the graph kernels of one graph, without formulas."""
        for targets, cut in self._some_cuts():
            found = self.graphs.setdefault(targets, {})
            graph_entries.note_as_it_is(found, self._for_groups(graph), point, cut, fallback=fallback)

    def entries(self, asked: Mapping[Sampled, Sequence[DecodeCall]]) -> tuple[list[DerivedKernel], set[Sampled]]:
        """Returns an entry for each kernel, and the calls for which something has no formula."""
        found: dict[KernelFormula, DerivedKernel] = {}
        incomplete: set[Sampled] = set()
        met: dict[tuple[Sampled, bool, int, tuple[int, ...]], set[DecodeCall]] = {}
        for one in self._found.values():
            sampled = (one.n_seqs, one.samplers)
            points, complete = _asked_of(self._settings, one, asked[sampled])
            met.setdefault((sampled, one.flash_attn, one.devices, one.of), set()).update(points)
            fitter = Fitter(NAMES, one.points)
            kernels = self._add_kernels(one, points, fitter, found)
            grouped = self._add_graphs(one, points, fitter, kernels)
            if not (complete and grouped) or None in kernels:
                incomplete.add(sampled)
        for (sampled, *_), calls in met.items():
            if calls != set(asked[sampled]):
                incomplete.add(sampled)
        return list(found.values()), incomplete

    def _add_kernels(
        self,
        one: _Class,
        points: Mapping[DecodeCall, Point],
        fitter: Fitter,
        found: dict[KernelFormula, DerivedKernel],
    ) -> list[KernelFormula | None]:
        """Adds the kernels of a class's nodes at some sizes, and returns the formula of each node."""
        in_turn = is_in_turn(self._settings, one.n_seqs, one.flash_attn)
        alone = [point for call, point in points.items() if is_alone(self._settings, call)]
        made: dict[tuple[int, ...], KernelFormula | None] = {}
        for column, name in zip(one.columns, one.names, strict=True):
            key = tuple(map(id, column))
            if key in made:
                continue
            made[key] = kernel = fit(column, one.points, fitter)
            if kernel is not None and alone and not (in_turn and column[0].op in OF_STREAMS):
                found.setdefault(kernel, DerivedKernel(kernel, [], name)).points += alone
        return [made[tuple(map(id, column))] for column in one.columns]

    def _add_graphs(
        self,
        one: _Class,
        points: Mapping[DecodeCall, Point],
        fitter: Fitter,
        kernels: Sequence[KernelFormula | None],
    ) -> bool:
        """Adds the graph kernels of a class at some sizes; returns whether all have formulas."""
        in_turn = is_in_turn(self._settings, one.n_seqs, one.flash_attn)
        together = [
            point
            for point in points.values()
            if not in_turn or is_together(self._settings, one.n_seqs, point["n_tokens"], point["n_outputs"])
        ]
        if self._causal is not None:
            kernels = [kernel and causal_kernel(kernel) for kernel in kernels]
        all_complete = True
        for targets, cut in self._some_cuts() if together else ():
            grouped, complete = groups.fit(one.graphs, one.points, kernels, cut, fitter)
            all_complete = all_complete and complete
            graph_entries.note(self.graphs.setdefault(targets, {}), grouped, together, fallback=not in_turn)
        return all_complete


def _asked_of(settings: Settings, one: _Class, asked: Sequence[DecodeCall]) -> tuple[dict[DecodeCall, Point], bool]:
    """Returns the sizes of those calls that formulas of this class are for, and whether these are all that belong to it.

    A class that has a number of tokens and outputs at three lengths of the cache at least has it at all lengths.
    """
    at = dict(zip(one.calls, one.points, strict=True))
    seen: dict[tuple[int, int, int], set[int]] = {}
    window: dict[int, int] = {}
    for call, point in at.items():
        if call.n_kv:
            seen.setdefault((call.n_ctx, call.n_tokens, call.n_outputs), set()).add(call.n_kv)
        window[call.n_ctx] = max(window.get(call.n_ctx, 0), point["n_kv_swa"])
    plain = all(
        point["n_kv"] in (0, call.n_kv) and point["n_kv_swa"] in (0, min(call.n_kv, window[call.n_ctx]))
        for call, point in at.items()
        if call.n_kv
    )
    has_cache = any(point["n_kv"] for point in one.points)
    found: dict[DecodeCall, Point] = {}
    complete = True
    for call in asked:
        lengths = seen.get((call.n_ctx, call.n_tokens, call.n_outputs), set())
        if call in at:
            found[call] = at[call]
        elif not lengths or not call.n_kv:
            continue
        elif plain and len(lengths) >= 3:
            n_kv = call.n_kv if has_cache else 0
            found[call] = {
                "n_tokens": call.n_tokens,
                "n_outputs": call.n_outputs,
                "n_kv": n_kv,
                "n_kv_swa": min(n_kv, window[call.n_ctx]),
                "n_ctx": settings.all_cells(call.n_ctx),
            }
        else:
            complete = False
    return found, complete
