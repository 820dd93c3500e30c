"""`kernelgen coverage`: which nodes of a model's graphs have a kernel."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kernelgen import manifest
from kernelgen.cli import options, run_options
from kernelgen.dispatch import coverage, lengths
from kernelgen.dispatch.coverage import Coverage, GraphOp, Row
from kernelgen.dispatch.grouping import Groups
from kernelgen.dispatch.lengths import Served
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.ggml import model_files, tokens
from kernelgen.model import exporter, graph_ops
from kernelgen.model import sizes as model_sizes
from kernelgen.model.derive import Reasons
from kernelgen.model.graph_ops import GraphExport
from kernelgen.model.sizes import Settings
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import KernelSpec, spec_json
from kernelgen.targets import TARGETS


@click.command(short_help="Say which nodes of a model's graphs have a kernel.")
@click.argument("held", nargs=-1, required=True, metavar="HELD...", type=click.Path(path_type=Path))
@click.option(
    "--graph-ops",
    "exports",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"What llama.cpp's test-export-graph-ops or {exporter.PROGRAM} writes for a model. May be given several times.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A model's GGUF file: its graphs, as `kernelgen model` asks llama.cpp for them. May be given several times.",
)
@run_options.settings_options
@run_options.exporter_options
@click.option(
    "--target",
    type=click.Choice(list(TARGETS)),
    metavar="NAME",
    help="Count bundles for this target alone, and of manifests only what neuronx-cc is not known to refuse for it.",
)
@options.kernels_option
@click.option("--format", "form", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="List the kernels beyond the graphs too, not only their numbers.")
@click.pass_context
def command(
    context: click.Context,
    held: tuple[Path, ...],
    exports: tuple[Path, ...],
    models: tuple[Path, ...],
    settings: Settings,
    program: Path | None,
    llama_cpp: Path | None,
    target: str | None,
    catalog: Catalog,
    form: str,
    verbose: bool,
) -> int:
    """Print which nodes of a model's graphs have a kernel, which have none and why, and what is held beyond.

    A node is computed, too, by kernels for other numbers of tokens and longer caches, as the backend does it.

    HELD are manifests, bundles (a pack, or a tree's folder) and folders of bundles. The options of a context are for --model.

    Exit status 1 when a node has no kernel.
    """
    if not exports and not models:
        raise click.UsageError("give --graph-ops or --model")
    if not models:
        _refuse_run_options(context)
    kernels = _held(held, target, catalog)
    groups = Groups(kernels.groups)
    graphs = [graph_ops.read_export(path, groups) for path in exports]
    if models:
        asked = exporter.find(program, llama_cpp)
        graphs += [_of_model(path, settings, asked, groups) for path in models]
    refusals = _Refusals(catalog, kernels)
    missing_of_manifests = refusals.of_manifests(graphs)
    have = kernels.specs - missing_of_manifests
    report = _report(graphs, have, _Why(catalog, have, refusals))
    if form == "json":
        click.echo(json.dumps(_json(report), indent=1))
    else:
        click.echo("\n".join(_markdown(report) if form == "markdown" else _text(report, verbose)))
    return EXIT_FAILED if any(result.missing for _, result in report.results) else EXIT_OK


def _refuse_run_options(context: click.Context) -> None:
    """Refuses options that mean nothing without a model."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name in run_options.NAMES:
            raise click.UsageError(f"{parameter.opts[0]} is for --model; what exports hold is said by them")


# --- what there is -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Held:
    """Kernels that there are.

    Attributes:
        specs: all of them.
        compiled: those of bundles.
        target: that they are for, where one is known.
        groups: graph kernels.
    """

    specs: frozenset[KernelSpec]
    compiled: frozenset[KernelSpec]
    target: str | None
    groups: frozenset[GraphSpec] = frozenset()


def _held(paths: Sequence[Path], target: str | None, catalog: Catalog) -> _Held:
    from kernelgen.bundle import reader

    manifests = []
    bundles: list[reader.BundleContents] = []
    for path in paths:
        model = model_files.recognize(path, "manifest", packs=True)
        if model is not None:
            raise KernelgenError(model)
        if reader.is_bundle(path):
            bundles += reader.read(path)
        else:
            manifests.append(path)
    targets = list(dict.fromkeys(bundle.target for bundle in bundles))
    if target is None and len(targets) > 1:
        raise KernelgenError(f"the bundles are for {', '.join(targets)}: choose one with --target")
    if target is not None and bundles and target not in targets:
        raise KernelgenError(f"--target {target}: the bundles are for {', '.join(targets)}")
    requests = options.only_targets(manifest.load(manifests, catalog), [target] if target else [])
    # Graphs have weights as ggml has them; which form a kernel wants them in, the backend sees to.
    compiled = frozenset(spec.without_forms for b in bundles if target in (None, b.target) for spec in b.specs)
    asked = {k.spec.without_forms for request in requests for k in request.kernels if isinstance(k.spec, KernelSpec)}
    groups = {k.spec.without_forms for request in requests for k in request.kernels if isinstance(k.spec, GraphSpec)}
    groups.update(spec.without_forms for b in bundles if target in (None, b.target) for spec in b.groups)
    return _Held(compiled | asked, compiled, target or (targets[0] if targets else None), frozenset(groups))


def _of_model(path: Path, settings: Settings, asked: exporter.Exporter, groups: Groups) -> GraphExport:
    """Returns every graph that a run with these settings can meet."""
    collector = graph_ops.Collector(str(path), groups)
    calls = [
        call
        for n_seqs in range(1, settings.n_seq_max + 1)
        for call in dict.fromkeys(model_sizes.asked(settings, n_seqs))
    ]
    for number, (_, _, graph) in enumerate(asked.graphs(path, settings, calls), 1):
        collector.add(graph, number)
    return collector.export()


# --- why there is none -------------------------------------------------------------------------------------------------------


class _Refusals:
    """Says which kernels neuronx-cc is known to refuse for the target that kernels are for; nothing when there is none."""

    def __init__(self, catalog: Catalog, held: _Held) -> None:
        self._catalog = catalog
        self._held = held
        self._known: dict[KernelSpec, str | None] = {}

    def of(self, spec: KernelSpec) -> str | None:
        """Returns what is refused in a kernel, or that it can't be emitted; None when nothing is."""
        if self._held.target is None:
            return None
        if spec not in self._known:
            self._known[spec] = self._ask(spec, self._held.target)
        return self._known[spec]

    def of_manifests(self, graphs: Sequence[GraphExport]) -> frozenset[KernelSpec]:
        """Returns the kernels that graphs need and manifests name, and that are refused. Those of bundles were compiled."""
        needed = {spec for graph in graphs for spec, _, _ in graph.ops}
        named = (needed & self._held.specs) - self._held.compiled
        return frozenset(spec for spec in named if self.of(spec) is not None)

    def _ask(self, spec: KernelSpec, target: str) -> str | None:
        from kernelgen.compilers.base import refuse_unsupported
        from kernelgen.lowering import emission

        try:
            emitters = self._catalog.emitters(self._catalog.kernel(spec))
            with contextlib.redirect_stdout(sys.stderr):  # what an emitter prints
                made = emission.emit(emitters, spec)
            refuse_unsupported(made.hlo, target, spec.id)
        except KernelgenError as error:
            said = error.diagnostics[0].message.removeprefix(f"kernel {spec.id} for {target}: ")
            return f"refused for {target}: {said}"
        return None


@dataclass(frozen=True)
class _Reason:
    """Why a node has no kernel.

    Attributes:
        kind: `no emitter`, `refused`, `other shapes` or `none of this op`.
        text: in words.
        nearest: id of the kernel that comes nearest.
    """

    kind: str
    text: str
    nearest: str | None = None


class _Why:
    """Says why there is no kernel."""

    def __init__(self, catalog: Catalog, held: frozenset[KernelSpec], refusals: _Refusals) -> None:
        self._reasons = Reasons(catalog)
        self._held = held
        self._refusals = refusals

    def of(self, missing: Sequence[GraphOp]) -> dict[KernelSpec, _Reason]:
        """Returns the reason for each op."""
        near = coverage.nearest(missing, self._held)
        return {op.spec: self._of(op.spec, near) for op in missing}

    def _of(self, spec: KernelSpec, near: Mapping[KernelSpec, tuple[KernelSpec, list[str]]]) -> _Reason:
        impossible = self._reasons.of_spec(spec)
        if impossible is not None:
            return _Reason("no emitter", impossible)
        refused = self._refusals.of(spec)
        if refused is not None:
            return _Reason("refused", f"{spec.op}: {refused}")
        if spec not in near:
            return _Reason("none of this op", f"there is no kernel for {spec.op}")
        other, parts = near[spec]
        whole = tokens.why_not(spec.op, spec.inputs, spec.output)
        more = f"; kernels for other numbers of tokens can't: {whole}" if whole else ""
        return _Reason("other shapes", f"nearest is {other.id}: {'; '.join(parts)}{more}", other.id)


# --- what is said ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Report:
    """What is covered.

    Attributes:
        results: each export, and what is covered of its ops.
        served: how each op is computed that is.
        why: the reason for each op without a kernel.
        beyond: kernels that no graph needs.
    """

    results: tuple[tuple[GraphExport, Coverage], ...]
    served: Mapping[KernelSpec, Served]
    why: Mapping[KernelSpec, _Reason]
    beyond: tuple[KernelSpec, ...]


def _report(graphs: Sequence[GraphExport], held: frozenset[KernelSpec], why: _Why) -> _Report:
    index = lengths.LengthIndex.of(held)
    served = {
        spec: how
        for spec in dict.fromkeys(spec for graph in graphs for spec, _, _ in graph.ops)
        if (how := index.serve(spec)) is not None
    }
    results = tuple((graph, coverage.compare(held, graph.ops, served, _grouped(graph))) for graph in graphs)
    reasons = why.of([op for _, result in results for op in result.missing])
    beyond = coverage.compare(held, [op for graph in graphs for op in graph.ops], served).beyond
    return _Report(results, served, reasons, beyond)


def _grouped(graph: GraphExport) -> frozenset[KernelSpec]:
    """Returns the ops all of whose nodes are in groups."""
    return frozenset(spec for spec, _, _ in graph.ops) - {spec for step in graph.steps for spec in step.alone}


def _describe(spec: KernelSpec) -> str:
    inputs = ", ".join("-" if t is None else str(t) for t in spec.inputs)
    return f"{spec.op}: {inputs} -> {spec.output}"


def _nodes(graph: GraphExport) -> Counter[KernelSpec]:
    """Returns how many nodes of all graphs of an export each kernel computes."""
    found: Counter[KernelSpec] = Counter()
    for step in graph.steps:
        found.update(step.nodes)
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _lengths(row: Row) -> str:
    """Returns the lengths of the cache in words: `256`, `256 to 4096`."""
    return "" if not row.lengths else " to ".join(str(n) for n in dict.fromkeys((row.lengths[0], row.lengths[-1])))


def _text(report: _Report, verbose: bool) -> list[str]:
    lines = []
    for graph, result in report.results:
        nodes, grouped = _nodes(graph), _grouped(graph)
        for op in result.covered:
            served = report.served.get(op.spec)
            how = "".join(f" + {n}" for _, n in served.pieces) if served is not None else ""
            by = f", by kernels for {how[3:]} tokens" if how else ""
            by = ", in groups" if op.spec in grouped else by
            lines.append(f"covered  {graph.file}:{op.line}: {op.name}: {_describe(op.spec)}{by}")
        for op in result.missing:
            count = f" ({_counted(nodes[op.spec], 'node')})" if nodes[op.spec] > 1 else ""
            lines.append(f"missing  {graph.file}:{op.line}: {op.name}: {_describe(op.spec)}{count}")
            lines.append(f"             {report.why[op.spec].text}")
    if verbose:
        lines += [f"beyond   {spec.id}: {_describe(spec)}" for spec in report.beyond]
    for graph, result in report.results:
        for row in coverage.rows(graph.steps, report.served):
            if row.sizes or row.groups is not None:
                title = f": {_title(row)}" if row.sizes else ""
                lines.append(f"{graph.file}{title}: {_counts(row)}")
            for why, ops in row.outside.items():
                listed = ", ".join(f"{count} {op}" for op, count in ops.items())
                lines.append(f"             in no group: {listed}: {why}")
        total = len(result.covered) + len(result.missing)
        lines.append(f"{graph.file}: {len(result.covered)} of {total} ops covered, {len(result.missing)} missing")
    counts = Counter(spec.op for spec in report.beyond)
    listed = f": {', '.join(f'{count} {op}' for op, count in sorted(counts.items()))}" if counts else ""
    lines.append(f"{len(report.beyond)} kernels beyond{listed}")
    return lines


def _title(row: Row) -> str:
    shown = [f"{name} {value}" for name, value in row.sizes.items() if (name, value) != ("n_seqs", 1)]
    if row.lengths:
        shown.append(f"n_kv {_lengths(row)}")
    return ", ".join(shown)


def _counts(row: Row) -> str:
    without = row.nodes - row.covered
    of = f"{_counted(row.graphs, 'graph')} of {_counted(row.nodes, 'node')}"
    more = (
        f", {row.launches} launches, {row.padding} rows of padding"
        if row.padding or row.launches != row.covered
        else ""
    )
    groups = f", {_counted(row.grouped, 'node')} in {_counted(row.groups, 'group')}" if row.groups is not None else ""
    return f"{of}, {without or 'none'} without a kernel{more}{groups}"


_COLUMNS = ("n_tokens", "n_outputs", "n_seqs", "n_ctx", "flash_attn")


def _markdown(report: _Report) -> list[str]:
    lines = [
        "| graphs of | n_tokens | n_outputs | n_seqs | n_ctx | flash_attn | n_kv | graphs | nodes of each | with a kernel "
        "| without | launches | rows of padding |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    grouped = any(step.groups is not None for graph, _ in report.results for step in graph.steps)
    if grouped:
        lines = [lines[0] + " nodes in groups | groups |", lines[1] + "--:|--:|"]
    for graph, _ in report.results:
        for row in coverage.rows(graph.steps, report.served):
            cells: list[object] = [_cell(graph.file), *(row.sizes.get(name, "") for name in _COLUMNS), _lengths(row)]
            cells += [row.graphs if row.sizes else "", row.nodes, row.covered, row.nodes - row.covered]
            cells += [row.launches, row.padding, *([row.grouped, row.groups or 0] if grouped else [])]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    nodes: Counter[tuple[str, str]] = Counter()
    for graph, result in report.results:
        total = _nodes(graph)
        for op in result.missing:
            nodes[op.spec.op, report.why[op.spec].text] += total[op.spec]
    outside: Counter[tuple[str, str]] = Counter()
    for graph, _ in report.results:
        for step in graph.steps:
            for why, ops in coverage.ops_outside(step).items():
                outside.update({(op, why): count for op, count in ops.items()})
    if outside:
        lines += ["", "| op | nodes | why they are in no group |", "|---|--:|---|"]
        lines += [f"| {op} | {count} | {why} |" for (op, why), count in sorted(outside.items())]
    if nodes:
        lines += ["", "| op | nodes | why there is no kernel |", "|---|--:|---|"]
        lines += [f"| {op} | {count} | {_cell(text)} |" for (op, text), count in sorted(nodes.items())]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _json(report: _Report) -> dict[str, Any]:
    return {
        "graphs": [
            {
                "file": graph.file,
                "covered": [_op_json(op) for op in result.covered],
                "missing": list(_missing_json(graph, result, report)),
                "steps": [
                    {
                        "line": step.line,
                        "sizes": dict(step.sizes),
                        "context": dict(step.context),
                        "nodes": sum(step.nodes.values()),
                        "covered": coverage.covered(step, report.served),
                        "missing": {s.id: count for s, count in step.alone.items() if s not in report.served},
                        **dict(zip(("launches", "padding"), coverage.launches(step, report.served), strict=True)),
                    }
                    | _groups_json(step)
                    for step in graph.steps
                ],
            }
            for graph, result in report.results
        ],
        "beyond": [{"id": spec.id, "spec": json.loads(spec_json(spec))} for spec in report.beyond],
    }


def _groups_json(step: graph_ops.GraphCall) -> dict[str, Any]:
    if step.groups is None:
        return {}
    outside = [
        {"why": why, "nodes": {spec.id: count for spec, count in nodes.items()}} for why, nodes in step.outside.items()
    ]
    return {"groups": {"launches": len(step.groups), "nodes": sum(step.groups), "outside": outside}}


def _missing_json(graph: GraphExport, result: Coverage, report: _Report) -> Iterator[dict[str, Any]]:
    nodes = _nodes(graph)
    for op in result.missing:
        why = report.why[op.spec]
        yield {**_op_json(op), "nodes": nodes[op.spec], "kind": why.kind, "why": why.text, "nearest": why.nearest}


def _op_json(op: GraphOp) -> dict[str, Any]:
    return {"line": op.line, "name": op.name, "id": op.spec.id, "spec": json.loads(spec_json(op.spec))}
