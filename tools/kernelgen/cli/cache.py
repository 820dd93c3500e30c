"""`kernelgen cache`: lists the cache of NEFFs, explains misses, and maintains it."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelgen import cache as caches_of
from kernelgen import fileio
from kernelgen.cache import CacheSettings, Folder
from kernelgen.cli import options
from kernelgen.cli.units import binary_size
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.spec.filenames import kernel_of

if TYPE_CHECKING:
    from kernelgen.cache.explain import Explanation, RequestedNeff
    from kernelgen.compilers.settings import CompileConfig
    from kernelgen.plan import Plan

_format = click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@click.group(short_help="Show, prune, verify, export or import the cache of NEFFs.")
def command() -> None:
    """Show, prune, verify, export or import the cache of NEFFs.

    Builds take NEFFs from the cache that were compiled before: by another build, in another folder or, with a shared cache, on
    another machine.
    """


def _folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--cache DIR` as `folder: Folder`."""

    @functools.wraps(function)
    def wrapper(*args: Any, cache_folder: str | None, **kwargs: Any) -> Any:
        settings = CacheSettings.make(cache_folder, "off")
        if settings.folder is None:
            raise KernelgenError("the cache is off: name its folder with --cache DIR")
        return function(*args, folder=Folder(settings.folder), **kwargs)

    return click.option(
        "--cache",
        "cache_folder",
        metavar="DIR",
        help=f"The cache's folder; {caches_of.FOLDER_VARIABLE}, or a folder in ~/.cache, by default.",
    )(wrapper)


# --- explain --------------------------------------------------------------------------------------------------------------


@command.command()
@click.argument("kernel", metavar="KERNEL")
@click.argument("manifests", nargs=-1, metavar="[MANIFEST...]", type=click.Path(path_type=Path))
@options.target_option
@options.kernels_option
@options.compiler_option
@options.cache_options
@_format
def explain(
    kernel: str,
    manifests: tuple[Path, ...],
    targets: tuple[str, ...],
    catalog: Catalog,
    compiler: str,
    caches: CacheSettings,
    output_format: str,
) -> int:
    """Show whether a build would find a kernel in the cache, and if not, why.

    KERNEL is an id, an op or a glob of either, looked up in the manifests; or an HLO file, with the manifests' settings or with the
    defaults for a target. If it is not in the cache, the command prints the nearest entry, with each part of its key that differs.

    Exits with 1 when a kernel is not there.
    """
    from kernelgen.cache import explain as explaining
    from kernelgen.compilers import choice

    if caches.folder is None and caches.shared is None:
        raise KernelgenError("the cache is off, and there is no shared one")
    file = Path(kernel)
    chosen = choice.resolve(compiler)
    if file.suffix == ".pb" or file.is_file():
        wanted = _of_file(file, manifests, targets, catalog, chosen.identity)
    else:
        wanted = _of_manifests(kernel, manifests, targets, catalog, chosen.identity)

    def say(text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    found, remarks = explaining.explain(wanted, caches_of.Cache(caches, caches_of.Notices(say)))
    for remark in remarks:
        say(remark)
    misses = sum(one.found is None for one in found)
    if output_format == "json":
        click.echo(json.dumps([one.to_json() for one in found], indent=1))
    else:
        for one in found:
            click.echo("\n".join(_lines(one, caches)))
        click.echo(f"{len(found) - misses} of {len(found)} in the cache")
    return EXIT_FAILED if misses else EXIT_OK


def _of_file(
    file: Path, manifests: Sequence[Path], targets: Sequence[str], catalog: Catalog, identity: str
) -> list[RequestedNeff]:
    from kernelgen.cache import NeffKey
    from kernelgen.cache.explain import RequestedNeff
    from kernelgen.compilers.settings import CompileConfig

    try:
        hlo = fileio.read_input(file)
    except OSError as error:
        raise KernelgenError(f"{file}: {error.strerror}") from None
    if manifests:
        configs: Sequence[CompileConfig] = _plan(manifests, targets, catalog).configs
    elif targets:
        configs = [CompileConfig.make(target) for target in targets]
    else:
        raise click.UsageError("an HLO file needs a --target, or a MANIFEST")
    return [
        RequestedNeff(kernel_of(file), config.key, NeffKey.make(hlo, identity, config.flags())) for config in configs
    ]


def _of_manifests(
    pattern: str, manifests: Sequence[Path], targets: Sequence[str], catalog: Catalog, identity: str
) -> list[RequestedNeff]:
    from kernelgen.cache import NeffKey
    from kernelgen.cache.explain import RequestedNeff
    from kernelgen.cli.emit import select
    from kernelgen.lowering import emission

    if not manifests:
        raise click.UsageError(f"{pattern} is not an HLO file: give the MANIFEST that has such a kernel")
    plan = _plan(manifests, targets, catalog)
    ids = set(select([k.id for k in plan.kernels], [k.spec.op for k in plan.kernels], pattern, "KERNEL"))
    configs = {config.key: config for config in plan.configs}
    wanted = []
    for kernel in plan.kernels:
        if kernel.id in ids:
            with contextlib.redirect_stdout(sys.stderr):  # an emitter's output is not part of the answer
                data = emission.emit(
                    catalog.emitters(kernel),
                    kernel.spec,
                    targets=kernel.targets,
                    prebuilt=catalog.prebuilt_of(kernel),
                ).hlo
            wanted += [
                RequestedNeff(kernel.id, n.config, NeffKey.make(data, identity, configs[n.config].flags()))
                for n in plan.neffs
                if n.kernel == kernel.id
            ]
    return wanted


def _plan(manifests: Sequence[Path], targets: Sequence[str], catalog: Catalog) -> Plan:
    from kernelgen import manifest
    from kernelgen.plan import Plan

    return Plan.merge(options.only_targets(manifest.load(manifests, catalog), targets))


def _lines(one: Explanation, caches: CacheSettings) -> list[str]:
    head = f"{one.wanted.kernel} for {one.wanted.config}:"
    if one.found is not None:
        return [f"{head} {'hit' if one.found == caches_of.LOCAL else 'hit, in the shared cache'}"]
    lines = [f"{head} miss"]
    if one.damaged:
        lines.append(f"  its entry is damaged: {one.damaged}")
    elif one.nearest is None:
        lines.append("  there is no entry of this kernel or of the same HLO")
    else:
        kernel, key = one.nearest
        of = "" if kernel == one.wanted.kernel else f" of {kernel}"
        lines.append(f"  nearest: the entry {key.name[:12]}{of}, which differs in")
        width = max(len(d.part) for d in one.differences)
        for d in one.differences:
            there, wanted = (value[:12] if d.part == "HLO" and value else value for value in (d.there, d.wanted))
            lines.append(f"    {d.part:{width}}  {_value(there)}; wanted: {_value(wanted)}")
    return lines


def _value(text: str | None) -> str:
    return "not given" if text is None else text or "given"


# --- keeping it in order --------------------------------------------------------------------------------------------------


@command.command()
@options.cache_options
@_format
def info(caches: CacheSettings, output_format: str) -> None:
    """Print the paths and the contents of the caches."""
    from kernelgen.cache.entry import DamagedEntry

    groups: dict[tuple[str, str], list[int]] = {}
    damaged = 0
    folder = Folder(caches.folder) if caches.folder else None
    for stored in folder.entries() if folder else ():
        try:
            head = folder.head(stored.name) if folder else None
        except (DamagedEntry, OSError):
            damaged += 1
            continue
        if head is not None:
            groups.setdefault((head.key.target, head.key.compiler), []).append(stored.size)
    count, size = sum(map(len, groups.values())), sum(map(sum, groups.values()))
    shared = _shared(caches)
    if output_format == "json":
        parts = [
            {"target": t, "compiler": c, "entries": len(s), "bytes": sum(s)} for (t, c), s in sorted(groups.items())
        ]
        local = None
        if folder:
            local = {"folder": str(folder), "entries": count, "bytes": size, "damaged": damaged, "parts": parts}
        click.echo(json.dumps({"local": local, "shared": shared}, indent=1))
        return
    click.echo(f"{folder}: {_entries(count)}, {binary_size(size)}" if folder else "this machine's cache is off")
    for (target, compiler), sizes in sorted(groups.items()):
        click.echo(f"  {target}  {compiler}: {_entries(len(sizes))}, {binary_size(sum(sizes))}")
    if damaged:
        click.echo(f"  {_entries(damaged)} damaged or unreadable; kernelgen cache verify names them")
    if shared:
        click.echo(f"shared cache {shared['url']} ({shared['mode']}): {shared['state']}")


def _shared(caches: CacheSettings) -> dict[str, Any] | None:
    from kernelgen.cache.shared import Unavailable

    if caches.shared is None:
        return None

    def say(text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    store = caches_of.Cache(caches, caches_of.Notices(say)).shared
    assert store is not None
    try:
        store.read("0" * 64)
        state = "it answers"
    except (OSError, Unavailable) as problem:
        state = f"it does not answer: {problem}"
    return {"url": str(store), "mode": caches_of.MODES[0 if caches.writable else 1], "state": state}


@command.command()
@click.option(
    "--max-size", required=True, metavar="SIZE", help="The size that the cache may keep: 500M, 20G, or 0 for nothing."
)
@_folder_option
def prune(max_size: str, folder: Folder) -> int:
    """Remove the least recently used entries, until the cache is small enough."""
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)(i?B)?", max_size)
    if not match:
        raise KernelgenError(f"--max-size {max_size}: expected a size such as 500M or 20G")
    limit = int(match[1]) * _UNITS[match[2]]
    folder.sweep()
    entries = sorted(folder.entries(), key=lambda e: (e.used, e.name))
    size = sum(e.size for e in entries)
    removed = kept = 0
    for stored in entries:
        if size <= limit:
            break
        if folder.drop(stored.name):
            size -= stored.size
            removed += 1
        else:
            kept += 1
    click.echo(f"{folder}: {_entries(removed)} removed, {_entries(len(entries) - removed)} left, {binary_size(size)}")
    if kept:
        raise KernelgenError(f"{folder}: {_entries(kept)} can't be removed", exit_code=EXIT_FAILED)
    return EXIT_OK


@command.command()
@click.option("--keep", is_flag=True, help="Print damaged entries and remove none.")
@_folder_option
def verify(keep: bool, folder: Folder) -> int:
    """Read every entry, and remove those that are damaged.

    An entry that can't be read, such as another user's, is named and stays: it may be whole. Builds check each entry that they
    read, so no build depends on this command. Exits with 1 when an entry was damaged or can't be read.
    """
    from kernelgen.cache import entry
    from kernelgen.cache.entry import DamagedEntry

    folder.sweep()
    count = damaged = unreadable = 0
    for name in sorted(stored.name for stored in folder.entries()):
        count += 1
        try:
            data = folder.read(name)
            if data is not None:
                entry.unpack(data, name)
        except OSError as error:
            unreadable += 1
            click.echo(f"{folder.path(name)}: it can't be read and stays: {error.strerror}")
        except DamagedEntry as problem:
            damaged += 1
            removed = not keep and folder.drop(name)
            click.echo(f"{folder.path(name)}: {problem}{': removed' if removed else ''}")
    click.echo(f"{folder}: {_entries(count)}, {damaged} damaged{f', {unreadable} unreadable' if unreadable else ''}")
    return EXIT_FAILED if damaged or unreadable else EXIT_OK


@command.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_folder_option
def export(file: Path, folder: Folder) -> None:
    """Write all entries to a tar file, for a machine without a network.

    The same entries give the same bytes.
    """
    from kernelgen.cache import archive

    done = archive.write(file, folder)
    for name in done.left_out:
        click.echo(f"warning: {folder.path(name)} is damaged and left out", err=True)
    click.echo(f"{file}: {_entries(done.entries)}, {binary_size(file.stat().st_size)}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@_folder_option
def import_(file: Path, folder: Folder) -> None:
    """Add the entries of an exported cache.

    Every member of the tar file is checked before the first is added. If one is not a whole entry, nothing is added.
    """
    from kernelgen.cache import archive

    try:
        with fileio.open_input(file):
            pass
    except OSError as error:
        raise KernelgenError(f"{file}: {error.strerror}") from None
    done = archive.read(file, folder)
    click.echo(f"{folder}: {_entries(done.added)} added, {done.known} already there")


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
