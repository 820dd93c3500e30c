"""`kernelgen generate`: build files from manifests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from kernelgen import fileio, manifest
from kernelgen.cache import CacheSettings
from kernelgen.cli.options import (
    cache_options,
    compiler_option,
    kernels_option,
    manifests_argument,
    only_targets,
)
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import BUILTIN, dependencies
from kernelgen.errors import KernelgenError, did_you_mean
from kernelgen.manifest.settings import megabytes
from kernelgen.plan import Plan, Request
from kernelgen.targets import TARGETS

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

    Both read the same plan. Bazel and CMake builds call this command. Call it yourself to see the files that they read.
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
@click.option(
    "--workspace",
    "workspaces",
    multiple=True,
    metavar="DIR=REPOSITORY",
    help="Root of a repository whose files manifests name kernels by, and how its labels begin; the working folder's is @@.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="NAME=LABEL",
    help="Bazel target of files that the emitters of a kernel library open. May be given several times.",
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    metavar="NAME=REPOSITORY",
    help="Another Bazel module, and the repository that neuron_manifest() takes its manifests from.",
)
@click.option(
    "--of",
    "options",
    multiple=True,
    nargs=2,
    metavar="MANIFEST NAME=VALUE",
    help="How one of the manifests is built: target, memory_per_compile or compiler. May be given several times.",
)
def bazel(
    manifests: tuple[Path, ...],
    catalog: Catalog,
    output: Path,
    rules: str,
    packages: tuple[str, ...],
    data: tuple[str, ...],
    workspaces: tuple[str, ...],
    modules: tuple[str, ...],
    options: tuple[tuple[str, str], ...],
) -> None:
    """Write the packages of a repository of kernel targets; print the kernels' source files on which they depend."""
    from kernelgen.render import bazel as renderer

    labels = {BUILTIN: f"{rules}//kernels"} | dict(_labels("--package", packages, catalog))
    data_of: dict[str, list[str]] = {}
    for name, label in _labels("--data", data, catalog):
        data_of.setdefault(name, []).append(label)
    for library in catalog.libraries:
        if library.name not in labels:
            raise KernelgenError(
                f"--kernels {library.name}: --package {library.name}=LABEL must name its Bazel package"
            )
    requests, settings = _settings_of(options, manifest.load(manifests, catalog))
    plan = Plan.merge(requests)
    sources = [
        renderer.BazelLibrary(library, labels[library.name], tuple(sorted(data_of.get(library.name, []))))
        for library in catalog.libraries
    ]
    roots = {Path.cwd(): "@@"}
    for folder, _, repository in (value.rpartition("=") for value in workspaces):
        roots[renderer.absolute(Path(folder))] = repository
    before = {kernel.prebuilt for kernel in plan.kernels}
    sourced = {kernel.library for kernel in plan.kernels}
    named = [
        renderer.package_of(library, roots, prebuilt=library.name in before - sourced)
        for library in catalog.sources.values()
    ]
    named += renderer.inner_packages(plan, [*catalog.sources.values()], roots)
    _write(output, renderer.generate(plan, [*sources, *named], rules, settings, dict(m.split("=", 1) for m in modules)))
    for file in (file for source in named for file in renderer.build_files(source)):
        click.echo(str(file))
    by_name = {source.library.name: source for source in named}
    for kernel in plan.kernels:
        if kernel.prebuilt:
            click.echo(str(renderer.absolute(renderer.prebuilt_file(kernel, by_name))))
    for kernel in plan.kernels:
        if kernel.library in catalog.sources:
            for file in dependencies(catalog.sources[kernel.library], kernel.emitter):
                click.echo(str(renderer.absolute(file)))


def _settings_of(
    options: Sequence[tuple[str, str]], requests: Sequence[Request]
) -> tuple[list[Request], dict[str, dict[str, str]]]:
    """Returns the manifests' requests with the options of `--of`, and the settings of their bundles' rules, by manifest."""
    given: dict[str, dict[str, list[str]]] = {}
    for file, option in options:
        name, _, value = option.partition("=")
        if file not in {request.file for request in requests}:
            raise KernelgenError(f"--of {file} {option}: there is no such manifest")
        if name not in ("target", "memory_per_compile", "compiler"):
            raise KernelgenError(f"--of {file} {option}: unknown option '{name}'")
        given.setdefault(file, {}).setdefault(name, []).append(value)
    narrowed: list[Request] = []
    settings: dict[str, dict[str, str]] = {}
    for request in requests:
        own = dict(given.get(request.file, {}))
        memory = own.pop("memory_per_compile", [None])[-1]
        narrowed += _narrowed([request], own.pop("target", ()), memory)
        settings[request.name] = {name: values[-1] for name, values in own.items()}
    return narrowed, settings


def _narrowed(requests: Sequence[Request], targets: Sequence[str], memory_per_compile: str | None) -> list[Request]:
    """Returns the manifests' requests for these targets (all if none is given), with the given memory per compile, if any."""
    for target in targets:
        if target not in TARGETS:
            raise KernelgenError(f"unknown target '{target}'{did_you_mean(target, TARGETS)}")
    narrowed = only_targets(requests, targets)
    if memory_per_compile is None:
        return narrowed
    try:
        return [replace(r, memory_mb=megabytes(memory_per_compile)) for r in narrowed]
    except ValueError:
        raise KernelgenError(
            f"memory per compile is a number with a unit, such as 8G or 6144M, not '{memory_per_compile}'"
        ) from None


def _labels(option: str, values: Sequence[str], catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yields (name of a kernel library, label) for each value of an option."""
    for value in values:
        name, equals, label = value.partition("=")
        if not equals or name not in {library.name for library in catalog.libraries}:
            raise KernelgenError(f"{option} {value}: expected NAME=LABEL with the name of a kernel library")
        yield name, label


@command.command()
@_manifests
@kernels_option
@_output
@click.option("--target", "targets", multiple=True, metavar="NAME", help="Only for this target.")
@compiler_option
@click.option("--memory-per-compile", metavar="SIZE", help="Memory of one compile, as in a manifest: 8G, 6144M.")
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="File that the emitters of --kernels open.",
)
@click.option(
    "--form",
    "forms",
    multiple=True,
    type=click.Choice(["pack", "tree", "embed", "report"], case_sensitive=False),
    default=["pack"],
    help="A form of each bundle; pack by default. May be given several times.",
)
@cache_options
def cmake(
    manifests: tuple[Path, ...],
    catalog: Catalog,
    output: Path,
    targets: tuple[str, ...],
    compiler: str,
    memory_per_compile: str | None,
    data: tuple[Path, ...],
    forms: tuple[str, ...],
    caches: CacheSettings,
) -> None:
    """Write the file from which CMake's add_neuron_kernels() builds."""
    import importlib.metadata
    import os

    from kernelgen.build.steps import Build
    from kernelgen.compilers import choice
    from kernelgen.compilers.neuronx_cc_driver import machine_memory_mb
    from kernelgen.render import cmake as renderer

    plan = Plan.merge(_narrowed(manifest.load(manifests, catalog), targets, memory_per_compile))
    chosen = choice.resolve(compiler)
    build = Build(
        compiler=chosen.name,
        identity=chosen.identity,
        executable=getattr(chosen, "executable", None),
        jax_version=importlib.metadata.version("jax"),
        cache=caches,
        cpus=len(os.sched_getaffinity(0)),
        memory_mb=machine_memory_mb(),
        data=tuple(path.absolute() for path in data),
        forms=forms,
        is_counted=True,
    )
    _write(output, renderer.generate(plan, catalog.folders, build))
    # CMake prints it.
    if chosen.note:
        click.echo(chosen.note)
    click.echo(f"{len(plan.kernels)} kernels, {len(plan.neffs)} compiles with {chosen.identity}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes files that changed; an existing file with equal content keeps its time, so that nothing is rebuilt for it."""
    for name, text in files.items():
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            bad = ascii(text[max(0, error.start - 40) : error.end])
            raise KernelgenError(f"a path that is not UTF-8 can't stand in a build file: …{bad}") from None
        fileio.write_if_changed(folder / name, data)
