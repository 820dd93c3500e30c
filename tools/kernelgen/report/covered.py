"""The nodes of a model's calls that have a kernel, short enough for a page."""

from __future__ import annotations

from typing import Any

from kernelgen.dispatch import coverage
from kernelgen.dispatch.report import CoverageReport


def plain(report: CoverageReport) -> list[dict[str, Any]]:
    """Returns for each export the number of ops with a kernel, its calls by size, and the reason for each op without one."""
    return [
        {
            "covered": len(result.covered),
            "ops": len(result.covered) + len(result.missing),
            "rows": [_row(row) for row in coverage.rows(graph.calls, report.selections)],
            "missing": [{"op": op.spec.op, "id": op.spec.id, "why": report.why[op.spec].text} for op in result.missing],
        }
        for graph, result in report.results
    ]


def _row(row: coverage.Row) -> dict[str, Any]:
    lengths = " to ".join(str(n) for n in dict.fromkeys((row.lengths[0], row.lengths[-1]))) if row.lengths else ""
    return {
        "title": f"n_tokens {row.sizes.get('n_tokens', '')}, n_kv {lengths}",
        "nodes": row.nodes,
        "fused": row.grouped,
        "single": row.covered - row.grouped,
        "cpu": row.nodes - row.covered,
    }
