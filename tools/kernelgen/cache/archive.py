"""Cache entries as a tar, for a machine without a network. Equal entries give equal bytes; reading verifies every byte.

The members are the entries' files, sorted by name, without times, owners or modes. Reading checks every member first, and then
imports all of them or none.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kernelgen import fileio
from kernelgen.cache import entry
from kernelgen.cache.entry import DamagedEntry
from kernelgen.cache.folder import Folder
from kernelgen.errors import Diagnostic, KernelgenError

_END = bytes(2 * tarfile.BLOCKSIZE)
_CHUNK = 1 << 20
_MAX_MISTAKES = 1000
"""Maximum number of mistakes in a report."""

# Exceptions that tarfile raises for bytes that are not a header.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError)


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        entries: number of exported entries.
        left_out: names of damaged entries, which were skipped.
    """

    entries: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The result of an import.

    Attributes:
        added: number of entries that were missing or damaged before.
        known: number of entries that were already there.
    """

    added: int
    known: int


def write(path: str | Path, folder: Folder) -> Exported:
    """Writes all whole entries of a folder to a tar, which appears by rename.

    Raises:
        OSError: the folder can't be read, or the tar can't be written.
    """
    left_out = []
    count = 0
    with fileio.replacing(path) as temporary, temporary.open("wb") as file:
        for name in sorted(stored.name for stored in folder.entries()):
            try:
                data = folder.read(name)
                if data is None:  # removed meanwhile
                    continue
                entry.unpack(data, name)
            except DamagedEntry:
                left_out.append(name)
                continue
            member = tarfile.TarInfo(entry.file_name(name))
            member.size = len(data)
            member.mode = 0o644
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            file.write(data)
            file.write(bytes(-len(data) % tarfile.BLOCKSIZE))
            count += 1
        file.write(_END)
    return Exported(count, tuple(left_out))


def read(path: str | Path, folder: Folder) -> ImportResult:
    """Adds the entries in a tar to a folder, after checking every byte of all of them.

    Raises:
        KernelgenError: the file is not a tar, is cut off, or has a member that is not a whole entry; then nothing was added.
        OSError: the file can't be read, or the folder can't be written; entries added before that are whole.
    """
    path = Path(path)
    with fileio.open_input(path) as file:
        mistakes: list[Diagnostic] = []
        names = dict.fromkeys(name for name, _ in _members(path, file, mistakes))
        if mistakes:
            raise KernelgenError(mistakes)
        added = 0
        for name, data in _members(path, file, mistakes):
            if not mistakes and not _there(folder, name):
                folder.write(name, data)
                added += 1
        if mistakes:
            raise KernelgenError(mistakes)
    return ImportResult(added, len(names) - added)


def _there(folder: Folder, name: str) -> bool:
    try:
        data = folder.read(name)
        if data is not None:
            entry.unpack(data, name)
    except DamagedEntry:
        return False
    return data is not None


def _members(path: Path, file: IO[bytes], mistakes: list[Diagnostic]) -> Iterator[tuple[str, bytes]]:
    """Yields name and bytes of each member that is a whole entry; adds the problems of others to `mistakes`."""

    def wrong(what: str) -> None:
        mistakes.append(Diagnostic(f"{path}: {what}"))

    total = path.stat().st_size
    offset = 0
    seen: set[str] = set()
    while True:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
        if len(block) == tarfile.BLOCKSIZE and not block.strip(b"\0"):
            break
        try:
            # Parse one header at a time: tarfile's handling of extension headers has no bounds.
            member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except _TAR_ERRORS as error:
            wrong(
                f"it is cut off or damaged after {len(seen)} entries" if offset else f"not an exported cache: {error}"
            )
            return
        shown = ascii(member.name[:200])
        name = entry.name_of(member.name)
        if len(mistakes) >= _MAX_MISTAKES:
            return
        if not 0 <= member.size <= total:
            wrong(f"{shown} claims {member.size} bytes, and the file has {total}")
            return
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            wrong(f"{shown} is not a regular file: an exported cache holds nothing else")
        elif name is None:
            wrong(f"{shown} is not the name of an entry")
        elif name in seen:
            wrong(f"{shown} is a duplicate")
        else:
            seen.add(name)
            try:
                file.seek(offset + tarfile.BLOCKSIZE)
                entry.check_size(file.read(min(entry.MAX_HEAD, member.size)), member.size, name)
                file.seek(offset + tarfile.BLOCKSIZE)
                data = file.read(member.size)
                if len(data) < member.size:
                    raise DamagedEntry("it is cut off")
                entry.unpack(data, name)
            except DamagedEntry as problem:
                wrong(f"{shown}: {problem}")
            else:
                yield name, data
        offset += tarfile.BLOCKSIZE + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    if not _zeros(iter(lambda: file.read(_CHUNK), b""), tarfile.BLOCKSIZE):
        wrong(f"it is cut off or damaged after {len(seen)} entries")


def _zeros(chunks: Iterable[bytes], least: int) -> bool:
    count = 0
    for chunk in chunks:
        if chunk.strip(b"\0"):
            return False
        count += len(chunk)
    return count >= least
