"""`kernelgen coverage`: which ops of a llama.cpp graph have a kernel."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK
from kernelgen.kernel import KernelSpec, spec_json
from kernelgen.manifest import coverage, graph_ops
from kernelgen.manifest.coverage import Coverage, GraphOp


@click.command(short_help="Compare a manifest with the ops of a llama.cpp graph.")
@options.manifests_argument
@click.option(
    "--graph-ops",
    "exports",
    required=True,
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="What llama.cpp's test-export-graph-ops writes for a model. May be given several times.",
)
@options.kernels_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="List the kernels beyond the graph too, not only their numbers.")
def command(manifests: tuple[Path, ...], exports: tuple[Path, ...], catalog: Catalog, form: str, verbose: bool) -> int:
    """Print which ops of a model's graphs the manifests cover, which they miss, and what they hold beyond.

    Exit status 1 when an op is missed.
    """
    requests = manifest.load(manifests, catalog)
    kernels = [kernel.spec for request in requests for kernel in request.kernels]
    graph = []
    results = []
    for path in exports:
        ops = graph_ops.read(path)
        graph += ops
        results.append((str(path), coverage.compare(kernels, ops)))
    beyond = coverage.compare(kernels, graph).beyond
    if form == "json":
        click.echo(json.dumps(_json(results, kernels, beyond), indent=1))
    else:
        click.echo("\n".join(_text(results, kernels, beyond, verbose)))
    return EXIT_FAILED if any(result.missing for _, result in results) else EXIT_OK


def _describe(spec: KernelSpec) -> str:
    inputs = ", ".join("-" if t is None else str(t) for t in spec.inputs)
    return f"{spec.op}: {inputs} -> {spec.output}"


def _text(
    results: list[tuple[str, Coverage]], kernels: list[KernelSpec], beyond: tuple[KernelSpec, ...], verbose: bool
) -> list[str]:
    lines = []
    for path, result in results:
        near = coverage.nearest(result.missing, kernels)
        for op in result.covered:
            lines.append(f"covered  {path}:{op.line}: {op.name}: {_describe(op.spec)}")
        for op in result.missing:
            lines.append(f"missing  {path}:{op.line}: {op.name}: {_describe(op.spec)}")
            lines.append(f"             {_near(op, near)}")
    if verbose:
        lines += [f"beyond   {spec.id}: {_describe(spec)}" for spec in beyond]
    for path, result in results:
        total = len(result.covered) + len(result.missing)
        lines.append(f"{path}: {len(result.covered)} of {total} ops covered, {len(result.missing)} missing")
    counts = Counter(spec.op for spec in beyond)
    listed = f": {', '.join(f'{count} {op}' for op, count in sorted(counts.items()))}" if counts else ""
    lines.append(f"{len(beyond)} kernels beyond{listed}")
    return lines


def _near(op: GraphOp, near: dict[KernelSpec, tuple[KernelSpec, list[str]]]) -> str:
    if op.spec not in near:
        return f"there is no kernel for {op.spec.op}"
    other, parts = near[op.spec]
    return f"nearest is {other.id}: {'; '.join(parts)}"


def _json(
    results: list[tuple[str, Coverage]], kernels: list[KernelSpec], beyond: tuple[KernelSpec, ...]
) -> dict[str, Any]:
    files = []
    for path, result in results:
        near = coverage.nearest(result.missing, kernels)
        files.append(
            {
                "file": path,
                "covered": [_op_json(op) for op in result.covered],
                "missing": [
                    {**_op_json(op), "nearest": near[op.spec][0].id if op.spec in near else None}
                    for op in result.missing
                ],
            }
        )
    return {"graphs": files, "beyond": [{"id": spec.id, "spec": json.loads(spec_json(spec))} for spec in beyond]}


def _op_json(op: GraphOp) -> dict[str, Any]:
    return {"line": op.line, "name": op.name, "id": op.spec.id, "spec": json.loads(spec_json(op.spec))}
