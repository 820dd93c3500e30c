"""`kernelgen validate`: reports every mistake of manifests, or their contents."""

from __future__ import annotations

from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.plan import Plan


@click.command(short_help="Check manifests and report every mistake.")
@options.manifests_argument
@options.kernels_option
@click.option(
    "--lint", "linted", is_flag=True, help="Also emit the kernels, and check the HLO that neuronx-cc would receive."
)
def command(manifests: tuple[Path, ...], catalog: Catalog, linted: bool) -> None:
    """Check manifests and report every mistake with its file, line and column.

    If there is none, print the number of distinct kernels of each target. With --lint, HLO that neuronx-cc is known to
    refuse is also a mistake, for each target and its settings. HLO that it may compile to something else is a warning.
    """
    requests = manifest.load(manifests, catalog)
    if linted:
        _lint(Plan.merge(requests), catalog)
    for request in requests:
        counts: dict[int, list[str]] = {}
        for config in request.configs:
            ids = {kernel.spec.id for kernel in request.kernels_for(config.target)}
            counts.setdefault(len(ids), []).append(config.target)
        said = [
            f"{count} {'kernel' if count == 1 else 'kernels'} for {', '.join(targets)}"
            for count, targets in counts.items()
        ]
        click.echo(f"{request.name}: {', '.join(said)}")


def _lint(plan: Plan, catalog: Catalog) -> None:
    from kernelgen.cli.emit import emitted
    from kernelgen.compilers.base import refuse_unsupported

    configs = {config.key: config for config in plan.configs}
    settings: dict[str, list[str]] = {}
    for neff in plan.neffs:
        settings.setdefault(neff.kernel, []).append(neff.config)
    mistakes: dict[Diagnostic, None] = {}
    for kernel in plan.kernels:
        try:
            hlo = emitted(kernel, catalog).hlo
        except KernelgenError as error:
            mistakes |= dict.fromkeys(error.diagnostics)
            continue
        for key in settings[kernel.id]:
            try:
                for text in refuse_unsupported(hlo, configs[key], kernel.id):
                    click.echo(f"warning: {text}", err=True)
            except KernelgenError as error:
                mistakes |= dict.fromkeys(error.diagnostics)
    if mistakes:
        raise KernelgenError(mistakes, exit_code=EXIT_FAILED)
