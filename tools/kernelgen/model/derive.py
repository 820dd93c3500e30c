"""Derives the kernels that a model needs from its graphs, with formulas where possible.

Graphs of different sizes with the same sequence of ops are compared node by node. The nodes at one place become one kernel whose
shapes, strides and parameters are formulas of the sizes, or several such kernels. A formula is fitted to all graphs and holds for
all of them. Kernels without a formula are listed for each requested size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from kernelgen.emitters.catalog import Catalog
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.model import groups
from kernelgen.model import sizes as model_sizes
from kernelgen.model.any_numbers import with_any_numbers
from kernelgen.model.causal import causal_kernel, with_causality
from kernelgen.model.derived import DeriveCall, Derived, DerivedKernel
from kernelgen.model.first_cells import with_first_cells
from kernelgen.model.formulas import Fitter
from kernelgen.model.graphs import ExportedNode, Graph
from kernelgen.model.groups import Cut, GraphEntry, GraphFormula
from kernelgen.model.kernel_formulas import KernelFormula, Point, constant, fit
from kernelgen.model.reasons import Reasons
from kernelgen.model.sizes import NAMES, DecodeCall, Settings
from kernelgen.model.streams import with_streams
from kernelgen.spec.kernel import GraphSpec, KernelSpec

Export = Callable[[Sequence[DecodeCall]], Iterable[tuple[DecodeCall, Graph]]]
"""Returns the graph of each call, for each setting of flash attention."""


_Sampled = tuple[int, str]
"""Calls with this number of sequences and these samplers."""

Cuts = Mapping[tuple[str, ...], Cut | None]
"""How to cut graphs into graph kernels, by targets; an empty tuple of targets means all."""


def derive(
    settings: Settings,
    catalog: Catalog,
    export: Export,
    choose: Callable[[], Cuts] | None = None,
    *,
    causal: bool = False,
    beside: Iterable[Graph] = (),
) -> Derived:
    """Returns the kernels that a model needs.

    Args:
        settings: how the model is run.
        catalog: the emitters.
        export: returns graphs.
        choose: returns how to cut graphs into graph kernels, after all graphs for formulas were exported; None for no graph
            kernels.
        causal: whether attention in graph kernels is causal.
        beside: further graphs, whose nodes get kernels without formulas.
    """
    export = _rewritten(export, settings)
    beside = [with_any_numbers(graph) if graph.is_probe else graph for graph in beside]
    calls = [call for n in range(1, settings.n_seq_max + 1) for call in model_sizes.looked_at(settings, n)]
    classes = _Classes(settings, choose is not None, causal)
    derived_calls: list[DeriveCall] = []
    requested: dict[_Sampled, list[DecodeCall]] = {}
    for n in range(1, settings.n_seq_max + 1):
        for call in model_sizes.requested_calls(settings, n):
            requested.setdefault((n, call.samplers), []).append(call)
    wanted = {call for own in requested.values() for call in own}
    reasons = Reasons(catalog)
    for call, graph in export(calls):
        classes.add(call, graph)
        if call in wanted:
            without = Counter(reasons.of_node(node) for node in graph.nodes)
            del without[""]
            flash = bool(graph.context["flash_attn"])
            derived_calls.append(DeriveCall(call, flash, len(graph.nodes), dict(without), graph.devices, graph.of))
    if choose is not None:
        classes.cuts = choose()
    entries, incomplete = classes.entries(requested)
    listed = 0
    if incomplete:
        known = {spec for entry in entries for spec in entry.specs()}
        rest = sorted({call for call in wanted if (call.n_seqs, call.samplers) in incomplete})
        for call, graph in export(rest):
            in_turn = settings.in_turn(call.n_seqs)
            if not in_turn or _is_together(settings, call.n_seqs, call.n_tokens, call.n_outputs):
                classes.note_as_it_is(call, graph, fallback=not in_turn)
            for i, (node, name) in enumerate(zip(graph.nodes, graph.names, strict=True)):
                # Nodes of one sequence's part use the kernels for one sequence.
                if node.empty or i in graph.parts or (in_turn and not _is_alone(settings, call)):
                    continue
                spec = node.spec()
                if spec not in known:
                    known.add(spec)
                    entries.append(DerivedKernel(constant(spec), [_point(settings, call, graph)], name))
                    listed += 1
    if settings.any_ctx:
        _write_to_all(settings, entries)
    entries = _absorb(entries)
    for entry in entries:
        entry.reason = reasons.of_entry(entry)
    entries += as_they_are(beside, reasons, {spec for entry in entries for spec in entry.specs()})
    derived_calls.sort(key=lambda one: (not one.flash_attn, one.devices, one.of, one.call))
    graphs = {of: _graphs(classes.graphs.get(of, {}).values(), reasons) for of in classes.cuts}
    return Derived(entries, derived_calls, listed, _of_targets(graphs))


def both(one: Derived, other: Derived) -> Derived:
    """Returns the kernels of two models that run together, each kernel once, with the calls of the first model."""
    known = {(entry.kernel, frozenset(entry.values)) for entry in one.graphs}
    graphs = [entry for entry in other.graphs if (entry.kernel, frozenset(entry.values)) not in known]
    entries = _absorb([*one.entries, *other.entries])
    return Derived(entries, one.calls, one.listed + other.listed, [*one.graphs, *graphs])


def as_they_are(graphs: Iterable[Graph], reasons: Reasons, known: Set[KernelSpec] = frozenset()) -> list[DerivedKernel]:
    """Returns a kernel without formulas for each distinct node of graphs, except for known ones, with the reason if it can't be
    built.
    """
    entries: dict[KernelSpec, DerivedKernel] = {}
    for graph in graphs:
        for node, name in zip(graph.nodes, graph.names, strict=True):
            spec = None if node.empty else node.spec()
            if spec is not None and spec not in known and spec not in entries:
                entries[spec] = DerivedKernel(constant(spec), [{}], name, reasons.of_spec(spec))
    return list(entries.values())


def _rewritten(export: Export, settings: Settings) -> Export:
    """Returns the export with graphs in the forms for which kernels are made."""

    def graphs(calls: Sequence[DecodeCall]) -> Iterator[tuple[DecodeCall, Graph]]:
        for call, graph in export(calls):
            if settings.in_turn(call.n_seqs):
                graph = with_streams(graph)
            # Without flash attention, strides depend on the length of the cache of values, so the cache of keys is whole, too.
            if settings.any_ctx and graph.context["flash_attn"]:
                graph = with_first_cells(graph)
            # scales of adapters, and numbers of samplers, which follow the model in its graph
            yield call, with_any_numbers(graph) if settings.lora or call.samplers else graph

    return graphs


def _is_together(settings: Settings, n_seqs: int, n_tokens: int, n_outputs: int) -> bool:
    """Whether a call of several sequences with separate caches has groups. Calls of several tokens each need all outputs."""
    together = settings.tokens_in_turn(n_seqs)
    return n_tokens in together and (n_tokens == n_seqs or n_outputs in (0, n_tokens) or settings.n_outputs is not None)


def _is_alone(settings: Settings, call: DecodeCall) -> bool:
    """Whether a call needs kernels for single nodes. A token of each sequence uses the kernels of other calls."""
    return bool(call.samplers) or call.n_tokens in settings.n_tokens


def _write_to_all(settings: Settings, entries: list[DerivedKernel]) -> None:
    """Adds SET_ROWS kernels for longer caches, up to the caches of all sequences: each has twice the rows of the previous one."""
    caches = 1 if settings.kv_unified else settings.n_seq_max
    doubled = range(1, (caches - 1).bit_length() + 1)
    for entry in [entry for entry in entries if entry.kernel.op == "set_rows"]:
        if names := {"n_kv", "n_kv_swa"} & set(entry.kernel.names):
            (name,) = names
            longest = max(point[name] for point in entry.points)
            last = [point for point in entry.points if point[name] == longest]
            entry.points += [{**point, name: longest << i} for point in last for i in doubled]
            continue
        for spec in sorted(entry.specs(), key=lambda spec: spec.id):  # kernels for one length
            width, rows, *_ = spec.output.ne
            if rows < settings.all_cells(settings.n_ctx[-1]):
                more = (TensorDesc.make((width, rows << i, 1, 1), spec.output.dtype) for i in doubled)
                kernels = (
                    KernelSpec.make(spec.op, [*spec.inputs[:-1], t], t, dict(spec.params), spec.alias) for t in more
                )
                entries += [DerivedKernel(constant(kernel), entry.points[:1], entry.name) for kernel in kernels]


def graph_kernels(graphs: Iterable[Graph], cut: Cut, reasons: Reasons) -> list[GraphEntry]:
    """Returns the graph kernels of graphs without formulas, with the reason if one can't be built."""
    found: dict[GraphFormula, GraphEntry] = {}
    for graph in graphs:
        _note_as_it_is(found, graph, {}, cut)
    return _graphs(found.values(), reasons)


def _note_as_it_is(
    found: dict[GraphFormula, GraphEntry], graph: Graph, point: Point, cut: Cut, *, fallback: bool = True
) -> None:
    """Adds the graph kernels of one graph, without formulas."""
    kernels = [None if node.empty else constant(node.spec()) for node in graph.nodes]
    grouped, _ = groups.fit([graph], [point], kernels, cut, Fitter(NAMES if point else (), [point]))
    _note(found, grouped, [point], fallback=fallback)


def _note(
    found: dict[GraphFormula, GraphEntry], grouped: Iterable[GraphFormula], points: Sequence[Point], *, fallback: bool
) -> None:
    """Adds graph kernels for some sizes."""
    for graph in grouped:
        entry = found.setdefault(graph, GraphEntry(graph, [], graph.nodes[-1].name, fallback=fallback))
        entry.points += points


def _graphs(entries: Iterable[GraphEntry], reasons: Reasons) -> list[GraphEntry]:
    """Returns the graph kernels, with the reason if one can't be built, without those that others already include."""
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


def _of_targets(graphs: Mapping[tuple[str, ...], Sequence[GraphEntry]]) -> list[GraphEntry]:
    """Returns the graph kernels of all targets, each once with its targets; no targets means all."""
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


def _point(settings: Settings, call: DecodeCall, graph: Graph) -> dict[str, int]:
    """The sizes of a graph by name; 0 for a cache that the model lacks."""
    return {
        "n_tokens": call.n_tokens,
        "n_outputs": call.n_outputs,
        "n_kv": graph.sizes.get("n_kv", 0),
        "n_kv_swa": graph.sizes.get("n_kv_swa", 0),
        "n_ctx": settings.all_cells(call.n_ctx),
    }


# --- graphs side by side -----------------------------------------------------------------------------------------------------


@dataclass
class _Class:
    """Graphs with the same sequence of ops, for the same devices and samplers.

    Attributes:
        alone: whether kernels of single nodes come from these graphs.
        together: whether groups come from these graphs.
        parts: nodes that use the kernels of other calls, as in `Graph.parts`.
    """

    n_seqs: int
    samplers: str
    flash_attn: bool
    devices: int
    of: tuple[int, ...]
    alone: bool
    together: bool
    names: tuple[str, ...]
    parts: frozenset[int]
    calls: list[DecodeCall] = field(default_factory=list)
    points: list[dict[str, int]] = field(default_factory=list)
    columns: list[list[ExportedNode]] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)


class _Classes:
    def __init__(self, settings: Settings, keep: bool, causal: bool) -> None:
        self._settings = settings
        self._keep = keep  # graphs, to be cut
        self._causal = causal
        self.cuts: Cuts = {}
        self.graphs: dict[tuple[str, ...], dict[GraphFormula, GraphEntry]] = {}
        self._found: dict[object, _Class] = {}
        self._kinds: dict[int, int] = {}
        self._kept: dict[object, int] = {}

    def add(self, call: DecodeCall, graph: Graph) -> None:
        """Adds a call's graph for kernels of nodes and for groups; separately if groups have other caches."""
        apart = self._with_own_cache(call, graph)
        self._add(call, graph, alone=True, together=apart is graph)
        if apart is not graph:
            self._add(call, apart, alone=False, together=True)

    def _with_own_cache(self, call: DecodeCall, graph: Graph) -> Graph:
        one = call.n_seqs == 1 and self._settings.one_apart(bool(graph.context["flash_attn"]))
        return with_streams(graph) if one else graph

    def _add(self, call: DecodeCall, graph: Graph, *, alone: bool, together: bool) -> None:
        flash = bool(graph.context["flash_attn"])
        whose = (call.n_seqs, call.samplers, flash, graph.devices, graph.of, alone, together)
        key = (whose, tuple(map(self._kind, graph.nodes)), graph.zeroed, graph.parts)
        one = self._found.setdefault(key, _Class(*whose, graph.names, graph.parts, columns=[[] for _ in graph.nodes]))
        one.calls.append(call)
        one.points.append(_point(self._settings, call, graph))
        for column, node in zip(one.columns, graph.nodes, strict=True):
            column.append(node)
        if self._keep and together:
            one.graphs.append(self._for_groups(graph))

    def _for_groups(self, graph: Graph) -> Graph:
        return with_causality(graph) if self._causal else graph

    def _kind(self, node: ExportedNode) -> int:
        """The number of a class of equal nodes in one column."""
        if id(node) not in self._kinds:
            types = tuple(None if t is None else t.dtype for t in node.inputs)
            key = (node.op, types, node.output.dtype, node.alias)
            self._kinds[id(node)] = self._kept.setdefault(key, len(self._kept))
        return self._kinds[id(node)]

    def _some_cuts(self) -> list[tuple[tuple[str, ...], Cut]]:
        return [(targets, cut) for targets, cut in self.cuts.items() if cut is not None]

    def note_as_it_is(self, call: DecodeCall, graph: Graph, *, fallback: bool) -> None:
        """Adds the graph kernels of one graph, without formulas."""
        apart = self._with_own_cache(call, graph)
        fallback = fallback and apart is graph
        graph, point = apart, _point(self._settings, call, graph)
        for targets, cut in self._some_cuts():
            found = self.graphs.setdefault(targets, {})
            _note_as_it_is(found, self._for_groups(graph), point, cut, fallback=fallback)

    def entries(self, requested: Mapping[_Sampled, Sequence[DecodeCall]]) -> tuple[list[DerivedKernel], set[_Sampled]]:
        """Returns an entry for each kernel, and the calls with a kernel that has no formula."""
        found: dict[KernelFormula, DerivedKernel] = {}
        incomplete: set[_Sampled] = set()
        met: dict[tuple[_Sampled, bool, int, tuple[int, ...]], set[DecodeCall]] = {}
        for one in self._found.values():
            sampled = (one.n_seqs, one.samplers)
            in_turn = self._settings.in_turn(one.n_seqs)
            points, complete = _requested_points(self._settings, one, requested.get(sampled, ()))
            met.setdefault((sampled, one.flash_attn, one.devices, one.of), set()).update(points)
            if not complete:
                incomplete.add(sampled)
            fitter = Fitter(NAMES, one.points)
            made: dict[tuple[int, ...], KernelFormula | None] = {}
            kernels: list[KernelFormula | None] = []
            for i, (column, name) in enumerate(zip(one.columns, one.names, strict=True)):
                key = (i in one.parts, *map(id, column))
                if key not in made:
                    made[key] = fit(column, one.points, fitter)
                    kernel = made[key]
                    alone = [point for call, point in points.items() if _is_alone(self._settings, call)]
                    if kernel is None:
                        incomplete.add(sampled)
                    elif alone and one.alone and i not in one.parts:  # parts use the kernels for one sequence
                        entry = found.setdefault(kernel, DerivedKernel(kernel, [], name))
                        entry.points += alone
                kernels.append(made[key])
            if self._causal:
                kernels = [kernel and causal_kernel(kernel) for kernel in kernels]
            together = [
                point
                for point in points.values()
                if not in_turn or _is_together(self._settings, one.n_seqs, point["n_tokens"], point["n_outputs"])
            ]
            for targets, cut in self._some_cuts() if together and one.together else ():
                grouped, complete = groups.fit(one.graphs, one.points, kernels, cut, fitter)
                if not complete:
                    incomplete.add(sampled)
                _note(self.graphs.setdefault(targets, {}), grouped, together, fallback=one.alone and not in_turn)
        for (sampled, *_), calls in met.items():
            if calls != set(requested.get(sampled, ())):
                incomplete.add(sampled)
        return list(found.values()), incomplete


def _requested_points(
    settings: Settings, one: _Class, requested: Sequence[DecodeCall]
) -> tuple[dict[DecodeCall, Point], bool]:
    """Returns the sizes of the calls that formulas of this class cover, and whether these are all of its calls.

    If a class has a number of tokens and outputs at three or more lengths of the cache, it has it at all lengths.
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
    for call in requested:
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


# --- one entry where there were several ------------------------------------------------------------------------------------------


def _absorb(entries: Sequence[DerivedKernel]) -> list[DerivedKernel]:
    """Returns entries without those that other entries include, or would include at further sizes.

    Graphs of one token may have other ops than graphs of many. A kernel that both need is then found twice: as a constant and as a
    formula, which covers both. Rows of outputs pass through the same kernels as rows of tokens.
    """
    order = sorted(range(len(entries)), key=lambda i: (-len(entries[i].kernel.names), _rank(entries[i]), i))
    kept: list[int] = []
    by_op: dict[object, list[DerivedKernel]] = {}
    covered: set[KernelSpec] = set()
    for i in order:
        entry = entries[i]
        specs = entry.specs()
        if specs and specs <= covered:
            continue
        kernel = entry.kernel
        kind = (kernel.op, tuple(t and t.dtype for t in kernel.inputs), kernel.output.dtype, kernel.alias)
        for other in by_op.setdefault(kind, []):
            if _stands_for(other, entry, specs):
                other.points += entry.points
                break
        else:
            by_op[kind].append(entry)
            kept.append(i)
        covered |= specs
    return [entries[i] for i in sorted(kept)]


def _rank(entry: DerivedKernel) -> tuple[int, ...]:
    """Sorts formulas of tokens before formulas of outputs."""
    return tuple(NAMES.index(name) for name in entry.kernel.names)


def _stands_for(other: DerivedKernel, entry: DerivedKernel, specs: set[KernelSpec]) -> bool:
    try:
        return {other.kernel.at(point) for point in entry.points} == specs
    except (KeyError, ValueError):  # a listed kernel has no sizes
        return False
