"""`kernelgen inspect`: describes a bundle, a NEFF, an HLO file or a file of repacked weights."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kernelgen.errors import Diagnostic, KernelgenError, printable


@click.command(short_help="Print what is in a bundle, a NEFF or an HLO file.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@click.option(
    "--check",
    is_flag=True,
    help="Read a whole bundle, compare it with its index, and compare the index with the kernels' specs.",
)
@click.option("--cost", is_flag=True, help="Print the modelled time of each engine for kernels in NKI.")
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(paths: tuple[Path, ...], check: bool, cost: bool, output_format: str) -> None:
    """Print the content of a bundle (its pack, or its tree's folder), a NEFF, an HLO file, or a file of repacked weights.

    Prints the kind, the target, the compiler, inputs and outputs, and sizes. The kind follows from a file's content, not its name.
    JSON is a list with an object for each path.
    """
    from kernelgen.bundle import describe

    found = []
    mistakes: list[Diagnostic] = []
    for path in paths:
        try:
            found.append(describe.describe(path, check=check, cost=cost))
        except KernelgenError as error:
            mistakes += error.diagnostics
    if output_format == "json":
        click.echo(json.dumps(found, indent=1))
    elif found:
        click.echo(printable("\n\n".join(map(describe.text, found))))
    if mistakes:
        raise KernelgenError(mistakes)
