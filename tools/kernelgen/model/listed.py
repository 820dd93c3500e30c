"""Reads files that list kernels: exports of graphs, the backend's recordings, configurations of ggml-hsa-gen-kernels.

Several files give one list with each kernel once. Its order does not depend on the order of the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.model import graph_ops, hsa
from kernelgen.model.any_numbers import with_any_numbers
from kernelgen.model.derive import graph_kernels
from kernelgen.model.derived import Derived, DerivedKernel
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import Cut
from kernelgen.model.kernel_formulas import constant
from kernelgen.model.reasons import Reasons
from kernelgen.model.sources import Source, SourceKind
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import TARGETS


@dataclass(frozen=True, slots=True)
class ListedKernel:
    """A kernel of a list.

    Attributes:
        spec: the kernel.
        comment: the source's comment about it.
    """

    spec: KernelSpec
    comment: str


@dataclass(frozen=True, slots=True)
class KernelList:
    """The kernels of one source.

    Attributes:
        items: its kernels in its order, possibly with repeats.
        targets: the targets that it names.
        notes: messages about how the source was read.
        graphs: its graphs, for graph kernels.
        lnc: the physical cores per logical core that it names; 0 for the target's default.
    """

    items: tuple[ListedKernel, ...]
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    graphs: tuple[Graph, ...] = ()
    lnc: int = 0


def read(source: Source, catalog: Catalog) -> KernelList:
    """Reads a source.

    Raises:
        KernelgenError: the source has mistakes; the error lists each with its place.
    """
    if source.kind is SourceKind.GRAPHS:
        return _graphs(source.path)
    found, notes = hsa.read_kernels(source.path, catalog)
    return KernelList(tuple(ListedKernel(spec, name) for spec, name in found), notes=notes)


def merge(lists: Sequence[KernelList], catalog: Catalog, cut: Cut | None = None) -> Derived:
    """Returns the kernels of all lists, each once, and the graph kernels of the segments into which `cut` cuts their graphs."""
    reasons = Reasons(catalog)
    comments: dict[KernelSpec, str] = {}
    for item in (item for one in lists for item in one.items):
        comments[item.spec] = min(comments.get(item.spec, item.comment), item.comment)
    entries = [DerivedKernel(constant(s), [{}], comments[s], reasons.of_spec(s)) for s in sorted(comments, key=_order)]
    graphs = [graph for one in lists for graph in one.graphs] if cut is not None else []
    return Derived(entries, [], graphs=graph_kernels(graphs, cut, reasons) if cut is not None else [])


def targets(lists: Iterable[KernelList]) -> tuple[str, ...]:
    """Returns the targets that the sources name, in the order of TARGETS."""
    named = {name for one in lists for name in one.targets}
    return tuple(name for name in TARGETS if name in named)


def _order(spec: KernelSpec) -> tuple[object, ...]:
    tensors = [(t is not None, t and (t.dtype, t.ne, t.nb)) for t in (*spec.inputs, spec.output)]
    return spec.op, tensors, spec.params, -1 if spec.alias is None else spec.alias


def _graphs(path: Path) -> KernelList:
    """Returns the ops and the graphs of an export, or of what the backend recorded."""
    exported = graph_ops.read_described(path)
    if exported is None:
        return KernelList(tuple(ListedKernel(spec, name) for spec, _, name in graph_ops.read(path)))
    header, graphs = exported
    if any(graph.is_probe for graph in graphs):  # llama.cpp samples on the device, with numbers that its user chooses
        graphs = [with_any_numbers(graph) for graph in graphs]
    items: dict[KernelSpec, ListedKernel] = {}
    left_out = 0
    whole = []
    for graph in graphs:
        impossible = 0
        for node, name in zip(graph.nodes, graph.names, strict=True):
            if node.empty:
                continue
            try:
                spec = node.spec()
            except (TypeError, ValueError):
                impossible += 1
            else:
                items.setdefault(spec, ListedKernel(spec, name))
        left_out += impossible
        if not (impossible or graph.is_probe or graph.is_piece):
            whole.append(graph)
    if not items:
        raise KernelgenError(Diagnostic("no op in the graph export", Location(str(path), 1, 1)))
    notes = (f"{path}: left out {left_out} nodes that no kernel can compute",) if left_out else ()
    target = TARGETS.get(header.target)
    lnc = header.lnc if target is not None and header.lnc != target.lnc else 0
    return KernelList(tuple(items.values()), (target.name,) if target else (), notes, tuple(whole), lnc)
