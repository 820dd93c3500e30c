"""The output of `kernelgen coverage`: text, Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kernelgen.dispatch import coverage
from kernelgen.dispatch.coverage import Coverage, GraphOp, Row
from kernelgen.dispatch.report import CoverageReport, grouped_ops
from kernelgen.model import graph_ops
from kernelgen.model.graph_ops import GraphExport
from kernelgen.spec.kernel import KernelSpec


def _describe(spec: KernelSpec) -> str:
    inputs = ", ".join("-" if t is None else str(t) for t in spec.inputs)
    return f"{spec.op}: {inputs} -> {spec.output}"


def _nodes(graph: GraphExport) -> Counter[KernelSpec]:
    """Returns the number of nodes, over all graphs of an export, that each kernel computes."""
    found: Counter[KernelSpec] = Counter()
    for call in graph.calls:
        found.update(call.nodes)
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _lengths(row: Row) -> str:
    """Returns the lengths of the cache as text: `256`, `256 to 4096`."""
    return "" if not row.lengths else " to ".join(str(n) for n in dict.fromkeys((row.lengths[0], row.lengths[-1])))


def text(report: CoverageReport, verbose: bool) -> list[str]:
    """Returns the lines for a terminal; `verbose` also lists the kernels that no graph needs."""
    lines = []
    for graph, result in report.results:
        nodes, grouped = _nodes(graph), grouped_ops(graph)
        for op in result.covered:
            selection = report.selections.get(op.spec)
            how = "".join(f" + {n}" for _, n in selection.chunks) if selection is not None else ""
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
        for row in coverage.rows(graph.calls, report.selections):
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


def markdown(report: CoverageReport) -> list[str]:
    """Returns the lines of tables in Markdown."""
    lines = [
        "| graphs of | n_tokens | n_outputs | n_seqs | n_ctx | flash_attn | n_kv | graphs | nodes of each | with a kernel "
        "| without | launches | rows of padding |",
        "|---|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    grouped = any(call.groups is not None for graph, _ in report.results for call in graph.calls)
    if grouped:
        lines = [lines[0] + " nodes in groups | groups |", lines[1] + "--:|--:|"]
    for graph, _ in report.results:
        for row in coverage.rows(graph.calls, report.selections):
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
        for call in graph.calls:
            for why, ops in coverage.ops_outside(call).items():
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


def plain(report: CoverageReport) -> dict[str, Any]:
    """Returns the values for JSON."""
    return {
        "graphs": [
            {
                "file": graph.file,
                "covered": [_op_json(op) for op in result.covered],
                "missing": list(_missing_json(graph, result, report)),
                "steps": [
                    {
                        "line": call.line,
                        "sizes": dict(call.sizes),
                        "context": dict(call.context),
                        "nodes": sum(call.nodes.values()),
                        "covered": coverage.covered(call, report.selections),
                        "missing": {s.id: count for s, count in call.alone.items() if s not in report.selections},
                        **dict(zip(("launches", "padding"), coverage.launches(call, report.selections), strict=True)),
                    }
                    | _groups_json(call)
                    for call in graph.calls
                ],
            }
            for graph, result in report.results
        ],
        "beyond": [{"id": spec.id, "spec": json.loads(spec.json)} for spec in report.beyond],
    }


def _groups_json(call: graph_ops.GraphCall) -> dict[str, Any]:
    if call.groups is None:
        return {}
    outside = [
        {"why": why, "nodes": {spec.id: count for spec, count in nodes.items()}} for why, nodes in call.outside.items()
    ]
    return {"groups": {"launches": len(call.groups), "nodes": sum(call.groups), "outside": outside}}


def _missing_json(graph: GraphExport, result: Coverage, report: CoverageReport) -> Iterator[dict[str, Any]]:
    nodes = _nodes(graph)
    for op in result.missing:
        why = report.why[op.spec]
        yield {**_op_json(op), "nodes": nodes[op.spec], "kind": why.kind, "why": why.text, "nearest": why.nearest}


def _op_json(op: GraphOp) -> dict[str, Any]:
    return {"line": op.line, "name": op.name, "id": op.spec.id, "spec": json.loads(op.spec.json)}
