"""In what two keys of NEFFs differ, to explain why a cache lacks one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelgen.neff.identity import Key


@dataclass(frozen=True, slots=True)
class Difference:
    """A part in which two keys differ.

    Attributes:
        part: `HLO`, `compiler`, `target`, or a flag's name.
        there: its value in the one key; None when it lacks the flag.
        wanted: its value in the other.
    """

    part: str
    there: str | None
    wanted: str | None


def differences(there: Key, wanted: Key) -> list[Difference]:
    """Returns the parts in which an entry's key differs from the one that is wanted, flag by flag."""
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
        # The target is a part of its own.
        if name != "--target" and ours.get(name) != theirs.get(name):
            found.append(Difference(name, ours.get(name), theirs.get(name)))
    # The same flags in another order are other arguments.
    if not found and there != wanted:
        found.append(Difference("flags", " ".join(there.flags), " ".join(wanted.flags)))
    return found


def nearest(wanted: Key, kernel: str, entries: Iterable[tuple[str, Key]]) -> tuple[str, Key] | None:
    """Returns the entry that was most likely meant: of the same kernel or the same HLO, with the fewest other parts.

    Args:
        wanted: the key that was not found.
        kernel: whose it is.
        entries: (kernel, key) of what there is.
    """
    candidates = [(id, key) for id, key in entries if id == kernel or key.hlo_sha256 == wanted.hlo_sha256]
    if not candidates:
        return None
    # Of equally near ones the first by name, so that the answer is the same again.
    return min(candidates, key=lambda c: (len(differences(c[1], wanted)), c[0] != kernel, c[1].name))


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Returns a command line's flags by name, with their values; what has none has an empty one."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else ""
        else:
            found[name] = f"{found[name]} {word}" if found.get(name) else word
    return found
