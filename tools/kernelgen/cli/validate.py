"""`kernelgen validate`: every mistake of manifests, or what they hold."""

from __future__ import annotations

from pathlib import Path

import click

from kernelgen import manifest
from kernelgen.cli import options
from kernelgen.emitters.catalog import Catalog


@click.command(short_help="Check manifests and report every mistake.")
@options.manifests_argument
@options.kernels_option
def command(manifests: tuple[Path, ...], catalog: Catalog) -> None:
    """Check manifests and report every mistake with its file, line and column.

    For right ones, print the number of distinct kernels and the targets.
    """
    for request in manifest.load(manifests, catalog):
        count = len({kernel.spec.id for kernel in request.kernels})
        targets = ", ".join(config.target for config in request.configs)
        click.echo(f"{request.name}: {count} {'kernel' if count == 1 else 'kernels'} for {targets}")
