"""Outputs that appear whole or not at all: each is written beside its destination, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from kernelgen.errors import KernelgenError

_SPECIAL = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_replaceable(path: str | Path) -> None:
    """Refuses an existing output that is not a regular file: a rename would replace `/dev/null` by a file.

    Raises:
        KernelgenError: `path` is a device, a FIFO or a socket, or is not the name of a file.
    """
    if Path(path).name in ("", ".."):
        raise KernelgenError(f"'{path}' is not the path of a file to write")
    try:
        kind = _SPECIAL.get(stat.S_IFMT(Path(path).lstat().st_mode))
    except OSError:
        return  # a path that does not exist can be created, or the attempt reports the reason
    if kind:
        raise KernelgenError(f"{path} is {kind}: expected the path of a file to write")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a path to write to; it becomes `path` when the block ends, and is removed when the block raises.

    Raises:
        KernelgenError: `path` is a device, a FIFO or a socket, or is not the name of a file.
        OSError: the folder cannot be written to.
    """
    path = Path(path)
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path, "tmp")
    # Not tempfile: it creates private files, and a result must have the mode that a plain open gives.
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        _name(error, path)
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder to fill; it replaces `path` when the block ends.

    Raises:
        OSError: the parent folder cannot be written to, or `path` is a file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(path, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            # rename cannot replace a folder that is not empty: move the old one aside first.
            old = _beside(path, "old")
            path.replace(old)
            try:
                temporary.replace(path)
            except BaseException:
                old.replace(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            temporary.replace(path)
    except BaseException as error:
        _name(error, path)
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_bytes(path: str | Path, data: bytes) -> None:
    """Writes `data` to `path` by rename."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_if_changed(path: str | Path, data: bytes) -> None:
    """Writes `data` to `path` by rename; a file with equal bytes keeps its time, so that nothing is rebuilt for it."""
    path = Path(path)
    if not path.is_file() or path.read_bytes() != data:
        write_bytes(path, data)


def _name(error: BaseException, path: Path) -> None:
    """Adds the output's name to the error of a full disk: the system names no file when a write fails."""
    if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
        error.filename = str(path)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name[:80]}.{os.getpid()}-{secrets.token_hex(6)}.{suffix}")
