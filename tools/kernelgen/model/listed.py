"""Reads files that list kernels: exports of graphs, the backend's records, configurations of ggml-hsa-gen-kernels.

Several files give one list with each kernel once. Its order does not depend on the order of the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelgen import fileio, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.manifest import document, kernels
from kernelgen.manifest.schema import Report
from kernelgen.model import graph_ops, hsa
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
        asked: how often the backend recorded it, if the source has that number.
        mistake: why a manifest can't have it, or None.
    """

    spec: KernelSpec
    comment: str
    asked: int = 0
    mistake: str | None = None


@dataclass(frozen=True, slots=True)
class KernelList:
    """The kernels of one source.

    Attributes:
        items: its kernels in its order, possibly with repeats.
        targets: the targets that it names.
        notes: messages about how the source was read.
        graphs: its graphs, for graph kernels.
    """

    items: tuple[ListedKernel, ...]
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    graphs: tuple[Graph, ...] = ()


def read(source: Source, catalog: Catalog, graphs: bool = False) -> KernelList:
    """Reads a source, and with `graphs` also its graphs.

    Raises:
        KernelgenError: the source has mistakes; the error lists each with its place.
    """
    if source.kind is SourceKind.GRAPHS:
        items = tuple(ListedKernel(spec, name) for spec, _, name in graph_ops.read(source.path))
        return KernelList(items, graphs=tuple(graph_ops.read_graphs(source.path)) if graphs else ())
    if source.kind is SourceKind.HSA:
        found = hsa.read(source.path, catalog)
        return KernelList(tuple(ListedKernel(kernel.spec, kernel.name) for kernel in found.kernels), notes=found.notes)
    return _manifest(source.path, catalog)


def merge(lists: Sequence[KernelList], catalog: Catalog, cut: Cut | None = None) -> Derived:
    """Returns the kernels of all lists, each once, and the graph kernels of the segments into which `cut` cuts their graphs."""
    reasons = Reasons(catalog)
    found: dict[KernelSpec, ListedKernel] = {}
    for item in (item for one in lists for item in one.items):
        known = found.get(item.spec)
        found[item.spec] = item if known is None else _both(known, item)
    items = sorted(found.values(), key=lambda item: _order(item.spec))
    entries = [DerivedKernel(constant(i.spec), [{}], _comment(i), i.mistake or reasons.of_spec(i.spec)) for i in items]
    graphs = [graph for one in lists for graph in one.graphs] if cut is not None else []
    return Derived(entries, [], graphs=graph_kernels(graphs, cut, reasons) if cut is not None else [])


def targets(lists: Iterable[KernelList]) -> tuple[str, ...]:
    """Returns the targets that the sources name, in the order of TARGETS."""
    named = {name for one in lists for name in one.targets}
    return tuple(name for name in TARGETS if name in named)


def _both(one: ListedKernel, other: ListedKernel) -> ListedKernel:
    return replace(one, comment=min(one.comment, other.comment), asked=one.asked + other.asked)


def _order(spec: KernelSpec) -> tuple[object, ...]:
    tensors = [(t is not None, t and (t.dtype, t.ne, t.nb)) for t in (*spec.inputs, spec.output)]
    return spec.op, tensors, spec.params, -1 if spec.alias is None else spec.alias


def _comment(item: ListedKernel) -> str:
    return f"asked for {item.asked} time{'' if item.asked == 1 else 's'}" if item.asked else item.comment


# --- the backend's records -----------------------------------------------------------------------------------------------------

# backend/ggml-neuron/report/record_ops.cpp writes these lines; an entry without a kernel is a comment.
_ENTRY = re.compile(r"  (?P<refused># )?- (?P<entry>\{op: .*\})  # asked for (?P<count>[0-9]{1,18}) times?")


def _manifest(path: Path, catalog: Catalog) -> KernelList:
    (request,) = manifest.load([path], catalog)
    data = fileio.read_input(path, document.MAX_BYTES)
    root = document.parse(data, str(path)).root
    assert root is not None
    for key in ("compiler", "graphs", "model"):
        if key in root.value:
            message = f"a manifest with '{key}' is not one that was recorded"
            raise KernelgenError(Diagnostic(message, root.value[key].key.location, "its kernels alone can be listed"))
    recorded = {k.spec: ListedKernel(k.spec, "") for k in request.kernels if isinstance(k.spec, KernelSpec)}
    left_out = 0
    for line in data.decode("utf-8-sig").splitlines():
        match = _ENTRY.fullmatch(line)
        if match is None:
            continue
        item = _recorded(match, catalog)
        if item is None:
            left_out += 1
            continue
        known = recorded.get(item.spec, item)
        recorded[item.spec] = replace(known, asked=known.asked + item.asked if known is not item else item.asked)
    notes = (f"{path}: left out {left_out} that have no elements or are not known",) if left_out else ()
    return KernelList(tuple(recorded.values()), tuple(config.target for config in request.configs), notes)


def _recorded(match: re.Match[str], catalog: Catalog) -> ListedKernel | None:
    """Returns a recorded kernel; None if no kernel can be like it."""
    root = document.parse(match["entry"].encode(), "").root
    try:
        value: Mapping[str, Any] = {"params": {}, "alias": None, **(root.plain() if root is not None else {})}
        spec = KernelSpec.from_json(value)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    mistake = None
    if match["refused"] and root is not None and spec.op in catalog.by_op:
        report = Report()
        kernels.expand(root, catalog, report)
        mistake = next((f"{spec.op}: {problem.message}" for problem in report.diagnostics), None)
    return ListedKernel(spec, "", int(match["count"]), mistake)
