"""From a model's graphs to the kernels that it needs, with formulas where there are some.

Graphs of different sizes that have the same ops one after another are laid side by side: what stands at one place is one kernel
whose shapes, strides and parameters are formulas of the sizes, or it is several. A formula is found from all the graphs that there
are and holds in all of them. What has none is listed as it is at the sizes that are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from kernelgen.emitters.catalog import Catalog
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.model import graph_entries
from kernelgen.model import sizes as model_sizes
from kernelgen.model.any_numbers import AnyNumbers
from kernelgen.model.classes import OF_STREAMS, Classes, Sampled, is_alone, is_in_turn, is_together, point_of
from kernelgen.model.derived import DeriveCall, Derived, DerivedKernel
from kernelgen.model.first_cells import FirstCells
from kernelgen.model.graph_entries import Cuts
from kernelgen.model.graphs import Graph
from kernelgen.model.kernel_formulas import constant
from kernelgen.model.reasons import Reasons
from kernelgen.model.sizes import NAMES, DecodeCall, Settings
from kernelgen.model.streams import Streams
from kernelgen.spec.op_kernel import KernelSpec

Export = Callable[[Sequence[DecodeCall]], Iterable[tuple[DecodeCall, Graph]]]
"""Returns the graphs of calls, each with its call: all of them for each setting of flash attention."""


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
        settings: how it is run.
        catalog: what can be computed.
        export: where graphs come from.
        choose: says how graphs are cut into graph kernels, when all that formulas are found from were exported; None for no such
            kernels.
        causal: whether attention of graph kernels is causal.
        beside: graphs beside those of calls, whose nodes have kernels as they are.
    """
    if settings.any_ctx:
        export = _with_first_cells(export)
    export = _with_any_numbers(export, settings)
    beside = [AnyNumbers().of(graph) if graph.is_probe else graph for graph in beside]
    calls = [call for n in range(1, settings.n_seq_max + 1) for call in model_sizes.looked_at(settings, n)]
    classes = Classes(settings, choose is not None, causal)
    derived_calls: list[DeriveCall] = []
    asked: dict[Sampled, list[DecodeCall]] = {}
    for n in range(1, settings.n_seq_max + 1):
        for call in model_sizes.asked(settings, n):
            asked.setdefault((n, call.samplers), []).append(call)
    wanted = {call for own in asked.values() for call in own}
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
    entries, incomplete = classes.entries(asked)
    rest = sorted({call for call in wanted if (call.n_seqs, call.samplers) in incomplete})
    known = {spec for entry in entries for spec in entry.specs()} if rest else set()
    listed = _listed(settings, export(rest) if rest else (), classes, known)
    entries += listed
    if settings.any_ctx:
        _write_to_all(settings, entries)
    entries = _absorb(entries)
    entries += _as_they_are(beside, {spec for entry in entries for spec in entry.specs()})
    for entry in entries:
        entry.reason = reasons.of_entry(entry)
    derived_calls.sort(key=lambda one: (not one.flash_attn, one.devices, one.of, one.call))
    graphs = {of: graph_entries.with_reasons(classes.graphs.get(of, {}).values(), reasons) for of in classes.cuts}
    return Derived(entries, derived_calls, len(listed), graph_entries.of_targets(graphs))


def _listed(
    settings: Settings, exported: Iterable[tuple[DecodeCall, Graph]], classes: Classes, known: set[KernelSpec]
) -> list[DerivedKernel]:
    """Returns the kernels of calls that some have no formula for, as they are, except for those that are known.

    Graph kernels are added to `classes`.
    """
    found = []
    for call, graph in exported:
        point = point_of(settings, call, graph)
        in_turn = is_in_turn(settings, call.n_seqs, bool(graph.context["flash_attn"]))
        if not in_turn or is_together(settings, call.n_seqs, call.n_tokens, call.n_outputs):
            classes.note_as_it_is(graph, point, fallback=not in_turn)
        for node, name in zip(graph.nodes, graph.names, strict=True):
            if node.empty or (in_turn and (node.op in OF_STREAMS or not is_alone(settings, call))):
                continue
            spec = node.spec()
            if spec not in known:
                known.add(spec)
                found.append(DerivedKernel(constant(spec), [point], name))
    return found


def both(one: Derived, other: Derived) -> Derived:
    """Returns what two models need that run together, each kernel once; its calls are those of the first."""
    known = {(entry.kernel, frozenset(entry.values)) for entry in one.graphs}
    graphs = [entry for entry in other.graphs if (entry.kernel, frozenset(entry.values)) not in known]
    entries = _absorb([*one.entries, *other.entries])
    return Derived(entries, one.calls, one.listed + other.listed, [*one.graphs, *graphs])


def as_they_are(graphs: Iterable[Graph], reasons: Reasons) -> list[DerivedKernel]:
    """Returns a kernel without formulas for each different node of graphs, each with the reason why it can't be built."""
    entries = list(_as_they_are(graphs, set()))
    for entry in entries:
        entry.reason = reasons.of_entry(entry)
    return entries


def _as_they_are(graphs: Iterable[Graph], known: set[KernelSpec]) -> Iterator[DerivedKernel]:
    """Yields a kernel without formulas for each different node of graphs, except for those that are known."""
    for graph in graphs:
        for node, name in zip(graph.nodes, graph.names, strict=True):
            spec = None if node.empty else node.spec()
            if spec is not None and spec not in known:
                known.add(spec)
                yield DerivedKernel(constant(spec), [{}], name)


def _with_first_cells(export: Export) -> Export:
    streams, first = Streams(), FirstCells()

    def graphs(calls: Sequence[DecodeCall]) -> Iterator[tuple[DecodeCall, Graph]]:
        for call, graph in export(calls):
            # Without flash attention strides have the length of the cache of values, so that of keys is whole, too.
            yield call, first.of(streams.of(graph)) if graph.context["flash_attn"] else graph

    return graphs


def _with_any_numbers(export: Export, settings: Settings) -> Export:
    any_numbers = AnyNumbers()

    def graphs(calls: Sequence[DecodeCall]) -> Iterator[tuple[DecodeCall, Graph]]:
        for call, graph in export(calls):
            # scales of adapters, and numbers of samplers, which follow the model in its graph
            yield call, any_numbers.of(graph) if settings.lora or call.samplers else graph

    return graphs


def _write_to_all(settings: Settings, entries: list[DerivedKernel]) -> None:
    """Adds writes to as many rows as the caches of all sequences have, each twice the number before."""
    caches = 1 if settings.kv_unified else settings.n_seq_max
    doubled = range(1, (caches - 1).bit_length() + 1)
    for entry in [entry for entry in entries if entry.kernel.op == "set_rows"]:
        if names := {"n_kv", "n_kv_swa"} & set(entry.kernel.names):
            (name,) = names
            longest = max(point[name] for point in entry.points)
            last = [point for point in entry.points if point[name] == longest]
            entry.points += [{**point, name: longest << i} for point in last for i in doubled]
            continue
        for spec in sorted(entry.specs(), key=lambda spec: spec.id):  # of one length
            width, rows, *_ = spec.output.ne
            if rows < settings.all_cells(settings.n_ctx[-1]):
                more = (TensorDesc.make((width, rows << i, 1, 1), spec.output.dtype) for i in doubled)
                kernels = (
                    KernelSpec.make(spec.op, [*spec.inputs[:-1], t], t, dict(spec.params), spec.alias) for t in more
                )
                entries += [DerivedKernel(constant(kernel), entry.points[:1], entry.name) for kernel in kernels]


def _absorb(entries: Sequence[DerivedKernel]) -> list[DerivedKernel]:
    """Returns entries without those that others stand for already, or would at further sizes.

    Graphs of one token may differ in their ops from graphs of many, and what both need is found twice: as a constant and as a
    formula, which then is right for both. Rows that are outputs pass through the same kernels as rows that are tokens.
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
    """Formulas of tokens before formulas of outputs."""
    return tuple(NAMES.index(name) for name in entry.kernel.names)


def _stands_for(other: DerivedKernel, entry: DerivedKernel, specs: set[KernelSpec]) -> bool:
    try:
        return {other.kernel.at(point) for point in entry.points} == specs
    except (KeyError, ValueError):  # a kernel that is listed has no sizes
        return False
