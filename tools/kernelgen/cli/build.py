"""`kernelgen build`: a complete build, from manifests to bundles, without Bazel or CMake."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kernelgen.cli import bundle_forms, options
from kernelgen.cli.emit import select
from kernelgen.cli.plan import modules
from kernelgen.cli.units import binary_size
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, printable
from kernelgen.plan import Plan

if TYPE_CHECKING:
    from kernelgen import cache
    from kernelgen.build.executor import BuildResult, BuildStep
    from kernelgen.build.folder import BuildSettings
    from kernelgen.build.preview import Preview


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
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Limit for one kernel.")
@click.option(
    "--check-determinism",
    is_flag=True,
    help="Emit every kernel twice, in different processes, and compare.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Print what would be built and stop.")
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
    check_determinism: bool,
    dry_run: bool,
) -> int:
    """Build every kernel of the manifests and write a bundle for each manifest and target.

    In the output folder, NAME_TARGET.kernels.gguf is the pack and NAME_TARGET/ the tree. The command compiles only kernels that are
    not up to date in the folder and not in a cache (kernelgen cache --help). If a kernel fails, it builds the others, but does not
    write the bundles that need the kernel.
    """
    from kernelgen import manifest

    requests = options.only_targets(manifest.load(manifests, catalog), targets)
    files = {request.name: Path(request.file) for request in requests}
    plan = Plan.merge(requests)
    whole, plan = plan, _only(plan, only)

    from kernelgen.build import executor, preview
    from kernelgen.build.folder import BuildSettings, check_manifest, locked
    from kernelgen.compilers import choice
    from kernelgen.compilers.neuronx_cc_driver import machine_memory_mb

    chosen = choice.resolve(compiler)
    settings = BuildSettings(
        output=output,
        compiler=chosen.name,
        identity=chosen.identity,
        executable=getattr(chosen, "executable", None),
        jobs=jobs or len(os.sched_getaffinity(0)),
        memory_mb=memory_mb or machine_memory_mb(),
        timeout=timeout,
        cache=caches,
    )
    if dry_run:
        ahead = preview.preview(plan, catalog.folders, settings)
        _print_plan(plan, whole, ahead, output)
        if text := _forecast(ahead, settings):
            click.echo(text)
        return EXIT_OK
    begun = time.monotonic()
    with _terminated_as_interrupt(), locked(settings):
        for bundle in plan.bundles:
            check_manifest(settings, bundle.id, files[bundle.name])
        with _reporter(len(plan.neffs)) as reporter:
            reporter.say(chosen.note or f"compiling with {settings.identity}")
            if chosen.name != "simulator" and (
                text := _forecast(preview.preview(plan, catalog.folders, settings), settings)
            ):
                reporter.say(text)
            checked = executor.check_determinism(plan, catalog.folders, settings) if check_determinism else None
            result = executor.run(plan, catalog.folders, settings, reporter, checked)
        failed = [step for step in result.steps if step.failure is not None]
        written = _write_bundles(plan, files, result, settings, forms) if only is None else []
    _summarize(whole, result, failed, written, only, time.monotonic() - begun)
    return EXIT_FAILED if failed else EXIT_OK


def _only(plan: Plan, only: str | None) -> Plan:
    chosen = set(select([k.id for k in plan.kernels], [k.spec.op for k in plan.kernels], only))
    return replace(
        plan,
        kernels=tuple(k for k in plan.kernels if k.id in chosen),
        neffs=tuple(n for n in plan.neffs if n.kernel in chosen),
    )


def _forecast(preview: Preview, settings: BuildSettings) -> str:
    """Returns the number of compiles ahead and their estimated time as text; empty for the simulator, which takes seconds."""
    if settings.compiler == "simulator" or not preview.lacking:
        return ""
    from kernelgen.build.estimates import described

    return described(preview.forecast, not preview.exact, settings.jobs)


def _print_plan(plan: Plan, whole: Plan, work: Preview, output: Path) -> None:
    for kernel in plan.kernels:
        configs = ", ".join(n.config for n in plan.neffs if n.kernel == kernel.id)
        click.echo(f"{kernel.id}  {modules(kernel)}  {configs}")
    emits, compiles = work.emits, len(work.compiles)
    bundles = ", ".join(b.id for b in whole.bundles) if len(plan.kernels) == len(whole.kernels) else "no bundles"
    kernels = f"{len(plan.kernels)} {'kernel' if len(plan.kernels) == 1 else 'kernels'}"
    at_most = "at most " if compiles else ""
    click.echo(
        f"would emit {emits} of {kernels}, compile {at_most}{compiles} of {len(plan.neffs)}, "
        f"and write to {output}: {bundles}"
    )


def _write_bundles(
    plan: Plan, files: Mapping[str, Path], result: BuildResult, settings: BuildSettings, forms: Sequence[str]
) -> list[tuple[Path, int]]:
    """Writes the bundles whose kernels are all built; returns (path, bytes) of each output."""
    from kernelgen.build.folder import note_manifest

    whole = [b for b in plan.bundles if all(neff in result.neffs for neff in b.neffs().values())]
    for bundle in whole:
        note_manifest(settings, bundle.id, files[bundle.name])
    written = bundle_forms.write(
        plan,
        whole,
        settings.output,
        forms,
        result.hlos,
        result.neffs,
        compiler=settings.identity,
        jax_version=importlib.metadata.version("jax"),
    )
    return [(path, _size(path)) for path in written]


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    # Equal NEFFs of a tree are hard links to one file.
    return sum({(s.st_dev, s.st_ino): s.st_size for s in (f.stat() for f in path.rglob("*") if f.is_file())}.values())


def _summarize(
    whole: Plan,
    result: BuildResult,
    failed: Sequence[BuildStep],
    written: Sequence[tuple[Path, int]],
    only: str | None,
    seconds: float,
) -> None:
    for path, size in written:
        click.echo(f"{path}  {binary_size(size)}")
    counts = Counter(_origin(step) for step in result.steps if step.failure is None)
    parts = [f"{counts[name]} {name}" for name in _ORIGINS if counts[name] or name in ("compiled", "up to date")]
    click.echo(f"{counts.total()} built ({', '.join(parts)}), {len(failed)} failed, {seconds:.1f} s")
    if only is not None:
        click.echo("no bundles were written: --only leaves kernels out")
    elif failed:
        broken = {step.neff.id for step in failed}
        for bundle in whole.bundles:
            count = sum(neff in broken for neff in bundle.neffs().values())
            if count:
                click.echo(f"{bundle.id} was not written: {count} of its {len(bundle.kernels)} kernels failed")


# --- progress -------------------------------------------------------------------------------------------------------------


class _Plain:
    """Prints a line to stderr for every finished kernel."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0

    def step(self, step: BuildStep) -> None:
        self.done += 1
        width = len(str(self.total))
        self.say(f"[{self.done:{width}}/{self.total}] {_describe(step)}")
        if step.failure:
            self.say("\n".join(f"    {line}" for line in step.failure.splitlines()))

    def warn(self, text: str) -> None:
        self.say(text)

    def say(self, text: str) -> None:
        click.echo(printable(text), err=True)


class _Bar:
    """A progress bar on stderr; only kernels that fail stay on the screen."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress = progress
        self.task = task

    def step(self, step: BuildStep) -> None:
        if step.failure:
            indented = "\n".join(f"    {line}" for line in step.failure.splitlines())
            self.say(f"{_describe(step)}\n{indented}")
        self.progress.update(self.task, advance=1, kernel=step.neff.kernel)

    def warn(self, text: str) -> None:
        self.say(text)

    def say(self, text: str) -> None:
        self.progress.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _describe(step: BuildStep) -> str:
    if step.failure is not None:
        return f"{step.neff.config} {step.neff.kernel} FAILED"
    return f"{step.neff.config} {step.neff.kernel} {f'{step.seconds:.2f} s' if step.fresh else _origin(step)}"


_ORIGINS = ("compiled", "from the cache", "equal to another", "up to date")


def _origin(step: BuildStep) -> str:
    """Returns in words where a built kernel's NEFF is from."""
    return _ORIGINS[(step.fresh, step.cached, step.shared, True).index(True)]


@contextlib.contextmanager
def _reporter(total: int) -> Iterator[_Plain | _Bar]:
    if not sys.stderr.isatty():
        yield _Plain(total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[kernel]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        yield _Bar(progress, progress.add_task("", total=total, kernel=""))


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM end a build as Ctrl-C does: stops workers, and leaves no half-written file."""

    def stop(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
