"""An entry of a cache: `<key>.neff`, a NEFF, and `<key>.json`, its key and its digest. <key> is the name of the key.

A writer writes the NEFF first. A reader reads the JSON first: it gives the NEFF's size and digest, so the reader detects a damaged
NEFF and a NEFF of another writer. The name is the digest of the key, so the reader also detects a changed key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from kernelgen.neff.identity import NeffKey

JSON, NEFF = ".json", ".neff"
"""Suffixes of an entry's files."""

_FILE = re.compile(r"([0-9a-f]{64})\.(?:json|neff)")


class DamagedEntry(Exception):
    """An unusable entry; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class EntryHead:
    """The JSON of an entry.

    Attributes:
        kernel: the first kernel that it was made for; others with the same HLO use it too.
        key: the inputs of the NEFF.
        sha256: digest of the NEFF, in hex.
        size: bytes of the NEFF.
        seconds: duration of the compile in whole seconds; None if not recorded.
    """

    kernel: str
    key: NeffKey
    sha256: str
    size: int
    seconds: int | None = None

    @staticmethod
    def make(key: NeffKey, kernel: str, neff: bytes, seconds: int | None = None) -> EntryHead:
        """Returns the head of a new NEFF."""
        return EntryHead(kernel, key, hashlib.sha256(neff).hexdigest(), len(neff), seconds)

    def encode(self) -> bytes:
        """Returns the JSON, one flag a line; `read_head` is the inverse."""
        value = {
            "kernel": self.kernel,
            "key": self.key.to_json(),
            "neff": {"sha256": self.sha256, "size": self.size},
            "seconds": self.seconds,
        }
        return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def name_of(file: str) -> str | None:
    """Returns the name of the entry that a file belongs to; None if it is not a file of an entry."""
    match = _FILE.fullmatch(file)
    return match[1] if match else None


def read_head(text: bytes, name: str) -> EntryHead:
    """Returns the head in an entry's JSON.

    Raises:
        DamagedEntry: it is not the JSON of the entry of that name.
    """
    try:
        value = json.loads(text)
        neff, seconds = value["neff"], value["seconds"]
        head = EntryHead(
            str(value["kernel"]),
            NeffKey.from_json(value["key"]),
            str(neff["sha256"]),
            int(neff["size"]),
            None if seconds is None else int(seconds),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedEntry(f"its {JSON} is damaged: {type(error).__name__}") from None
    if head.key.name != name:
        raise DamagedEntry(f"its {JSON} is that of the entry {head.key.name}")
    return head


def read(get: Callable[[str], bytes | None], name: str) -> tuple[EntryHead, bytes] | None:
    """Returns an entry's head and NEFF after checking every byte; None if there is no entry.

    Args:
        get: returns the bytes of a file, or None if there is no such file.
        name: the entry's.

    Raises:
        DamagedEntry: a file is damaged or lacks, or they do not belong together.
    """
    text = get(name + JSON)
    if text is None:
        return None
    head = read_head(text, name)
    neff = get(name + NEFF)
    if neff is None:
        raise DamagedEntry(f"its {NEFF} is missing")
    if len(neff) != head.size or hashlib.sha256(neff).hexdigest() != head.sha256:
        raise DamagedEntry(f"its {NEFF} does not have the digest in its {JSON}")
    return head, neff
