"""A folder of entries that the builds of a machine share, and of several machines if it is on a network file system.

    <name>.entry     an entry; whole from the moment it has the name
    tmp/             what is being written
    lock             of no content: a process that makes a NEFF holds the lock of a byte of it, the one that the NEFF's name says

Nothing here must be cleaned up after a process that was killed: locks end with their holder, and what it was writing has no name
yet and is removed by the next writer. Only which entries were used last depends on the clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelgen.cache import entry
from kernelgen.cache.entry import DamagedEntry, EntryHead

_TMP = "tmp"
_LOCK = "lock"
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{12}")
"""What files in `tmp` are called (`_temporary`)."""

_POLL = 0.25
"""Seconds between two looks at a lock, at most. Waiting in the system has no time limit."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in a folder, unread.

    Attributes:
        name: the key's.
        size: bytes of the file.
        used: when it was last written or read, in nanoseconds since the epoch by the clock of that time.
    """

    name: str
    size: int
    used: int


@dataclass(frozen=True, slots=True)
class Folder:
    """See the module. Nothing is made before the first entry is written.

    Attributes:
        root: where it is.
    """

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        """Returns the file of an entry."""
        return self.root / entry.file_name(name)

    def read(self, name: str) -> bytes | None:
        """Returns an entry's bytes as they are, None where the cache has none; `entry.unpack` checks them.

        Raises:
            OSError: it can't be read.
            Damaged: it is not a regular file, or has not the size that it says; the caller should `drop` it.
        """
        return self._read(name, None)

    def head(self, name: str) -> EntryHead | None:
        """Returns what an entry says about itself, None where the cache has none.

        Raises:
            OSError, Damaged: as `read`; it is not an entry of that name.
        """
        data = self._read(name, entry.MAX_HEAD)
        return None if data is None else entry.read_head(data, name)[0]

    def _read(self, name: str, count: int | None) -> bytes | None:
        try:
            # No other file, and no waiting for a pipe's writer: a folder that others write to may hold anything.
            file = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise DamagedEntry("it is not a regular file") from None
            raise
        with os.fdopen(file, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise DamagedEntry("it is not a regular file")
            if count is not None:
                return stream.read(count)
            # Looked at before it is read: a file of no content may be larger than the machine's memory.
            size = os.fstat(stream.fileno()).st_size
            entry.check_size(stream.read(entry.MAX_HEAD), size, name)
            stream.seek(0)
            return stream.read(size)

    def used(self, name: str) -> None:
        """Remembers that an entry was used now; `prune` removes others first."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name))

    def write(self, name: str, data: bytes) -> None:
        """Publishes an entry by rename, in place of one that may be there.

        Raises:
            OSError: the folder can't be written, or its disk is full.
        """
        folder = self.root / _TMP
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and kernelgen keeps its own files there", str(folder))
        # Here, so that nobody needs to clean up: the next writer removes what a killed build left.
        self._sweep(folder)
        file, temporary = _temporary(folder, name)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            temporary.replace(self.path(name))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def drop(self, name: str) -> bool:
        """Removes an entry; returns whether it is gone."""
        try:
            self.path(name).unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def entries(self) -> Iterator[StoredEntry]:
        """Yields the entries, in no order.

        Raises:
            OSError: the folder can't be read.
        """
        try:
            scan = os.scandir(self.root)
        except FileNotFoundError:
            return
        with scan:
            for file in scan:
                if name := entry.name_of(file.name):
                    try:
                        status = file.stat(follow_symlinks=False)
                    except FileNotFoundError:  # removed meanwhile
                        continue
                    yield StoredEntry(name, status.st_size, status.st_mtime_ns)

    def sweep(self) -> None:
        """Removes what writers that were killed left behind."""
        self._sweep(self.root / _TMP)

    @staticmethod
    def _sweep(folder: Path) -> None:
        """Removes files that this module made and whose writers are dead. Links are not followed: not to the folder, not in it."""
        with contextlib.suppress(OSError):
            own = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                with os.scandir(own) as scan:
                    names = [file.name for file in scan if _TEMPORARY.fullmatch(file.name)]
                for name in names:
                    with contextlib.suppress(OSError):
                        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                        file = os.open(name, flags, dir_fd=own)
                        try:
                            # A living writer has the lock: then this raises, and the file stays.
                            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            os.unlink(name, dir_fd=own)
                        finally:
                            os.close(file)
            finally:
                os.close(own)

    @contextlib.contextmanager
    def locked(self, name: str, patience: float) -> Iterator[None]:
        """Locks an entry for the process that makes it, and waits for another process of this machine that does.

        Where files can't be locked, and when patience is at its end, the block runs without: then work may be done twice.

        Args:
            name: the entry's.
            patience: seconds to wait.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # A FIFO would have no end, and a link may lead anywhere.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self.root / _LOCK, flags, 0o666)
        except OSError:
            # What can't be written to has no use for the lock either: the entry could not be published.
            yield
            return
        try:
            with contextlib.suppress(OSError):
                # 60 bits of the name: an offset is a signed number of 64. Two NEFFs that share a byte wait for each other, no more.
                _lock_byte(file, int(name[:15], 16), patience)
            yield
        finally:
            os.close(file)


def _temporary(folder: Path, name: str) -> tuple[int, Path]:
    """Returns a new file, open and locked: who gets the lock of such a file knows that its writer is dead, and removes it."""
    while True:
        path = folder / f"{name}.{secrets.token_hex(6)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, path
        os.close(file)  # another's sweep came before the lock


def _lock_byte(file: int, byte: int, patience: float) -> None:
    """Locks one byte of a file for this descriptor; the system unlocks it when the descriptor is closed or its process dies.

    Raises:
        OSError: the file system has no locks, or patience is at its end.
    """
    # struct flock of Linux on 64-bit machines. A lock of the descriptor and not of the process: threads exclude each other, too.
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
