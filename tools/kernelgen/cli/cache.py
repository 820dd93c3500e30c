"""`kernelgen cache`: lists the cache of NEFFs, explains misses, and maintains it."""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernelgen import cache as caches_of
from kernelgen import fileio
from kernelgen.cache import LOCAL, SHARED, CacheSettings, DamagedEntry, EntryHead, Folder, NeffKey
from kernelgen.cli import options
from kernelgen.cli.units import binary_size
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError
from kernelgen.spec.filenames import kernel_of

if TYPE_CHECKING:
    from kernelgen.cache.shared import Shared
    from kernelgen.compilers.settings import CompileConfig
    from kernelgen.plan import Plan

    _Levels = Sequence[tuple[str, Folder | Shared]]

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


@dataclass(frozen=True, slots=True)
class _Requested:
    """A NEFF that a build would look up."""

    kernel: str
    config: str
    key: NeffKey


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
    defaults for a target. If it is not in the cache, the command prints the nearest entry, and what differs in its key.

    Exits with 1 when a kernel is not there.
    """
    from kernelgen.compilers import choice

    if caches.folder is None and caches.shared is None:
        raise KernelgenError("the cache is off, and there is no shared one")
    file = Path(kernel)
    chosen = choice.resolve(compiler)
    if file.suffix == ".pb" or file.is_file():
        requested = _of_file(file, manifests, targets, catalog, chosen.identity)
    else:
        requested = _of_manifests(kernel, manifests, targets, catalog, chosen.identity)
    cache = caches_of.Cache(caches, _warn)
    levels = [(name, level) for name, level in ((LOCAL, cache.folder), (SHARED, cache.shared)) if level]
    looked = [(one, *_look(one.key.name, levels)) for one in requested]
    misses = sum(level is None for _, level, _ in looked)
    heads = _heads(levels) if misses else []
    values = []
    for one, level, damage in looked:
        near = None if level else _nearest(one, heads)
        if output_format == "json":
            value: dict[str, Any] = {"kernel": one.kernel, "config": one.config, "name": one.key.name}
            value |= {"key": one.key.to_json(), "found": level, "damaged": damage, "nearest": None}
            if near:
                value["nearest"] = {"kernel": near.kernel, "name": near.key.name, "key": near.key.to_json()}
            values.append(value)
            continue
        hit = "hit" if level == LOCAL else "hit, in the shared cache"
        click.echo(f"{one.kernel} for {one.config}: {hit if level else 'miss'}")
        if damage and not level:
            click.echo(f"  its entry is damaged: {damage}")
        elif near:
            of = "" if near.kernel == one.kernel else f" of {near.kernel}"
            click.echo(f"  nearest: the entry {near.key.name[:12]}{of}; - is in its key, + in this one")
            click.echo("".join(f"    {line}\n" for line in _differences(near.key, one.key)), nl=False)
        elif level is None:
            click.echo("  there is no entry of this kernel or of the same HLO")
    if output_format == "json":
        click.echo(json.dumps(values, indent=1))
    else:
        click.echo(f"{len(looked) - misses} of {len(looked)} in the cache")
    return EXIT_FAILED if misses else EXIT_OK


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _look(name: str, levels: _Levels) -> tuple[str | None, str | None]:
    """Returns the level that has an entry, and the damage of one that can't be used. Changes nothing."""
    damage = None
    for level, store in levels:
        try:
            if store.read(name):
                return level, None
        except DamagedEntry as problem:
            damage = f"{store}: {problem}"
        except OSError as problem:
            _warn(f"{store} can't be read: {problem}")
    return None, damage


def _heads(levels: _Levels) -> list[EntryHead]:
    heads: list[EntryHead] = []
    for _, store in levels:
        try:
            heads += store.heads()
        except OSError as problem:
            _warn(f"{store} does not list its entries, so none of them counts as the nearest: {problem}")
    return heads


def _nearest(one: _Requested, heads: Sequence[EntryHead]) -> EntryHead | None:
    """Returns the entry that is most likely meant: of the same kernel or the same HLO, with the fewest differences."""
    candidates = [head for head in heads if head.kernel == one.kernel or head.key.hlo_sha256 == one.key.hlo_sha256]
    return min(
        candidates,
        # Among equally near entries the first by name, so that the answer is reproducible.
        key=lambda head: (len(_differences(head.key, one.key)), head.kernel != one.kernel, head.key.name),
        default=None,
    )


def _differences(old: NeffKey, new: NeffKey) -> list[str]:
    diff = list(difflib.unified_diff(_parts(old), _parts(new), n=0, lineterm=""))[2:]
    return [f"{line[0]} {line[1:]}" for line in diff if not line.startswith("@@")]


def _parts(key: NeffKey) -> list[str]:
    # A flag and its value are one line.
    flags = re.split(" (?=-)", " ".join(key.flags))
    return [f"HLO {key.hlo_sha256[:12]}", f"compiler {key.compiler}", *flags]


def _of_file(
    file: Path, manifests: Sequence[Path], targets: Sequence[str], catalog: Catalog, identity: str
) -> list[_Requested]:
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
    return [_Requested(kernel_of(file), config.key, NeffKey.make(hlo, identity, config.flags())) for config in configs]


def _of_manifests(
    pattern: str, manifests: Sequence[Path], targets: Sequence[str], catalog: Catalog, identity: str
) -> list[_Requested]:
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
                _Requested(kernel.id, n.config, NeffKey.make(data, identity, configs[n.config].flags()))
                for n in plan.neffs
                if n.kernel == kernel.id
            ]
    return wanted


def _plan(manifests: Sequence[Path], targets: Sequence[str], catalog: Catalog) -> Plan:
    from kernelgen import manifest
    from kernelgen.plan import Plan

    return Plan.merge(options.only_targets(manifest.load(manifests, catalog), targets))


# --- keeping it in order --------------------------------------------------------------------------------------------------


@command.command()
@options.cache_options
@_format
def info(caches: CacheSettings, output_format: str) -> None:
    """Print the paths and the contents of the caches."""
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
    if caches.shared is None:
        return None
    store = caches_of.Cache(caches, _warn).shared
    assert store is not None
    try:
        store.read("0" * 64)
        state = "it answers"
    except OSError as problem:
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
    folder.sweep()
    count = damaged = unreadable = 0
    for name in (stored.name for stored in folder.entries()):
        count += 1
        try:
            folder.read(name)
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

    count, damaged = archive.write(file, folder)
    for name in damaged:
        _warn(f"{folder.path(name)} is damaged and left out")
    click.echo(f"{file}: {_entries(count)}, {binary_size(file.stat().st_size)}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@_folder_option
def import_(file: Path, folder: Folder) -> None:
    """Add the entries of an exported cache.

    Every entry in the tar file is checked before the first is added. If one is damaged, nothing is added.
    """
    from kernelgen.cache import archive

    try:
        with fileio.open_input(file):
            pass
    except OSError as error:
        raise KernelgenError(f"{file}: {error.strerror}") from None
    added, known = archive.read(file, folder)
    click.echo(f"{folder}: {_entries(added)} added, {known} already there")


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
