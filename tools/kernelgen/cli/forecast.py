"""`kernelgen forecast`: the modelled time of a token and of a prompt on a device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from kernelgen.cli import kernel_files, options, run_options
from kernelgen.dispatch import chips
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_OK, KernelgenError
from kernelgen.forecast import printing
from kernelgen.forecast.call import CallForecast
from kernelgen.forecast.kernels import Kernels
from kernelgen.forecast.time import of_work
from kernelgen.model import exporter, graph_ops, sources
from kernelgen.model.graphs import Graph
from kernelgen.model.sizes import DecodeCall, Settings, pad
from kernelgen.model.sources import SourceKind


@click.command(short_help="Estimate the time of a token and of a prompt on a device.")
@options.kernels_argument
@click.option(
    "--model",
    "model",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's GGUF file, or only its header: its graphs determine which kernels a call launches, and how often.  "
    "[default: each kernel by itself]",
)
@run_options.settings_options
@run_options.exporter_options
@options.chip_options
@click.option("--waited", is_flag=True, help="The host waits for each launch, as with GGML_NEURON_QUEUE_DEPTH=1.")
@click.option(
    "--cores",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="What a call takes over so many cores: with --split-mode tensor by the kernels of their slices; "
    "otherwise the work of each kernel is divided.",
)
@options.kernels_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    paths: tuple[Path, ...],
    model: Path | None,
    settings: Settings,
    program: Path | None,
    llama_cpp: Path | None,
    target: str | None,
    lnc: str | None,
    waited: bool,
    cores: int,
    catalog: Catalog,
    as_json: bool,
) -> int:
    """Estimate how long a token and a prompt take on a device, and the parts of this time.

    The times are computed, not measured: docs/results/forecast-judged.md compares them with published measurements.

    KERNELS are manifests, bundles (a pack, or a tree's folder) and folders of bundles. --n-tokens and --n-kv set the calls; by
    default one token and as many as --n-ubatch, with 1,024 cells of the cache.

    Without --model, the number of launches of each kernel is unknown: a line for each kernel has the time of one launch.
    """
    if model is None:
        run_options.refuse(context, "is for --model: kernels alone are forecast as they are", "cores")
    kernels, name = kernel_files.of_one_target(paths, target, catalog)
    chip = kernel_files.chip_of(name, lnc)
    if model is None:
        _print_kernels(kernels, chip, not waited, as_json)
        kernel_files.print_refusals(kernels)
        return EXIT_OK
    if context.get_parameter_source("n_tokens") is not ParameterSource.COMMANDLINE:
        counts: Sequence[int] = sorted({1, settings.most_tokens})
    else:
        counts = settings.n_tokens
    calls = [
        DecodeCall(settings.n_ctx[0], 1, n, 1, max(pad(n), min(pad(n_kv), settings.n_ctx[0])), settings.samplers[0])
        for n in counts
        for n_kv in settings.n_kv or (1024,)
    ]
    slowest: dict[object, CallForecast] = {}
    for layers, call, graph in _graphs(model, settings, calls, program, llama_cpp):
        one = kernels.forecast(graph, chip, queued=not waited, layers=layers, cores=cores)
        key = call, graph.devices, graph.context.get("flash_attn")
        if key not in slowest or slowest[key].ms < one.ms:  # devices wait for each other
            slowest[key] = one
    found = list(slowest.values())
    if as_json:
        click.echo(json.dumps([printing.plain(one, chip) for one in found], indent=1))
    else:
        click.echo("\n".join(line for one in found for line in printing.text(one, chip)))
    kernel_files.print_refusals(kernels)
    return EXIT_OK


def _graphs(
    model: Path, settings: Settings, calls: Sequence[DecodeCall], program: Path | None, llama_cpp: Path | None
) -> Iterator[tuple[int, object, Graph]]:
    """Yields the model's number of layers, each call, and its graph; for an export of graphs, its contents."""
    if sources.recognize(model).kind is not SourceKind.GRAPHS:
        for header, call, graph in exporter.find(program, llama_cpp).graphs(model, settings, calls):
            yield header.layers, call, graph
        return
    graphs = graph_ops.read_graphs(model)
    if not graphs:
        raise KernelgenError(f"{model}: a list of distinct ops does not say what a call computes: give whole graphs")
    for graph in graphs:
        yield 0, tuple(sorted(graph.sizes.items())), graph


def _print_kernels(kernels: Kernels, chip: chips.Chip, queued: bool, as_json: bool) -> None:
    """Prints the time of each kernel's launch, the longest first."""
    found, without = [], []
    for spec, kernel in kernels.by_graph.items():
        work = kernels.work(spec, chip)
        if work is None:
            without.append(kernel.id)
        else:
            found.append((kernel.id, of_work(work, chip, queued=queued)))
    found.sort(key=lambda one: (-one[1].total, one[0]))
    if as_json:
        plain = {
            "modelled": True,
            "target": chip.target,
            "lnc": chip.lnc,
            "kernels": [printing.plain_kernel(*one) for one in found],
            "without_hlo": without,
        }
        click.echo(json.dumps(plain, indent=1))
        return
    lines = printing.kernels_text(found, chip)
    click.echo("\n".join(lines))
