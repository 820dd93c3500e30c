"""`kernelgen emit`: the HLO of kernels, for inspection or for compiling by hand."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kernelgen import fileio
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.plan import Kernel, Plan
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.filenames import hlo_file, notes_file
from kernelgen.spec.kernel import Spec

if TYPE_CHECKING:
    from kernelgen.lowering.emission import Emission
    from kernelgen.lowering.kernel import Lowered


@click.command(short_help="Write the HLO of kernels.")
@click.argument("manifests", nargs=-1, metavar="[MANIFEST...]", type=click.Path(path_type=Path))
@click.option(
    "--spec", "specs", multiple=True, metavar="JSON", help="A kernel as `kernelgen plan --format json` prints it."
)
@click.option("--only", metavar="GLOB", help="Only kernels whose id or op matches.")
@options.kernels_option
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write to."
)
@click.option(
    "--stage",
    type=click.Choice(["traced", "hlo", "canonical", "optimized"]),
    help="Write each kernel as text at this step instead: <id>.<stage>.txt.",
)
def command(
    manifests: tuple[Path, ...],
    specs: tuple[str, ...],
    only: str | None,
    catalog: Catalog,
    output: Path,
    stage: str | None,
) -> None:
    """Write the HLO of kernels to the folder, as <id>.hlo.pb; print the path of each.

    The kernels are those of manifests, or given with --spec. HLO does not depend on the target. The steps that --stage shows as
    text are: the trace of the kernel's language (traced), HLO as JAX writes it (hlo), the HLO that a compiler receives
    (canonical), and XLA's form of it for this machine's CPU (optimized).
    """
    if not manifests and not specs:
        raise click.UsageError("give a MANIFEST or --spec")
    wanted = {spec.id: catalog.kernel(spec) for spec in map(_spec, specs)}
    if manifests:
        from kernelgen import manifest

        wanted |= {k.id: k for k in Plan.merge(manifest.load(manifests, catalog)).kernels}
    chosen = select(sorted(wanted), [wanted[id].spec.op for id in sorted(wanted)], only)
    mistakes: list[Diagnostic] = []
    for id in chosen:
        try:
            click.echo(str(_stage(wanted[id], catalog, output, stage) if stage else _emit(wanted[id], catalog, output)))
        except KernelgenError as error:
            mistakes += error.diagnostics
    if mistakes:
        raise KernelgenError(mistakes, exit_code=EXIT_FAILED)


def select(ids: Sequence[str], ops: Sequence[str], only: str | None, asked_by: str = "--only") -> list[str]:
    """Returns the ids that match the glob, or whose op matches; all ids if there is no glob.

    Raises:
        KernelgenError: nothing matches.
    """
    if only is None:
        return list(ids)
    chosen = [
        id for id, op in zip(ids, ops, strict=True) if fnmatch.fnmatchcase(id, only) or fnmatch.fnmatchcase(op, only)
    ]
    if not chosen:
        raise KernelgenError(
            f"{asked_by} {only}: none of {len(ids)} kernels matches; `kernelgen plan` prints their ids"
        )
    return chosen


def _spec(text: str) -> Spec:
    try:
        value = json.loads(text)
        return Spec.from_json(value.get("spec", value))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) and error.args else error
        raise KernelgenError(f"--spec: not a kernel: {what}") from None


def _stage(kernel: Kernel, catalog: Catalog, output: Path, stage: str) -> Path:
    from kernelgen.lowering.emission import lower_emitters

    path = output / f"{kernel.id}.{stage}.txt"
    emitters, before = catalog.emitters(kernel), catalog.prebuilt_of(kernel)
    with contextlib.redirect_stdout(sys.stderr):
        lowered = lower_emitters(emitters, kernel.spec, targets=kernel.targets, prebuilt=before)
        text = _text(lowered, stage)
    fileio.write_bytes(path.absolute(), text.encode())
    return path


def _text(lowered: Lowered, stage: str) -> str:
    """Returns a kernel at a stage, ending in a newline.

    The stages are the language's operations in JAX; JAX's HLO; the canonical HLO for the compiler; XLA's optimized HLO for this
    machine's CPU.
    """
    from kernelgen.hlo.canonicalize import canonicalize

    if stage == "traced":
        return f"{lowered.traced}\n"
    if stage == "hlo":
        return _hlo_text(lowered.hlo)
    hlo = canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases)
    if stage == "canonical":
        return _hlo_text(hlo)
    from kernelgen.hlo.execute import compile_for_cpu

    made: str = compile_for_cpu(hlo).loaded.hlo_modules()[0].to_string()
    return made.rstrip() + "\n"


def _hlo_text(hlo: bytes) -> str:
    from jaxlib import xla_client

    made: str = xla_client.XlaComputation(hlo).as_hlo_text()
    return made.rstrip() + "\n"


def emitted(kernel: Kernel, catalog: Catalog) -> Emission:
    """Returns a kernel's HLO. Its emitter's output goes to standard error: standard output is for the command's own.

    Raises:
        KernelgenError: the emitter refuses it.
    """
    from kernelgen.lowering import emission

    with contextlib.redirect_stdout(sys.stderr):
        return emission.emit(
            catalog.emitters(kernel),
            kernel.spec,
            targets=kernel.targets,
            prebuilt=catalog.prebuilt_of(kernel),
        )


def _emit(kernel: Kernel, catalog: Catalog, output: Path) -> Path:
    path = (output / hlo_file(kernel.id)).absolute()
    made = emitted(kernel, catalog)
    fileio.write_bytes(path, made.hlo)
    if kernel.noted:
        fileio.write_bytes(path.with_name(notes_file(kernel.id)), canonical_json(made.notes).encode())
    return output / hlo_file(kernel.id)
