"""`kernelgen prebuild`: writes kernels' output of NKI's compiler, for machines without that compiler."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.cli.emit import select
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.plan import Kernel, Plan


@click.command(short_help="Compile kernels with NKI's own compiler, ahead of a build.")
@options.manifests_argument
@options.kernels_option
@options.target_option
@click.option("--only", metavar="GLOB", help="Only kernels whose id or name matches.")
def command(manifests: tuple[Path, ...], catalog: Catalog, targets: tuple[str, ...], only: str | None) -> None:
    """Compile the kernels that have `prebuilt` in the manifests with NKI's own compiler; print the path of each file.

    The key `prebuilt` names a folder; each kernel gets a file in it for each target, <id>.json. Bazel, CMake and `kernelgen build`
    take these files, also on machines that don't have the compiler. Run this command again after you change a kernel.
    """
    requests = options.only_targets(manifest.load(manifests, catalog), targets)
    kernels = {kernel.id: kernel for kernel in Plan.merge(requests).kernels if kernel.prebuilt}
    if not kernels:
        raise KernelgenError("no kernel of these manifests has `prebuilt`: see docs/reference/native-kernels.md")
    mistakes: list[Diagnostic] = []
    for id in select([*kernels], [kernel.spec.op for kernel in kernels.values()], only):
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is for the paths
                made = _make(kernels[id], catalog)
            click.echo(str(made))
        except KernelgenError as error:
            mistakes += error.diagnostics
    if mistakes:
        raise KernelgenError(mistakes, exit_code=EXIT_FAILED)


def _make(kernel: Kernel, catalog: Catalog) -> Path:
    from kernelgen.languages.nki import prebuilt
    from kernelgen.lowering import emission

    file = catalog.prebuilt_of(kernel)
    assert file is not None
    emitters = catalog.emitters(kernel)
    with prebuilt.recording(file, emission.prebuilt_request(emitters, kernel.spec, kernel.targets)):
        emission.emit(emitters, kernel.spec, targets=kernel.targets)
    return file
