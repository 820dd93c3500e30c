"""`kernelgen generate`: build files from manifests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from kernelgen import fileio, manifest
from kernelgen.cli.options import kernels_option, manifests_argument
from kernelgen.errors import KernelgenError
from kernelgen.library import Library
from kernelgen.plan import Plan

_manifests = manifests_argument
_output = click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write to.",
)


@click.group()
def command() -> None:
    """Write build files for Bazel or CMake.

    Both read the same plan. Bazel and CMake builds call this themselves; by hand it shows what they see.
    """


@command.command()
@_manifests
@kernels_option
@_output
@click.option("--rules", default="@@neuron_kernelgen~", help="Repository of the rules, as labels begin.")
@click.option(
    "--package",
    "packages",
    multiple=True,
    metavar="NAME=LABEL",
    help="Bazel package that exports the modules of a kernel library.",
)
def bazel(
    manifests: tuple[Path, ...], libraries: tuple[Library, ...], output: Path, rules: str, packages: tuple[str, ...]
) -> None:
    """Write the packages of a repository of kernel targets."""
    from kernelgen.render import bazel as renderer

    labels = {"kernels": f"{rules}//kernels"}
    for package in packages:
        name, equals, label = package.partition("=")
        if not equals or name not in {library.name for library in libraries}:
            raise KernelgenError(f"--package {package}: expected NAME=LABEL with the name of a kernel library")
        labels[name] = label
    for library in libraries:
        if library.name not in labels:
            raise KernelgenError(
                f"--kernels {library.name}: --package {library.name}=LABEL must name its Bazel package"
            )
    plan = Plan.merge(manifest.load(manifests, libraries=libraries))
    sources = [renderer.BazelLibrary(library, labels[library.name]) for library in libraries]
    _write(output, renderer.generate(plan, sources, rules))


@command.command()
@_manifests
@kernels_option
@_output
def cmake(manifests: tuple[Path, ...], libraries: tuple[Library, ...], output: Path) -> None:
    """Write the file that add_neuron_kernels() includes."""
    from kernelgen.render import cmake as renderer

    plan = Plan.merge(manifest.load(manifests, libraries=libraries))
    _write(output, renderer.generate(plan, libraries))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files that changed; one that is there with the same content keeps its time, so that nothing is rebuilt for it."""
    for name, text in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            path.parent.mkdir(parents=True, exist_ok=True)
            fileio.write_bytes(path, text.encode())
