"""One entry of a cache as bytes: a NEFF, every part of its key, and a digest over both.

    kernelgen-neff-cache 1 <SHA-256 of all that follows this line, hex>
    {"kernel":…,"key":{"compiler":…,"flags":[…],"hlo_sha256":…,"target":…},"neff":{"sha256":…,"size":…},"seconds":…}
    <the NEFF>

An entry is two lines of text (`head -2` shows them) and the NEFF, in one file or one object of a store, so a NEFF can't be
separated from its key. Its name is its key's name: an entry under another name counts as damaged.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from kernelgen.errors import KernelgenError
from kernelgen.neff.identity import FORMAT, NeffKey
from kernelgen.spec.canonical import canonical_json

SUFFIX = ".entry"
"""Suffix of an entry's file name, after the key's name."""

MAX_HEAD = 1 << 16
"""Maximum bytes of an entry's two lines."""

MAX_SIZE = 1 << 31
"""Maximum bytes of an entry: far larger than any NEFF. A file that claims more is not read."""

MAX_SECONDS = 10**7
"""Upper bound of a compile's duration."""

_FIRST = re.compile(rb"kernelgen-neff-cache (\d{1,9}) ([0-9a-f]{64})\n")
_NAME = re.compile(r"[0-9a-f]{64}")


class DamagedEntry(Exception):
    """An unusable entry; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class EntryHead:
    """The header of an entry.

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


def file_name(name: str) -> str:
    """Returns the file name of an entry."""
    return name + SUFFIX


def name_of(file: str) -> str | None:
    """Returns the name of the entry in a file; None if the file is not an entry."""
    name = file.removesuffix(SUFFIX)
    return name if file.endswith(SUFFIX) and _NAME.fullmatch(name) else None


def pack(key: NeffKey, kernel: str, neff: bytes, seconds: int | None = None) -> bytes:
    """Returns an entry; the same arguments give the same bytes.

    Args:
        key: the inputs of the NEFF.
        kernel: the kernel's name, for people.
        neff: the NEFF.
        seconds: duration of the compile, or None if unavailable.

    Raises:
        ValueError: the key's parts or the NEFF exceed the size limits.
    """
    about: dict[str, Any] = {
        "kernel": kernel,
        "key": key.to_json(),
        "neff": {"sha256": hashlib.sha256(neff).hexdigest(), "size": len(neff)},
    }
    if seconds is not None and 0 <= seconds < MAX_SECONDS:
        about["seconds"] = seconds
    line = canonical_json(about).encode() + b"\n"
    # The digest covers the key, too: a changed key must not make a valid NEFF look like another's.
    digest = hashlib.sha256(line)
    digest.update(neff)
    head = f"kernelgen-neff-cache {FORMAT} {digest.hexdigest()}\n".encode() + line
    if len(head) > MAX_HEAD:
        raise ValueError(f"a key of {len(line)} bytes")
    if len(head) + len(neff) > MAX_SIZE:
        raise ValueError(f"a NEFF of {len(neff)} bytes")
    return head + neff


def read_head(data: bytes, name: str) -> tuple[EntryHead, int]:
    """Returns an entry's header, and its size in bytes. Does not check the NEFF.

    Args:
        data: the entry, or its first `MAX_HEAD` bytes.
        name: its name.

    Raises:
        DamagedEntry: this is not an entry of that name.
    """
    match = _FIRST.match(data)
    if not match:
        raise DamagedEntry("it does not begin with the header of an entry")
    if int(match[1]) != FORMAT:
        raise DamagedEntry(f"it has format {int(match[1])}, not {FORMAT}")
    end = data.find(b"\n", match.end(), MAX_HEAD) + 1
    if not end:
        raise DamagedEntry("it is cut off")
    try:
        about = json.loads(data[match.end() : end])
        size = about["neff"]["size"]
        seconds = None if about.get("seconds") is None else int(about["seconds"])
        if seconds is not None and not 0 <= seconds < MAX_SECONDS:
            raise ValueError("no compile takes so long")
        head = EntryHead(
            str(about["kernel"]), NeffKey.from_json(about["key"]), str(about["neff"]["sha256"]), int(size), seconds
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedEntry(f"its second line is damaged: {type(error).__name__}") from None
    if head.key.name != name:
        raise DamagedEntry(f"it is the entry {head.key.name}")
    return head, end


def check_size(start: bytes, size: int, name: str) -> None:
    """Raises if a file's size rules it out as an entry, so that it need not be read.

    Args:
        start: the file's first `MAX_HEAD` bytes.
        size: its size in bytes.
        name: its name.

    Raises:
        DamagedEntry: it is not an entry of that name, or its size differs from its header.
    """
    head, end = read_head(start, name)
    if size > MAX_SIZE:
        raise DamagedEntry(f"it has {size} bytes, more than any entry")
    if size != end + head.size:
        raise DamagedEntry(f"it has {size} bytes, and its header gives {end + head.size}")


def unpack(data: bytes, name: str) -> tuple[EntryHead, bytes]:
    """Returns an entry's header and NEFF, after checking every byte.

    Args:
        data: the entry.
        name: its name.

    Raises:
        DamagedEntry: it is cut off, a byte differs from what was written, or it belongs under another name.
    """
    from kernelgen.neff import container as neff_format  # imports protobuf, which plans do not need

    head, end = read_head(data, name)
    first = data.index(b"\n") + 1
    stated = data[first - 65 : first - 1].decode()  # the digest ends the first line
    if hashlib.sha256(memoryview(data)[first:]).hexdigest() != stated:
        raise DamagedEntry("its digest differs")
    neff = data[end:]
    # The writer may have been faulty or malicious: bytes with a matching digest may still not be a NEFF.
    if len(neff) != head.size or hashlib.sha256(neff).hexdigest() != head.sha256:
        raise DamagedEntry("its NEFF does not have the digest that its header gives")
    try:
        if neff_format.read_header(neff).simulated:
            # A simulated NEFF records its HLO; a real one does not.
            made_of = neff_format.read_simulated(neff).info["hlo_sha256"]
            if made_of != head.key.hlo_sha256:
                raise DamagedEntry(f"its NEFF was compiled from another HLO, {made_of}")
    except KernelgenError as error:
        raise DamagedEntry(error.diagnostics[0].message) from None
    return head, neff
