"""A folder of cache entries that the builds of a machine share, or several machines on a network file system.

    <name>.entry     an entry; complete from the moment it has the name
    tmp/             files in progress
    lock             an empty file: a process that makes a NEFF locks one byte of it, selected by the NEFF's name

A killed process leaves nothing to clean up by hand: its locks end with it, and the next writer removes its unfinished files, which
have no entry's name yet. Only the order of last use depends on the clock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
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
"""Names of files in `tmp` (`_temporary`)."""

_POLL = 0.25
"""Maximum seconds between two attempts to lock. A blocking system call would have no time limit."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry in a folder, unread.

    Attributes:
        name: the key's.
        size: bytes of the file.
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
        """Returns the path of an entry."""
        return self.root / entry.file_name(name)

    def read(self, name: str) -> bytes | None:
        """Returns an entry's unchecked bytes, or None if there is none; `entry.unpack` checks them.

        Raises:
            OSError: it can't be read.
            DamagedEntry: it is not a regular file, or its size differs from its header; the caller should `drop` it.
        """
        return self._read(name, None)

    def head(self, name: str) -> EntryHead | None:
        """Returns an entry's header, or None if there is no entry.

        Raises:
            OSError, DamagedEntry: as `read`, or it is not an entry of that name.
        """
        data = self._read(name, entry.MAX_HEAD)
        return None if data is None else entry.read_head(data, name)[0]

    def _read(self, name: str, count: int | None) -> bytes | None:
        try:
            # Open only a regular file, and never wait for a pipe's writer: other users may write to the folder.
            file = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise DamagedEntry("it is not a regular file") from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise DamagedEntry("it is not a regular file")
        with os.fdopen(file, "rb") as stream:
            if count is not None:
                return stream.read(count)
            # Check the size before reading: a sparse file may be larger than the machine's memory.
            size = os.fstat(stream.fileno()).st_size
            entry.check_size(stream.read(entry.MAX_HEAD), size, name)
            stream.seek(0)
            return stream.read(size)

    def used(self, name: str) -> None:
        """Records a use of an entry now; `prune` removes least recently used entries first."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name))

    def write(self, name: str, data: bytes) -> None:
        """Publishes an entry by rename; replaces an existing one.

        Raises:
            OSError: the folder can't be written, or its disk is full.
        """
        folder = self.root / _TMP
        folder.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and kernelgen keeps its own files there", str(folder))
        # Each writer removes the files of killed writers, so nobody needs to clean up.
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
        """Removes an entry, or a folder of its name, which would block it forever; returns whether it is gone."""
        path = self.path(name)
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
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
        """Removes files of killed writers."""
        self._sweep(self.root / _TMP)

    @staticmethod
    def _sweep(folder: Path) -> None:
        """Removes temporary files whose writers are dead. Does not follow links: neither to the folder nor in it."""
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
                            # A living writer holds the lock: then this raises, and the file stays.
                            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            os.unlink(name, dir_fd=own)
                        finally:
                            os.close(file)
            finally:
                os.close(own)

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
            # Reading a FIFO would block, and a link may lead anywhere.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self.root / _LOCK, flags, 0o666)
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


def _temporary(folder: Path, name: str) -> tuple[int, Path]:
    """Returns a new file, open and locked. A process that gets the lock of such a file removes it: its writer is dead."""
    while True:
        path = folder / f"{name}.{secrets.token_hex(6)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, path
        os.close(file)  # another process's sweep locked it first


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
