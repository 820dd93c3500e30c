"""`kernelgen build`: a complete build, from manifests to bundles, without Bazel or CMake."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import click

from kernelgen import cache
from kernelgen.bundle.contents import pack_name
from kernelgen.cli import bundle_forms, options
from kernelgen.cli.emit import select
from kernelgen.cli.units import binary_size
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK
from kernelgen.plan import Plan


@click.command(short_help="Compile the kernels of manifests and pack them into bundles.")
@options.manifests_argument
@options.target_option
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder to write to."
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1, max=4096),
    default=None,
    help="The number of kernels that are built at once; by default the number of CPUs, or fewer if memory does not suffice.",
)
@options.kernels_option
@options.compiler_option
@options.cache_options
@click.option("--only", metavar="GLOB", help="Only kernels whose id or op matches; no bundles are written then.")
@bundle_forms.option
@click.option(
    "--memory",
    "memory_mb",
    type=click.IntRange(min=1),
    metavar="MIB",
    help="Memory that all compiles together may take; four fifths of the machine's by default.",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Limit for one compile."
)
@click.option("-n", "--dry-run", is_flag=True, help="Print the steps that would run, and stop.")
def command(
    manifests: tuple[Path, ...],
    targets: tuple[str, ...],
    output: Path,
    jobs: int | None,
    catalog: Catalog,
    compiler: str,
    caches: cache.CacheSettings,
    only: str | None,
    forms: tuple[str, ...],
    memory_mb: int | None,
    timeout: float | None,
    dry_run: bool,
) -> int:
    """Build every kernel of the manifests and write a bundle for each manifest and target.

    In the output folder, NAME_TARGET.kernels.gguf is the pack and NAME_TARGET/ the tree. The command compiles only kernels that are
    not up to date in the folder and not in a cache (kernelgen cache --help). If a kernel fails, it builds the others, but does not
    write the bundles that need the kernel.
    """
    from kernelgen import manifest

    plan = Plan.merge(options.only_targets(manifest.load(manifests, catalog), targets))
    chosen = None
    if only is not None:
        chosen = frozenset(select([k.id for k in plan.kernels], [k.spec.op for k in plan.kernels], only))

    from kernelgen.build import ninja
    from kernelgen.build.steps import Build
    from kernelgen.compilers import choice
    from kernelgen.compilers.neuronx_cc_driver import machine_memory_mb

    resolved = choice.resolve(compiler)
    settings = Build(
        compiler=resolved.name,
        identity=resolved.identity,
        executable=getattr(resolved, "executable", None),
        jax_version=importlib.metadata.version("jax"),
        cache=caches,
        cpus=jobs or len(os.sched_getaffinity(0)),
        memory_mb=memory_mb or machine_memory_mb(),
        timeout=timeout,
        forms=forms,
        packs="../",
        trees="../",
        embedded="../",
    )
    if dry_run:
        for step in ninja.preview(plan, catalog.folders, settings, output, chosen):
            click.echo(step)
        return EXIT_OK
    begun = time.monotonic()
    _say(resolved.note or f"compiling with {settings.identity}")
    with _terminated_as_interrupt():
        say = None if sys.stderr.isatty() else _say
        result = ninja.build(plan, catalog.folders, settings, output, say, chosen)
    for bundle in plan.bundles if chosen is None else ():
        if bundle.id not in result.unwritten:
            for path in (output / pack_name(bundle.id), output / bundle.id):
                if path.exists():
                    click.echo(f"{path}  {binary_size(_size(path))}")
    cached = f"{result.cached} from the cache, " if result.cached else ""
    click.echo(
        f"{result.compiled + result.cached + result.up_to_date} built ({result.compiled} compiled, {cached}"
        f"{result.up_to_date} up to date), {len(result.failed)} failed, {time.monotonic() - begun:.1f} s"
    )
    if chosen is not None:
        click.echo("no bundles were written: --only leaves kernels out")
        return EXIT_OK if result.is_complete else EXIT_FAILED
    for bundle in plan.bundles:
        count = len(result.failed.intersection(bundle.neffs().values()))
        if count:
            click.echo(f"{bundle.id} was not written: {count} of its {len(bundle.kernels)} kernels failed")
    return EXIT_OK if result.is_complete else EXIT_FAILED


def _say(text: str) -> None:
    click.echo(text, err=True)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    # Equal NEFFs of a tree are hard links to one file.
    return sum({(s.st_dev, s.st_ino): s.st_size for s in (f.stat() for f in path.rglob("*") if f.is_file())}.values())


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM end a build as Ctrl-C does: stops its steps, and leaves no half-written file."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
