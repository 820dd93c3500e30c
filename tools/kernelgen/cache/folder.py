"""A folder of cache entries that the builds of a machine share, or several machines on a network file system.

    <key>.neff, <key>.json    an entry (`kernelgen.cache.entry`)
    lock                      an empty file: a process that makes a NEFF locks one byte of it, selected by the NEFF's name

Each file appears by rename. A process that is killed leaves at most two files with names of their own, and its locks end with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelgen import fileio
from kernelgen.cache import entry
from kernelgen.cache.entry import DamagedEntry, EntryHead

_POLL = 0.25
"""Maximum seconds between two attempts to lock. A blocking system call would have no time limit."""

_LEFT_SECONDS = 3600
"""Age of an unfinished file whose writer must be dead: writing takes seconds."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in a folder, unread.

    Attributes:
        name: the key's.
        size: bytes of its files.
        used: time of the last write or read, in nanoseconds since the epoch by the clock at that time.
    """

    name: str
    size: int
    used: int


@dataclass(frozen=True, slots=True)
class Folder:
    """A cache folder; see the module. It is created with the first entry.

    Attributes:
        root: its path.
    """

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """Returns the path of an entry's JSON."""
        return self.root / f"{name}{entry.JSON}"

    def neff(self, name: str) -> Path:
        """Returns the path of an entry's NEFF."""
        return self.root / f"{name}{entry.NEFF}"

    def read(self, name: str) -> tuple[EntryHead, bytes] | None:
        """Returns an entry's head and NEFF after checking every byte; None if there is no entry.

        Raises:
            OSError: it can't be read.
            DamagedEntry: it is damaged.
        """
        return entry.read(self._get, name)

    def head(self, name: str) -> EntryHead | None:
        """Returns an entry's head, or None if there is no entry.

        Raises:
            OSError, DamagedEntry: as `read`.
        """
        text = self._get(f"{name}{entry.JSON}")
        return None if text is None else entry.read_head(text, name)

    def _get(self, file: str) -> bytes | None:
        try:
            return (self.root / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def heads(self) -> Iterator[EntryHead]:
        """Yields the heads of the entries that have one.

        Raises:
            OSError: the folder can't be read.
        """
        for stored in self.entries():
            with contextlib.suppress(DamagedEntry, OSError):
                if head := self.head(stored.name):
                    yield head

    def used(self, name: str) -> None:
        """Records a use of an entry now; `prune` removes least recently used entries first."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name))

    def write(self, head: EntryHead, neff: bytes) -> None:
        """Publishes an entry; replaces an existing one.

        Raises:
            OSError, KernelgenError: the folder can't be written, or its disk is full.
        """
        name = head.key.name
        # Both files are complete before the first is renamed, which is the NEFF.
        with fileio.replacing(self.path(name)) as about, fileio.replacing(self.neff(name)) as temporary:
            temporary.write_bytes(neff)
            about.write_bytes(head.encode())

    def drop(self, name: str) -> bool:
        """Removes an entry; returns whether it is gone."""
        try:
            for path in (self.path(name), self.neff(name)):
                path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def entries(self) -> list[StoredEntry]:
        """Returns the entries, sorted by name; also a NEFF without its JSON, whose writer was killed.

        Raises:
            OSError: the folder can't be read.
        """
        stored: dict[str, StoredEntry] = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as scan:
            for file in scan:
                if name := entry.name_of(file.name):
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        status = file.stat()
                        other = stored.get(name, StoredEntry(name, 0, 0))
                        size, used = other.size + status.st_size, max(other.used, status.st_mtime_ns)
                        stored[name] = StoredEntry(name, size, used)
        return [stored[name] for name in sorted(stored)]

    def sweep(self) -> None:
        """Removes unfinished files of killed writers."""
        for path in self.root.glob(".*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFT_SECONDS:
                    path.unlink()

    @contextlib.contextmanager
    def locked(self, name: str, patience: float) -> Iterator[None]:
        """Locks an entry for the process that makes it; waits for another process of this machine that holds the lock.

        If files can't be locked, or after `patience`, the block runs without the lock: then work may be done twice.

        Args:
            name: the entry's.
            patience: seconds to wait.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            # An unwritable folder needs no lock: the entry could not be published.
            yield
            return
        try:
            with contextlib.suppress(OSError):
                # 60 bits of the name: an offset is a signed 64-bit number. Two NEFFs that share a byte only wait for each other.
                _lock_byte(file, int(name[:15], 16), patience)
            yield
        finally:
            os.close(file)


def _lock_byte(file: int, byte: int, patience: float) -> None:
    """Locks one byte of a file for this descriptor; the system unlocks it when the descriptor closes or its process dies.

    Raises:
        OSError: the file system has no locks, or `patience` expired.
    """
    # struct flock of Linux on 64-bit machines. The lock belongs to the descriptor, not the process: threads exclude each other.
    request = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    deadline, pause = time.monotonic() + patience, 0.01
    while True:
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
            return
        except OSError as error:
            left = deadline - time.monotonic()
            if error.errno not in (errno.EAGAIN, errno.EACCES) or left <= 0:
                raise
            time.sleep(min(pause, left))
            pause = min(2 * pause, _POLL)
