"""`kernelgen coverage`: the nodes of a model's graphs that have a kernel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.cli import coverage_printing, kernel_files, options, run_options
from kernelgen.dispatch.grouping import Groups
from kernelgen.dispatch.report import AvailableKernels
from kernelgen.dispatch.report import report as made_report
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.model import exporter, graph_ops
from kernelgen.model import sizes as model_sizes
from kernelgen.model.graph_ops import GraphExport
from kernelgen.model.sizes import Settings
from kernelgen.spec.kernel import GraphSpec, KernelSpec
from kernelgen.targets import TARGETS


@click.command(short_help="Show which nodes of a model's graphs have a kernel.")
@options.kernels_argument
@click.option(
    "--graph-ops",
    "exports",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=f"A file that llama.cpp's test-export-graph-ops or {exporter.PROGRAM} wrote for a model. May be given several times.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A model's GGUF file; llama.cpp computes its graphs, as for `kernelgen model`. May be given several times.",
)
@run_options.settings_options
@run_options.exporter_options
@click.option(
    "--target",
    type=click.Choice(list(TARGETS)),
    metavar="NAME",
    help="Count only the bundles for this target; leave out kernels of manifests that neuronx-cc is known to refuse for it.",
)
@options.kernels_option
@click.option(
    "--format", "output_format", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True
)
@click.option("-v", "--verbose", is_flag=True, help="List the kernels beyond the graphs too, not only their numbers.")
@click.pass_context
def command(
    context: click.Context,
    paths: tuple[Path, ...],
    exports: tuple[Path, ...],
    models: tuple[Path, ...],
    settings: Settings,
    program: Path | None,
    llama_cpp: Path | None,
    target: str | None,
    catalog: Catalog,
    output_format: str,
    verbose: bool,
) -> int:
    """Print which nodes of a model's graphs have a kernel, which have none and why, and which kernels no graph needs.

    Kernels for other numbers of tokens and longer caches also count, as in the backend.

    KERNELS are manifests, bundles (a pack, or a tree's folder) and folders of bundles. The options of a context are for --model.

    Exit status 1 when a node has no kernel.
    """
    if not exports and not models:
        raise click.UsageError("give --graph-ops or --model")
    if not models:
        run_options.refuse(context, "is for --model; an export names its own sizes")
    kernels = _available(paths, target, catalog)
    groups = Groups(kernels.groups)
    graphs = [graph_ops.read_export(path, groups) for path in exports]
    if models:
        graph_exporter = exporter.find(program, llama_cpp)
        graphs += [_of_model(path, settings, graph_exporter, groups) for path in models]
    report = made_report(graphs, kernels, catalog)
    if output_format == "json":
        click.echo(json.dumps(coverage_printing.plain(report), indent=1))
    else:
        lines = (
            coverage_printing.markdown(report)
            if output_format == "markdown"
            else coverage_printing.text(report, verbose)
        )
        click.echo("\n".join(lines))
    return EXIT_FAILED if any(result.missing for _, result in report.results) else EXIT_OK


def _available(paths: Sequence[Path], target: str | None, catalog: Catalog) -> AvailableKernels:
    """Returns the kernels of manifests and bundles, for one target if there is one."""
    manifests, found = kernel_files.manifests_and_bundles(paths)
    bundles = [(bundle.origin.target, bundle.specs()) for bundle in found]
    targets = list(dict.fromkeys(of for of, _ in bundles))
    if target is None and len(targets) > 1:
        raise KernelgenError(f"the bundles are for {', '.join(targets)}: choose one with --target")
    if target is not None and bundles and target not in targets:
        raise KernelgenError(f"--target {target}: the bundles are for {', '.join(targets)}")
    requests = options.only_targets(manifest.load(manifests, catalog), [target] if target else [])
    built = [spec for of, specs in bundles if target in (None, of) for spec in specs]
    requested = [kernel.spec for request in requests for kernel in request.kernels]
    # Graphs have weights in ggml's form; the backend handles kernels' layouts.
    compiled = frozenset(spec.without_layouts for spec in built if isinstance(spec, KernelSpec))
    planned = frozenset(spec.without_layouts for spec in requested if isinstance(spec, KernelSpec))
    groups = frozenset(spec.without_layouts for spec in (*built, *requested) if isinstance(spec, GraphSpec))
    return AvailableKernels(compiled | planned, compiled, target or (targets[0] if targets else None), groups)


def _of_model(path: Path, settings: Settings, graph_exporter: exporter.Exporter, groups: Groups) -> GraphExport:
    """Returns every graph that a run with these settings can encounter."""
    collector = graph_ops.Collector(str(path), groups)
    calls = [
        call
        for n_seqs in range(1, settings.n_seq_max + 1)
        for call in dict.fromkeys(model_sizes.requested_calls(settings, n_seqs))
    ]
    for number, (_, _, graph) in enumerate(graph_exporter.graphs(path, settings, calls), 1):
        collector.add(graph, number)
    return collector.export()
