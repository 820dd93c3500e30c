"""Explains why a NEFF is in a cache or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.cache import LOCAL, SHARED, Cache, NeffKey, entry
from kernelgen.cache.entry import DamagedEntry
from kernelgen.cache.folder import Folder
from kernelgen.cache.key import Difference, differences, nearest
from kernelgen.cache.shared import Shared, Unavailable

MAX_HEADS = 10_000
"""Maximum number of entries of a shared cache that the search for the nearest one reads."""


@dataclass(frozen=True, slots=True)
class RequestedNeff:
    """A NEFF that a build would look up.

    Attributes:
        kernel: its kernel.
        config: key of its settings.
        key: its inputs.
    """

    kernel: str
    config: str
    key: NeffKey


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of a lookup.

    Attributes:
        wanted: the NEFF.
        found: `local`, `shared`, or None for a miss.
        damaged: the reason why the entry of that name is unusable, or None.
        nearest: kernel and key of the nearest entry, if the lookup misses and there is one.
    """

    wanted: RequestedNeff
    found: str | None
    damaged: str | None
    nearest: tuple[str, NeffKey] | None

    @property
    def differences(self) -> list[Difference]:
        """The differences between the key and the nearest entry's key."""
        return differences(self.nearest[1], self.wanted.key) if self.nearest else []

    def to_json(self) -> dict[str, Any]:
        near = None
        if self.nearest:
            parts = [{"part": d.part, "there": d.there, "wanted": d.wanted} for d in self.differences]
            near = {"kernel": self.nearest[0], "name": self.nearest[1].name, "differences": parts}
        return {
            "kernel": self.wanted.kernel,
            "config": self.wanted.config,
            "name": self.wanted.key.name,
            "key": self.wanted.key.to_json(),
            "found": self.found,
            "damaged": self.damaged,
            "nearest": near,
        }


def explain(wanted: Sequence[RequestedNeff], cache: Cache) -> tuple[list[Explanation], list[str]]:
    """Returns the results of the lookups, and remarks on failed reads. Changes nothing."""
    remarks: dict[str, None] = {}
    looked = [(one, *_look(one, cache, remarks)) for one in wanted]
    heads: list[tuple[str, NeffKey]] = []
    if any(found is None for _, found, _ in looked):
        heads = list(_heads(cache, remarks))
    return [
        Explanation(one, found, damaged, nearest(one.key, one.kernel, heads) if found is None else None)
        for one, found, damaged in looked
    ], list(remarks)


def _look(one: RequestedNeff, cache: Cache, remarks: dict[str, None]) -> tuple[str | None, str | None]:
    damaged = None
    levels: list[tuple[str, Folder | Shared | None]] = [(LOCAL, cache.folder), (SHARED, cache.shared)]
    for level, store in levels:
        if store is None:
            continue
        try:
            data = store.read(one.key.name)
            if data is not None:
                entry.unpack(data, one.key.name)
                return level, None
        except DamagedEntry as problem:
            damaged = f"{store}: {problem}"
        except (OSError, Unavailable) as problem:
            remarks[f"{store} can't be read: {problem}"] = None
    return None, damaged


def _heads(cache: Cache, remarks: dict[str, None]) -> Iterator[tuple[str, NeffKey]]:
    for store in (cache.folder, cache.shared):
        if isinstance(store, Folder):
            yield from _folder_heads(store, remarks)
        elif store is not None:
            try:
                names = store.names()
                if len(names) > MAX_HEADS:
                    remarks[f"{store} has {len(names)} entries; the nearest one is looked for among {MAX_HEADS}"] = None
                yield from ((head.kernel, head.key) for head in store.heads(names[:MAX_HEADS]))
            except Unavailable as problem:
                remarks[f"{store} does not list its entries, so none of them counts as the nearest: {problem}"] = None


def _folder_heads(folder: Folder, remarks: dict[str, None]) -> Iterator[tuple[str, NeffKey]]:
    try:
        for stored in folder.entries():
            with contextlib.suppress(DamagedEntry, OSError):
                if head := folder.head(stored.name):
                    # A damaged entry counts only as damaged; its header is not used.
                    yield head.kernel, head.key
    except OSError as problem:
        remarks[f"{folder} can't be read: {problem}"] = None
