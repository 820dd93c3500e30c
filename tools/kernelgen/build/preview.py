"""Previews a build: its steps and their estimated time. `kernelgen build --dry-run` prints it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kernelgen import cache
from kernelgen.build.estimates import Forecast, Record, forecast
from kernelgen.build.folder import BuildSettings, is_whole, neff_file
from kernelgen.build.up_to_date import HloFiles
from kernelgen.emitters.library import Library
from kernelgen.plan import Neff, Plan


@dataclass(frozen=True, slots=True)
class Preview:
    """The steps that a build would run now.

    Attributes:
        emits: number of kernels that it would emit.
        compiles: NEFFs that it would make at most: a new emit may give the old HLO, and a cache may have the NEFF.
        lacking: the part of `compiles` that is not in this machine's cache; only kernels whose HLO is available.
        forecast: estimated time to compile `lacking`.
        exact: whether the build certainly compiles all of `lacking`, if every kernel compiles.
    """

    emits: int
    compiles: tuple[Neff, ...]
    lacking: tuple[Neff, ...]
    forecast: Forecast
    exact: bool


def preview(plan: Plan, libraries: Sequence[Library], settings: BuildSettings) -> Preview:
    """Returns the steps that a build would run now. It emits nothing and reads no shared cache."""
    configs = {config.key: config for config in plan.configs}
    made = HloFiles(settings.state / "hlo", libraries)
    current = {
        kernel.id: made.hlo(kernel).read_bytes()
        for kernel in plan.kernels
        if made.is_current(kernel, made.inputs(kernel))
    }
    compiles, lacking = [], []
    folder = cache.Folder(settings.cache.folder) if settings.cache.folder else None
    for neff in plan.neffs:
        hlo = current.get(neff.kernel)
        if hlo is not None and is_whole(neff_file(settings, hlo, configs[neff.config])):
            continue
        compiles.append(neff)
        key = None if hlo is None else cache.NeffKey.make(hlo, settings.identity, configs[neff.config].flags())
        if folder is None or key is None or not folder.path(key.name).is_file():
            lacking.append(neff)
    return Preview(
        len(plan.kernels) - len(current),
        tuple(compiles),
        tuple(lacking),
        forecast([neff.kernel for neff in lacking], _records(folder, settings.identity), _at_once(lacking, settings)),
        settings.cache.shared is None and all(neff.kernel in current for neff in lacking),
    )


def _records(folder: cache.Folder | None, identity: str) -> list[Record]:
    """Returns a cache's records of compiles by this compiler version, or by all its versions if there are none."""
    found: dict[str, list[Record]] = {}
    with contextlib.suppress(OSError):
        for head in folder.heads() if folder else ():
            if head.seconds is not None:
                found.setdefault(head.key.compiler, []).append(Record(head.kernel, head.seconds))
    name = identity.partition(" ")[0]
    others = [r for compiler, records in found.items() if compiler.partition(" ")[0] == name for r in records]
    return found.get(identity) or others


def _at_once(neffs: Sequence[Neff], settings: BuildSettings) -> int:
    """Returns the number of compiles that `Executor` runs in parallel."""
    needs = [neff.needs(settings.compiler) for neff in neffs]
    memory, cpus = (max((need[i] for need in needs), default=1) for i in (0, 1))
    return max(1, min(settings.memory_mb // memory, settings.jobs // cpus))
