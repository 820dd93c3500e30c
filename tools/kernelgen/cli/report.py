"""`kernelgen report`: writes one page about a model's kernels, and the same numbers as JSON and CSV."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kernelgen import cache, fileio
from kernelgen.bundle import reader
from kernelgen.bundle.reader import StoredBundle
from kernelgen.cache.folder import Folder
from kernelgen.cli import kernel_files, options, run_options
from kernelgen.dispatch import chips
from kernelgen.dispatch.grouping import Groups
from kernelgen.dispatch.report import AvailableKernels
from kernelgen.dispatch.report import report as coverage_report
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_OK, KernelgenError
from kernelgen.forecast.call import CallForecast
from kernelgen.forecast.kernels import Kernels
from kernelgen.model import exporter, graph_ops, sources
from kernelgen.model.graphs import Graph
from kernelgen.model.sizes import DecodeCall, Settings, pad
from kernelgen.model.sources import SourceKind
from kernelgen.neff.identity import NeffKey
from kernelgen.plan import Kernel
from kernelgen.report import covered, logs
from kernelgen.report import measured as measurements
from kernelgen.report.kernel_page import KernelOrigin
from kernelgen.report.numbers import ReportInputs, collect
from kernelgen.report.page import of_kernel, page, table
from kernelgen.report.titles import ModelTitles
from kernelgen.spec.kernel import GraphSpec, KernelSpec

N_KV = (256, 1024, 4096, 16384)
"""Cells of the cache in the forecasts of a token, up to the context's length."""
CELLS = 1024
"""Cells of the cache for the token and the prompt in the table."""
CORES = (1, 2, 4)


@click.command(short_help="Write an HTML report of a model's kernels: times, bytes, coverage.")
@options.kernels_argument
@click.option(
    "--model",
    "model",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's GGUF file, only its header, or an export of graphs: they determine how often a call launches each kernel.",
)
@run_options.settings_options
@run_options.exporter_options
@options.chip_options
@click.option(
    "--measured",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="What a launch of a kernel takes, as you measured it: a profile of the backend (GGML_NEURON_PROFILE), what "
    "`test-backend-ops perf --output sql` prints, a summary of neuron-profile named KERNEL.json, or CSV with the columns "
    "kernel and us. May be repeated.",
)
@click.option(
    "--kernel-pages/--no-kernel-pages",
    "kernel_pages",
    default=True,
    show_default=True,
    help="Whether each kernel has a page with its tensors and its HLO, in a folder beside the report.",
)
@click.option(
    "--logs",
    "log_folders",
    metavar="DIR",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where logs of compiles are, for the kernels' pages: the output folder of `kernelgen build`, or CMake's folder neff. "
    "May be repeated.  [default: the folder of each bundle]",
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
    measured: tuple[Path, ...],
    kernel_pages: bool,
    log_folders: tuple[Path, ...],
    catalog: Catalog,
    output: Path,
) -> int:
    """Write an HTML page: the FLOPs and bytes of each kernel, and the forecast times of a model's calls.

    KERNELS are manifests, bundles (a pack, or a tree's folder) and folders of bundles. The page needs no network.
    """
    if output.suffix != ".html":
        raise KernelgenError(f"-o {output}: expected a name that ends in .html; the JSON and the CSV get the same name")
    folder = output.with_suffix(".kernels")
    if kernel_pages:
        _check_folder(folder)
    kernels, name = kernel_files.of_one_target(paths, target, catalog)
    chip = kernel_files.chip_of(name, lnc)
    times = _measured(measured, kernels)
    model_calls = _Calls(settings, kernels, chip, catalog)
    if model is not None:
        if sources.recognize(model).kind is SourceKind.GRAPHS:
            model_calls.read(model)
        else:
            model_calls.forecast(model, exporter.find(program, llama_cpp))
    bundles = [stored for path in paths if reader.is_bundle(path) for stored in reader.read(path)]
    bundles = [stored for stored in bundles if stored.origin.target == name]
    numbers = collect(
        ReportInputs(
            names=[path.name for path in paths],
            chip=chip,
            model=model_calls.model,
            settings=model_calls.settings,
            calls=model_calls.calls,
            by_cache=model_calls.by_cache,
            by_cores=model_calls.by_cores,
            titles=model_calls.titles,
            coverage=model_calls.coverage,
            stored=bundles,
            measured=times,
            compile_s=_compile_seconds(bundles),
        ),
        kernels,
    )
    kernel_files.print_refusals(kernels)
    if kernel_pages:
        found = logs.find(bundles, log_folders)
        _write_kernel_pages(folder, output.name, numbers, kernels, catalog, bundles, found)
    text = page(numbers, folder.name if kernel_pages else None)
    fileio.write_bytes(output, text.encode())
    fileio.write_bytes(output.with_suffix(".json"), (json.dumps(numbers, indent=1) + "\n").encode())
    fileio.write_bytes(output.with_suffix(".csv"), table(numbers).encode())
    names = [output.with_suffix(suffix).name for suffix in (".json", ".csv")]
    names += [f"{folder.name}/"] if kernel_pages else []
    click.echo(f"{output}, {', '.join(names)}: {len(numbers['kernels'])} kernels")
    return EXIT_OK


def _measured(files: Sequence[Path], kernels: Kernels) -> dict[str, float]:
    """Returns measured microseconds by kernel, and warns about files that name none of the kernels."""
    known = {kernel.id for kernel in kernels.by_graph.values()}
    ops = [kernel for kernel in kernels.by_graph.values() if isinstance(kernel, KernelSpec)]
    found: dict[str, float] = {}
    for path in files:
        times = measurements.read(path, ops)
        if not times.keys() & known:
            click.echo(f"warning: {path}: none of its {len(times)} times is of a kernel here", err=True)
        elif unknown := sorted(times.keys() - known):
            click.echo(f"warning: {path}: no kernel here is {unknown[0]} (and {len(unknown) - 1} more)", err=True)
        found |= times
    return found


def _compile_seconds(bundles: Sequence[StoredBundle]) -> dict[str, int]:
    """Returns the compile times of the kernels in this machine's cache of NEFFs."""
    folder = cache.default_folder(os.environ)
    found: dict[str, int] = {}
    if folder is None:
        return found
    for bundle in bundles:
        for kernel in bundle.kernels:
            flags = bundle.origin.flags if kernel.flags is None else kernel.flags
            with contextlib.suppress(cache.DamagedEntry, OSError):
                head = Folder(folder).head(NeffKey(kernel.hlo_sha256, bundle.origin.compiler, flags).name)
                if head is not None and head.seconds is not None:
                    found[kernel.id] = head.seconds
    return found


def _check_folder(folder: Path) -> None:
    """Refuses to replace a folder that holds anything but pages of kernels."""
    others = [path.name for path in folder.glob("*") if path.suffix != ".html"] if folder.is_dir() else []
    if others:
        raise KernelgenError(
            f"{folder} is the folder of the kernels' pages, and has {others[0]}: choose another name with -o, or give "
            "--no-kernel-pages"
        )


def _write_kernel_pages(
    folder: Path,
    report: str,
    numbers: Mapping[str, Any],
    kernels: Kernels,
    catalog: Catalog,
    bundles: Sequence[StoredBundle],
    logs_of: Mapping[str, str],
) -> None:
    by_id = {kernel.id: name for name, kernel in kernels.by_graph.items()}
    stored = {kernel.id: (bundle, kernel) for bundle in bundles for kernel in bundle.kernels}
    with fileio.replacing_folder(folder) as temporary:
        for row in numbers["kernels"]:
            id = row["id"]
            hlo = kernels.hlo(by_id[id])
            assert hlo is not None  # otherwise it has no row
            read = id in stored and stored[id][1].files is not None
            emitters = [] if read else _emitters(kernels.kernel(kernels.by_graph[by_id[id]]), catalog)
            text = of_kernel(row, KernelOrigin(hlo, emitters, stored.get(id), logs_of.get(id)), report)
            (temporary / f"{id}.html").write_text(text, encoding="utf-8")


def _emitters(kernel: Kernel, catalog: Catalog) -> list[str]:
    found = catalog.emitters(kernel)
    return [f"{one.file.name}:{one.line} {one.function} of {library.name}" for library, one in found]


class _Calls:
    """The calls of a model in a report; empty until `forecast` or `read`."""

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
        self.titles = ModelTitles()
        self.coverage: Any = None

    def forecast(self, model: Path, graph_exporter: exporter.Exporter) -> None:
        """Forecasts one token and a prompt, one token with more cells of the cache, and one token over more cores."""
        n_ctx, prompt = self._settings.n_ctx[0], self._settings.most_tokens
        cells = sorted({n for n in N_KV if n <= n_ctx} | {min(CELLS, n_ctx)})
        wanted = [(1, n) for n in cells] + [(prompt, max(pad(prompt), min(CELLS, n_ctx)))]
        calls = [DecodeCall(n_ctx, 1, n_tokens, 1, n_kv, self._settings.samplers[0]) for n_tokens, n_kv in wanted]
        specs = self._kernels.by_graph
        groups = frozenset(spec for spec in specs if isinstance(spec, GraphSpec))
        collector = graph_ops.Collector(str(model), Groups(groups))
        found: dict[tuple[int, int], CallForecast] = {}
        for number, (header, call, graph) in enumerate(graph_exporter.graphs(model, self._settings, calls), 1):
            collector.add(graph, number)
            size = call.n_tokens, call.n_kv
            if size in found:
                continue
            found[size] = self._kernels.forecast(graph, self._chip, layers=header.layers)
            self.titles.add(graph, found[size])
            self.settings = self._settings_of(graph)
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
        self.calls = [found[1, min(CELLS, n_ctx)], found[wanted[-1]]]
        self.by_cache = [found[1, n] for n in cells]
        self._cover(collector, groups)

    def read(self, path: Path) -> None:
        """Forecasts an export's calls with the fewest and the most tokens, the former by cells of the cache.

        Raises:
            KernelgenError: the file has no complete graphs, or lacks the sizes of their calls.
        """
        graphs = graph_ops.read_graphs(path)
        sized = {(one.sizes.get("n_tokens", 0), one.sizes.get("n_kv", 0)): one for one in graphs}
        if not graphs or min(sized) < (1, 1):
            raise KernelgenError(f"{path}: expected whole graphs, each with its n_tokens and n_kv")
        groups = frozenset(spec for spec in self._kernels.by_graph if isinstance(spec, GraphSpec))
        collector = graph_ops.Collector(str(path), Groups(groups))
        for number, graph in enumerate(graphs, 1):
            collector.add(graph, number)
        found = {size: self._kernels.forecast(graph, self._chip) for size, graph in sorted(sized.items())}
        for size, call in found.items():
            self.titles.add(sized[size], call)
        self.settings = self._settings_of(sized[max(found)])
        first, last = min(found), max(found)
        self.model = {"graphs": path.name}
        self.by_cache = [call for (n_tokens, _), call in found.items() if n_tokens == first[0]]
        self.by_cores = [self._kernels.forecast(sized[first], self._chip, cores=n) for n in CORES]
        self.calls = [found[size] for size in dict.fromkeys((first, last))]
        self._cover(collector, groups)

    def _settings_of(self, graph: Graph) -> dict[str, Any]:
        """Returns how llama.cpp ran the model for a graph, by option."""
        names = ("n_ctx", "type_k", "type_v", "flash_attn")
        used = {name: graph.context[name] for name in names if name in graph.context}
        return used | ({"n_ctx": f"any; {used['n_ctx']:,} for these calls"} if self._settings.any_ctx else {})

    def _cover(self, collector: graph_ops.Collector, groups: frozenset[GraphSpec]) -> None:
        ops = frozenset(spec for spec in self._kernels.by_graph if isinstance(spec, KernelSpec))
        available = AvailableKernels(ops, frozenset(), None, groups)
        self.coverage = covered.plain(coverage_report([collector.export()], available, self._catalog))
