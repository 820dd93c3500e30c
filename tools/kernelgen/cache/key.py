"""Differences between two keys of NEFFs, to explain a cache miss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelgen.neff.identity import NeffKey


@dataclass(frozen=True, slots=True)
class Difference:
    """A part in which two keys differ.

    Attributes:
        part: `HLO`, `compiler`, `target`, or a flag's name.
        there: its value in the existing key; None if the flag is absent.
        wanted: its value in the requested key.
    """

    part: str
    there: str | None
    wanted: str | None


def differences(there: NeffKey, wanted: NeffKey) -> list[Difference]:
    """Returns the differences between an entry's key and the requested key, flag by flag."""
    found = []
    for part, one, other in (
        ("HLO", there.hlo_sha256, wanted.hlo_sha256),
        ("compiler", there.compiler, wanted.compiler),
        ("target", there.target, wanted.target),
    ):
        if one != other:
            found.append(Difference(part, one, other))
    ours, theirs = _flags(there.flags), _flags(wanted.flags)
    for name in dict.fromkeys([*ours, *theirs]):
        # The target is compared separately.
        if name != "--target" and ours.get(name) != theirs.get(name):
            found.append(Difference(name, ours.get(name), theirs.get(name)))
    # The same flags in another order are different arguments.
    if not found and there != wanted:
        found.append(Difference("flags", " ".join(there.flags), " ".join(wanted.flags)))
    return found


def nearest(wanted: NeffKey, kernel: str, entries: Iterable[tuple[str, NeffKey]]) -> tuple[str, NeffKey] | None:
    """Returns the entry that is most likely meant: of the same kernel or the same HLO, with the fewest differences.

    Args:
        wanted: the missing key.
        kernel: its kernel.
        entries: (kernel, key) of each existing entry.
    """
    candidates = [(id, key) for id, key in entries if id == kernel or key.hlo_sha256 == wanted.hlo_sha256]
    if not candidates:
        return None
    # Among equally near entries the first by name, so that the answer is reproducible.
    return min(candidates, key=lambda c: (len(differences(c[1], wanted)), c[0] != kernel, c[1].name))


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Returns a command line's flags and their values, by name; a flag without a value has an empty one."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else ""
        else:
            found[name] = f"{found[name]} {word}" if found.get(name) else word
    return found
