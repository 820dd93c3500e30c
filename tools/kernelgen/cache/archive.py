"""Cache entries as a plain tar, for a machine without a network. Equal entries give equal bytes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from kernelgen import fileio
from kernelgen.cache import entry
from kernelgen.cache.entry import DamagedEntry, EntryHead
from kernelgen.cache.folder import Folder
from kernelgen.errors import KernelgenError

# Exceptions that tarfile raises for bytes that are not a tar.
_TAR_ERRORS = (tarfile.TarError, ValueError, OverflowError, RecursionError)


def write(path: str | Path, folder: Folder) -> tuple[int, list[str]]:
    """Writes the whole entries of a folder to a tar, which appears by rename.

    Returns:
        the number of entries, and the names of damaged entries, which are left out.

    Raises:
        OSError: the folder can't be read, or the tar can't be written.
    """
    count, damaged = 0, []
    with fileio.replacing(path) as temporary, tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as tar:
        for stored in folder.entries():
            try:
                pair = folder.read(stored.name)
            except DamagedEntry:
                damaged.append(stored.name)
                continue
            if pair is not None:
                count += 1
                head, neff = pair
                for suffix, data in ((entry.JSON, head.encode()), (entry.NEFF, neff)):
                    member = tarfile.TarInfo(stored.name + suffix)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return count, damaged


def read(path: str | Path, folder: Folder) -> tuple[int, int]:
    """Adds the entries in a tar to a folder, after checking every byte of all of them.

    Returns:
        the number of entries that were missing or damaged before, and the number of entries that were already there.

    Raises:
        KernelgenError: the file is not a tar, is cut off, or has anything but whole entries; then nothing was added.
        OSError: the file can't be read, or the folder can't be written; entries added before that are whole.
    """
    with fileio.open_input(path) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                members, end = tar.getmembers(), tar.offset
        except _TAR_ERRORS as error:
            raise KernelgenError(f"{path}: not an exported cache: {error}") from None
        file.seek(end)
        # tarfile ends silently at a damaged header; a whole tar ends with zeros.
        tail = file.read(tarfile.RECORDSIZE)
        if not tail or tail.strip(b"\0"):
            raise KernelgenError(f"{path}: it is cut off or damaged after {len(members)} files")
        files: dict[str, tarfile.TarInfo] = {}
        for member in members:
            if not entry.name_of(member.name):
                raise KernelgenError(f"{path}: {member.name[:200]!a} is not a file of an entry")
            if member.name in files:
                raise KernelgenError(f"{path}: {member.name} is there twice")
            files[member.name] = member

        def get(name: str, limit: int) -> bytes | None:
            if name not in files:
                return None
            file.seek(files[name].offset_data)
            return file.read(min(files[name].size, limit + 1))

        def checked(name: str) -> tuple[EntryHead, bytes]:
            try:
                if pair := entry.read(get, name):
                    return pair
                raise DamagedEntry(f"its {entry.JSON} is missing")
            except DamagedEntry as problem:
                raise KernelgenError(f"{path}: the entry {name} is damaged: {problem}") from None

        names = sorted({member.name.partition(".")[0] for member in members})
        for name in names:
            checked(name)
        added = 0
        for name in names:
            if not _has(folder, name):
                folder.write(*checked(name))
                added += 1
    return added, len(names) - added


def _has(folder: Folder, name: str) -> bool:
    try:
        return folder.read(name) is not None
    except DamagedEntry:
        return False
