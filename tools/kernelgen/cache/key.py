"""What a NEFF depends on, as a value: its digest is the name of a cache's entry, its parts explain a miss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.canonical import canonical_json
from kernelgen.compilers.settings import CompileConfig

FORMAT = 1
"""Version of the cache's format; part of every name, so that no version reads another's entries."""


@dataclass(frozen=True, slots=True)
class Key:
    """All that a NEFF depends on.

    Attributes:
        hlo_sha256: digest of the canonical HLO's bytes, in hex.
        compiler: the compiler's identity: name and version.
        target: the target.
        flags: the compiler's arguments, every one explicit; the target is among them.
    """

    hlo_sha256: str
    compiler: str
    target: str
    flags: tuple[str, ...]

    @staticmethod
    def make(hlo: bytes, compiler: str, config: CompileConfig) -> Key:
        """Returns the key of a NEFF.

        Args:
            hlo: the serialized HLO.
            compiler: the compiler's identity.
            config: target and settings.
        """
        return Key.of_digest(hashlib.sha256(hlo).hexdigest(), compiler, config)

    @staticmethod
    def of_digest(hlo_sha256: str, compiler: str, config: CompileConfig) -> Key:
        """Returns the key of a NEFF of the HLO with this digest; see `make`."""
        return Key(hlo_sha256, compiler, config.target, tuple(config.flags()))

    @property
    def name(self) -> str:
        """The digest of the parts: 64 hex digits."""
        return hashlib.sha256(canonical_json([FORMAT, self.to_json()]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "compiler": self.compiler,
            "flags": list(self.flags),
            "hlo_sha256": self.hlo_sha256,
            "target": self.target,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Key:
        """Returns the key that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: `value` is no such key.
        """
        flags = value["flags"]
        texts = [value["hlo_sha256"], value["compiler"], value["target"], *flags]
        if not isinstance(flags, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("its parts are not text")
        return Key(value["hlo_sha256"], value["compiler"], value["target"], tuple(flags))


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
