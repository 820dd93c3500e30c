"""`kernelgen cache`: lists the cache of NEFFs and maintains it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import click

from kernelgen import cache as caches_of
from kernelgen.cache import CacheSettings, DamagedEntry, Folder
from kernelgen.cli import options
from kernelgen.cli.units import binary_size
from kernelgen.errors import EXIT_FAILED, EXIT_OK, KernelgenError

_format = click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@click.group(short_help="Show, prune or verify the cache of NEFFs.")
def command() -> None:
    """Show, prune or verify the cache of NEFFs.

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


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


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


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
