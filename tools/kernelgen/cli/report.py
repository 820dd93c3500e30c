"""`kernelgen report`: one page about a model's kernels, and the same numbers as JSON and CSV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kernelgen import fileio
from kernelgen.bundle import reader
from kernelgen.cli import forecast, options, run_options
from kernelgen.dispatch import chips
from kernelgen.dispatch.grouping import Groups
from kernelgen.dispatch.report import AvailableKernels
from kernelgen.dispatch.report import report as coverage_report
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.forecast.call import CallForecast
from kernelgen.forecast.kernels import Kernels
from kernelgen.model import exporter, graph_ops
from kernelgen.model.sizes import DecodeCall, Settings, pad
from kernelgen.report import baseline as baselines
from kernelgen.report import covered
from kernelgen.report.numbers import Asked, collect
from kernelgen.report.page import page, table
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import KernelSpec
from kernelgen.targets import TARGETS

N_KV = (256, 1024, 4096, 16384)
"""Cells of the cache that a token is forecast with, as far as the context has them."""
CELLS = 1024
"""Cells of the cache that the token and the prompt have which the table counts."""
CORES = (1, 2, 4)


@click.command(short_help="Write a page about a model's kernels.")
@click.argument("paths", nargs=-1, required=True, metavar="KERNELS...", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "model",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's GGUF file, or its header alone: its graphs say how often a call launches each kernel.",
)
@run_options.settings_options
@run_options.exporter_options
@click.option(
    "--target", type=click.Choice(list(TARGETS)), metavar="NAME", help="The target; that of bundles, or trn1."
)
@click.option("--lnc", type=click.Choice(["1", "2"]), help="Physical cores of a logical one; the target's by default.")
@click.option(
    "--measured",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="CSV with the columns kernel and us: what a launch of a kernel takes, as you measured it.",
)
@click.option(
    "--baseline",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The JSON of an earlier report: the page shows what differs.",
)
@click.option(
    "--threshold",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Percent by which a time may be above the baseline's.",
)
@options.kernels_option
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    default=Path("report.html"),
    show_default=True,
    help="The page; the JSON and the CSV are written beside it.",
)
def command(
    paths: tuple[Path, ...],
    model: Path | None,
    settings: Settings,
    program: Path | None,
    llama_cpp: Path | None,
    target: str | None,
    lnc: str | None,
    measured: Path | None,
    baseline: Path | None,
    threshold: float,
    catalog: Catalog,
    output: Path,
) -> int:
    """Write a page with what kernels compute and move, and how long calls of a model take by the forecast.

    KERNELS are manifests, bundles (a pack, or a tree's folder) and folders of bundles. The page needs no other file and no network.

    Exit status 1 when a time is above that of --baseline by more than --threshold.
    """
    if output.suffix != ".html":
        raise KernelgenError(f"-o {output}: expected a name that ends in .html; the JSON and the CSV get the same name")
    before = baselines.read(baseline) if baseline else None
    times = baselines.read_measured(measured) if measured else {}
    kernels, name = forecast.kernels_of(paths, target, catalog)
    chip = forecast.chip_of(name, lnc)
    known = {kernel.id for kernel in kernels.by_graph.values()}
    if unknown := sorted(times.keys() - known):
        click.echo(f"warning: {measured}: no kernel here is {unknown[0]} (and {len(unknown) - 1} more)", err=True)
    asked = _Calls(settings, kernels, chip, catalog)
    if model is not None:
        asked.ask(model, exporter.find(program, llama_cpp))
    numbers = collect(
        Asked(
            names=[path.name for path in paths],
            chip=chip,
            model=asked.model,
            settings=asked.settings,
            calls=asked.calls,
            by_cache=asked.by_cache,
            by_cores=asked.by_cores,
            coverage=asked.coverage,
            stored=[
                stored
                for path in paths
                if reader.is_bundle(path)
                for stored in reader.read(path)
                if stored.origin.target == name
            ],
            measured=times,
        ),
        kernels,
    )
    forecast.print_refusals(kernels)
    differs = None if before is None else baselines.differences(before, numbers, threshold / 100)
    fileio.write_bytes(output, page(numbers, differs).encode())
    fileio.write_bytes(output.with_suffix(".json"), (json.dumps(numbers, indent=1) + "\n").encode())
    fileio.write_bytes(output.with_suffix(".csv"), table(numbers).encode())
    click.echo(f"{output}, {output.with_suffix('.json').name}, {output.with_suffix('.csv').name}: {len(known)} kernels")
    regressions = [one for one in differs or () if one["regression"]]
    for one in regressions:
        click.echo(
            f"regression: {one['name']}: {one['column']} {one['before']:.4g} before, {one['now']:.4g} now", err=True
        )
    return EXIT_FAILED if regressions else EXIT_OK


class _Calls:
    """The calls of a model that a report is about; empty until `ask`."""

    def __init__(self, settings: Settings, kernels: Kernels, chip: chips.Chip, catalog: Catalog) -> None:
        self._settings = settings
        self._kernels = kernels
        self._chip = chip
        self._catalog = catalog
        self.model: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.calls: list[CallForecast] = []
        self.by_cache: list[CallForecast] = []
        self.by_cores: list[CallForecast] = []
        self.coverage: Any = None

    def ask(self, model: Path, asked: exporter.Exporter) -> None:
        """Forecasts one token and a prompt, one token with more cells of the cache, and over more cores."""
        n_ctx, prompt = self._settings.n_ctx[0], self._settings.most_tokens
        cells = [n for n in N_KV if n <= n_ctx]
        wanted = [(1, n) for n in cells] + [(prompt, max(pad(prompt), min(CELLS, n_ctx)))]
        calls = [DecodeCall(n_ctx, 1, n_tokens, 1, n_kv) for n_tokens, n_kv in wanted]
        specs = self._kernels.by_graph
        groups = frozenset(spec for spec in specs if isinstance(spec, GraphSpec))
        collector = graph_ops.Collector(str(model), Groups(groups))
        found: dict[tuple[int, int], CallForecast] = {}
        for number, (header, call, graph) in enumerate(asked.graphs(model, self._settings, calls), 1):
            collector.add(graph, number)
            size = call.n_tokens, call.n_kv
            if size in found:
                continue
            found[size] = self._kernels.forecast(graph, self._chip, layers=header.layers)
            if size == (1, min(CELLS, n_ctx)):
                self.by_cores = [
                    self._kernels.forecast(graph, self._chip, layers=header.layers, cores=n) for n in CORES
                ]
            self.model = {
                "model": header.name or model.name,
                "architecture": header.architecture,
                "parameters": header.parameters,
                "layers": header.layers,
            }
        self.settings = {"n_ctx": n_ctx, "type_k": self._settings.type_k, "type_v": self._settings.type_v}
        self.calls = [found[1, min(CELLS, n_ctx)], found[wanted[-1]]]
        self.by_cache = [found[1, n] for n in cells]
        ops = frozenset(spec for spec in specs if isinstance(spec, KernelSpec))
        available = AvailableKernels(ops, frozenset(), None, groups)
        self.coverage = covered.plain(coverage_report([collector.export()], available, self._catalog))
