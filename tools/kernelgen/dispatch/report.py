"""Reports the nodes of models' graphs that have a kernel, and why the others have none: `kernelgen coverage` prints it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelgen.dispatch import costs, coverage, lengths
from kernelgen.dispatch.coverage import Coverage, GraphOp
from kernelgen.dispatch.lengths import Selection
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError
from kernelgen.ggml import tokens
from kernelgen.model.graph_ops import GraphExport
from kernelgen.model.reasons import Reasons
from kernelgen.spec.kernel import GraphSpec, KernelSpec


@dataclass(frozen=True)
class AvailableKernels:
    """Kernels available to a run.

    Attributes:
        specs: all of them.
        compiled: the kernels in bundles.
        target: their target, if there is one.
        groups: graph kernels.
    """

    specs: frozenset[KernelSpec]
    compiled: frozenset[KernelSpec]
    target: str | None
    groups: frozenset[GraphSpec] = frozenset()


class Refusals:
    """Finds kernels that neuronx-cc is known to refuse for a target; finds none without a target."""

    def __init__(self, catalog: Catalog, available: AvailableKernels) -> None:
        self._catalog = catalog
        self._available = available
        self._known: dict[KernelSpec, str | None] = {}

    def of(self, spec: KernelSpec) -> str | None:
        """Returns the lint's errors in a kernel, or that it can't be emitted; None if there are none."""
        if self._available.target is None:
            return None
        if spec not in self._known:
            self._known[spec] = self._ask(spec, self._available.target)
        return self._known[spec]

    def of_manifests(self, graphs: Sequence[GraphExport]) -> frozenset[KernelSpec]:
        """Returns the refused kernels that graphs need and manifests name. Kernels in bundles were compiled."""
        needed = {spec for graph in graphs for spec, _, _ in graph.ops}
        named = (needed & self._available.specs) - self._available.compiled
        return frozenset(spec for spec in named if self.of(spec) is not None)

    def _ask(self, spec: KernelSpec, target: str) -> str | None:
        # Only with a target, so that a report without one imports no JAX.
        from kernelgen.compilers.base import refuse_unsupported
        from kernelgen.compilers.settings import CompileConfig
        from kernelgen.lowering import emission

        try:
            emitters = self._catalog.emitters(self._catalog.kernel(spec))
            with contextlib.redirect_stdout(sys.stderr):  # an emitter's output
                made = emission.emit(emitters, spec)
            refuse_unsupported(made.hlo, CompileConfig.make(target), spec.id)
        except KernelgenError as error:
            said = error.diagnostics[0].message.removeprefix(f"kernel {spec.id} for {target}: ")
            return f"refused for {target}: {said}"
        return None


@dataclass(frozen=True)
class MissingReason:
    """The reason why a node has no kernel.

    Attributes:
        kind: `no emitter`, `refused`, `other shapes` or `none of this op`.
        text: the reason in words.
        nearest: id of the nearest kernel.
    """

    kind: str
    text: str
    nearest: str | None = None


class ReasonFinder:
    """Finds the reason for each missing kernel."""

    def __init__(self, catalog: Catalog, kernels: frozenset[KernelSpec], refusals: Refusals) -> None:
        self._reasons = Reasons(catalog)
        self._kernels = kernels
        self._refusals = refusals

    def of(self, missing: Sequence[GraphOp]) -> dict[KernelSpec, MissingReason]:
        """Returns the reason for each op."""
        near = coverage.nearest(missing, self._kernels)
        return {op.spec: self._of(op.spec, near) for op in missing}

    def _of(self, spec: KernelSpec, near: Mapping[KernelSpec, tuple[KernelSpec, list[str]]]) -> MissingReason:
        impossible = self._reasons.of_spec(spec)
        if impossible is not None:
            return MissingReason("no emitter", impossible)
        refused = self._refusals.of(spec)
        if refused is not None:
            return MissingReason("refused", f"{spec.op}: {refused}")
        if spec not in near:
            return MissingReason("none of this op", f"there is no kernel for {spec.op}")
        other, parts = near[spec]
        whole = tokens.why_not(spec.op, spec.inputs, spec.output)
        more = f"; kernels for other numbers of tokens can't: {whole}" if whole else ""
        return MissingReason("other shapes", f"nearest is {other.id}: {'; '.join(parts)}{more}", other.id)


@dataclass(frozen=True)
class CoverageReport:
    """The results of a coverage report.

    Attributes:
        results: each export, with the coverage of its ops.
        selections: the computation of each computed op.
        why: the reason for each op without a kernel.
        beyond: kernels that no graph needs.
    """

    results: tuple[tuple[GraphExport, Coverage], ...]
    selections: Mapping[KernelSpec, Selection]
    why: Mapping[KernelSpec, MissingReason]
    beyond: tuple[KernelSpec, ...]


def report(graphs: Sequence[GraphExport], available: AvailableKernels, catalog: Catalog) -> CoverageReport:
    """Returns the coverage of graphs. A manifest's kernel that neuronx-cc is known to refuse covers nothing."""
    refusals = Refusals(catalog, available)
    kernels = available.specs - refusals.of_manifests(graphs)
    why = ReasonFinder(catalog, kernels, refusals)
    index = lengths.LengthIndex.of(kernels, costs.builtin(available.target or "trn1"))
    selections = {
        spec: how
        for spec in dict.fromkeys(spec for graph in graphs for spec, _, _ in graph.ops)
        if (how := index.select(spec)) is not None
    }
    results = tuple((graph, coverage.compare(kernels, graph.ops, selections, grouped_ops(graph))) for graph in graphs)
    reasons = why.of([op for _, result in results for op in result.missing])
    beyond = coverage.compare(kernels, [op for graph in graphs for op in graph.ops], selections).beyond
    return CoverageReport(results, selections, reasons, beyond)


def grouped_ops(graph: GraphExport) -> frozenset[KernelSpec]:
    """Returns the ops whose nodes are all in groups."""
    return frozenset(spec for spec, _, _ in graph.ops) - {spec for call in graph.calls for spec in call.alone}
