"""`kernelgen repack`: a model's weights in the layouts that its kernels read, before a program loads the model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.cli import kernel_files, options
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_OK, Diagnostic, KernelgenError, printable
from kernelgen.model import gguf_weights, repacked
from kernelgen.spec.kernel import Spec
from kernelgen.targets import TARGETS

VARIABLE = "GGML_NEURON_REPACKED"


@click.command(short_help="Write a model's weights in the layouts that its kernels read.")
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("paths", nargs=-1, required=True, metavar="KERNELS...", type=click.Path(path_type=Path))
@click.option(
    "--target",
    type=click.Choice(list(TARGETS)),
    metavar="NAME",
    help="The target, if the kernels of several targets read weights in different layouts.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file.  [default: MODEL.repacked.gguf in the current folder]",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(1, 1024), metavar="N", help="Threads.  [default: one for each processor]"
)
@options.kernels_option
def command(
    model: Path, paths: tuple[Path, ...], target: str | None, output: Path | None, jobs: int | None, catalog: Catalog
) -> int:
    """Write a model's weights in the layouts that its kernels read, so that the backend does not repack them at each load.

    MODEL is the model's GGUF file, the first one of a split model. KERNELS are manifests, bundles (a pack, or a tree's folder) and
    folders of bundles. The same model and kernels give the same file. Programs find it by the variable GGML_NEURON_REPACKED.
    """
    weights = gguf_weights.read(model)
    chosen = repacked.choose(weights, _layouts(paths, target, catalog))
    if not chosen:
        hint = f"kernelgen model {model} -o model.yaml writes the manifest of this model's kernels"
        raise KernelgenError(
            Diagnostic(
                f"none of the {len(weights)} tensors of {model} has a type and shape that these kernels read in a layout",
                hint=hint,
            )
        )
    left = Counter(one.weight.dtype for one in chosen if not repacked.can_pack(one))
    chosen = [one for one in chosen if one.weight.dtype not in left]
    for dtype, n in left.items():
        click.echo(
            f"warning: {n} weights in {dtype} are left to be repacked at load: gguf can't dequantize {dtype}", err=True
        )
    if not chosen:
        raise KernelgenError(f"{model} has no weight that can be repacked here")
    output = output or Path(f"{model.name.removesuffix('.gguf')}.repacked.gguf")
    if output.exists() and any(output.samefile(one.weight.file) for one in chosen):
        raise KernelgenError(f"-o {output} is the model's own file")
    with _progress(sum(one.weight.size for one in chosen)) as progress:
        size = repacked.write(output, chosen, model.name, jobs or len(os.sched_getaffinity(0)), progress)
    counts = ", ".join(f"{n} in {layout}" for layout, n in sorted(Counter(one.layout for one in chosen).items()))
    click.echo(f"{output}: {len(chosen)} of {len(weights)} tensors, {counts}; {size / (1 << 20):.1f} MiB")
    click.echo(f"{VARIABLE}={printable(str(output.absolute()))} makes programs read it")
    return EXIT_OK


def _layouts(paths: Sequence[Path], target: str | None, catalog: Catalog) -> repacked.Layouts:
    """Returns the layouts in which kernels read weights.

    Raises:
        KernelgenError: a path is neither a manifest nor a bundle, no kernel is for the target, none requests a layout, or kernels
            for several targets request different layouts.
    """
    by_target: dict[str, list[Spec]] = {}
    manifests, bundles = kernel_files.manifests_and_bundles(paths)
    for bundle in bundles:
        by_target.setdefault(bundle.origin.target, []).extend(bundle.specs())
    for request in options.only_targets(manifest.load(manifests, catalog), [target] if target else []):
        for config in request.configs:
            kernels = request.kernels_for(config.target)
            by_target.setdefault(config.target, []).extend(kernel.spec for kernel in kernels)
    if target:
        by_target = {name: specs for name, specs in by_target.items() if name == target}
        if not by_target:
            raise KernelgenError(f"no kernel is for {target}")
    first, *others = (repacked.wanted(specs) for specs in by_target.values())
    if any(one != first for one in others):
        raise KernelgenError(
            f"kernels for {', '.join(by_target)} read weights in different layouts: choose a target with --target"
        )
    if not first:
        raise KernelgenError(
            Diagnostic(
                "no kernel reads a weight in a layout, so there is nothing to repack",
                hint="docs/reference/manifest-languages.md lists the layouts, and shows how a manifest requests one",
            )
        )
    return first


@contextlib.contextmanager
def _progress(size: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that receives the number of finished bytes: on a terminal it shows a progress bar."""
    if not sys.stderr.isatty():
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=size)
        yield lambda n: progress.update(task, advance=n)
