"""`kernelgen forecast`: how long a token and a prompt take on a device, by a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from click.core import ParameterSource

from kernelgen import manifest
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
from kernelgen.model.sources import Kind
from kernelgen.spec.source_kernel import SourceSpec
from kernelgen.targets import TARGETS


@click.command(short_help="Say how long a token and a prompt take, by a model.")
@click.argument("paths", nargs=-1, required=True, metavar="KERNELS...", type=click.Path(path_type=Path))
@click.option(
    "--model",
    "model",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The model's GGUF file, or its header alone: its graphs say which kernels a call launches, and how often.  "
    "[default: each kernel by itself]",
)
@run_options.settings_options
@run_options.exporter_options
@click.option(
    "--target", type=click.Choice(list(TARGETS)), metavar="NAME", help="The target; that of bundles, or trn1."
)
@click.option("--lnc", type=click.Choice(["1", "2"]), help="Physical cores of a logical one; the target's by default.")
@click.option("--waited", is_flag=True, help="Each launch is waited for, as with GGML_NEURON_QUEUE_DEPTH=1.")
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
    """Print how long a call takes on a device, of one token and of a prompt, and of what that consists.

    It is a model, not a measurement: docs/results/forecast.md says how far published measurements are from it.

    KERNELS are manifests, bundles (a pack, or a tree's folder) and folders of bundles. --n-tokens and --n-kv say which calls; by
    default one token and as many as --n-ubatch, with 1,024 cells of the cache.

    Kernels alone don't say how often a model launches each: without --model a line for each kernel says what one launch takes.
    """
    if model is None:
        _refuse_options_of_models(context)
    kernels, name = kernels_of(paths, target, catalog)
    chip = chip_of(name, lnc)
    if model is None:
        _print_kernels(kernels, chip, not waited, as_json)
        print_refusals(kernels)
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
    print_refusals(kernels)
    return EXIT_OK


def _graphs(
    model: Path, settings: Settings, calls: Sequence[DecodeCall], program: Path | None, llama_cpp: Path | None
) -> Iterator[tuple[int, object, Graph]]:
    """Yields how many layers the model has, the call and what it computes; of an export of graphs, what is in it."""
    if sources.recognize(model).kind is not Kind.GRAPHS:
        for header, call, graph in exporter.find(program, llama_cpp).graphs(model, settings, calls):
            yield header.layers, call, graph
        return
    graphs = graph_ops.read_graphs(model)
    if not graphs:
        raise KernelgenError(f"{model}: a list of distinct ops does not say what a call computes: give whole graphs")
    for graph in graphs:
        yield 0, tuple(sorted(graph.sizes.items())), graph


def chip_of(target: str, lnc: str | None) -> chips.Chip:
    """Returns the figures of a target.

    Args:
        target: its name.
        lnc: physical cores of a logical one; the target's own when None.

    Raises:
        KernelgenError: the target has no such LNC.
    """
    try:
        return chips.of(target, int(lnc) if lnc else None)
    except KeyError:
        choices = " or ".join(map(str, TARGETS[target].lnc_choices))
        raise KernelgenError(f"--lnc {lnc}: {target} has {choices}") from None


def print_refusals(kernels: Kernels) -> None:
    """Prints which kernels the forecast leaves out, and why."""
    for reason in kernels.refusals.values():
        click.echo(f"warning: the forecast leaves out a kernel whose HLO can't be emitted: {reason}", err=True)


def kernels_of(paths: Sequence[Path], target: str | None, catalog: Catalog) -> tuple[Kernels, str]:
    """Returns the kernels and the target.

    Raises:
        KernelgenError: a path is neither a manifest nor a bundle, or bundles are for another target.
    """
    manifests, bundles = kernel_files.manifests_and_bundles(paths)
    bundles = [bundle for bundle in bundles if target in (None, bundle.origin.target)]
    targets = [bundle.origin.target for bundle in bundles]
    specs = [spec for bundle in bundles for spec in bundle.specs()]
    if len(set(targets)) > 1:
        raise KernelgenError(f"the bundles are for {', '.join(dict.fromkeys(targets))}: choose one with --target")
    requests = options.only_targets(manifest.load(manifests, catalog), [target] if target else [])
    chosen = target or (targets[0] if targets else "trn1")
    wanted = [kernel for request in requests for kernel in request.kernels_for(chosen)]
    specs += [kernel.spec for kernel in wanted]
    read_hlo = {
        kernel.id: partial(bundle.hlo, kernel) for bundle in bundles for kernel in bundle.kernels if kernel.files
    }
    by_source = {kernel.id: kernel for kernel in wanted if isinstance(kernel.spec, SourceSpec)}
    kernels = Kernels(specs, catalog, read_hlo, by_source)
    if not kernels.by_graph:
        raise KernelgenError(f"no kernel for {target or 'any target'}")
    return kernels, chosen


def _refuse_options_of_models(context: click.Context) -> None:
    """Refuses options that mean nothing without a model."""
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name in (*run_options.NAMES, "cores"):
            raise click.UsageError(f"{parameter.opts[0]} is for --model: kernels alone are forecast as they are")


def _print_kernels(kernels: Kernels, chip: chips.Chip, queued: bool, as_json: bool) -> None:
    """Prints what a launch of each kernel takes, the longest first."""
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
