"""Runs the untrusted code of emitters: traces the files that it reads, and undoes its changes to this process.

Python's audit events report every file opened and every folder listed. Other code covers files of the Python environment, of
kernelgen, and the sources of a library (`kernelgen.emitters.dependencies`); the rest is data. Python does not report reads of
environment variables or the time, or checks whether a file exists, so they are not traced.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib.util
import os
import signal
import site
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kernelgen.errors import Location

NOTHING = "nothing"
"""The digest of a missing file."""

_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"})
_FORKS = frozenset({"os.fork", "os.forkpty"})
_WATCHED = frozenset(
    {"open", "os.listdir", "os.mkdir", "os.rename", "os.scandir", "sqlite3.connect", "socket.connect", "ctypes.dlopen"}
    | _PROGRAMS
    | _FORKS
)


class ForkError(RuntimeError):
    """An emitter forks: JAX has threads, and a copy of this process would send a second answer."""


@dataclass(frozen=True, slots=True)
class FileRead:
    """One file or folder that was read.

    Attributes:
        digest: the digest of its content at that time (`digest`).
        place: the line of the emitter's library that reads it.
        signature: file metadata; equal metadata means an unchanged file, without reading it.
    """

    digest: str
    place: Location | None
    signature: tuple[int, ...] | None


@dataclass(slots=True)
class FileReads:
    """The files that the emitters of one library have read in this process since their import: they may have kept any content.

    Attributes:
        root: the library's folder.
        files: the files read, by absolute path.
        unknown: other actions that kernelgen cannot track, and their places.
    """

    root: Path
    files: dict[str, FileRead] = field(default_factory=dict)
    unknown: dict[str, Location | None] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The prefix of the absolute paths below the library's folder."""
        return f"{self.root.absolute()}{os.sep}"

    def changed(self) -> bool:
        """Returns whether a file has changed since it was read."""
        return any(
            digest(path) != read.digest
            for path, read in self.files.items()
            if read.signature is None or read.signature != _signature(path)
        )


def digest(path: str) -> str | None:
    """Returns the SHA-256 of a file's bytes, or of a folder's names; `NOTHING` for a missing path, None for a file without end."""
    try:
        mode = Path(path).stat().st_mode
        if stat.S_ISDIR(mode):
            names = sorted(file.name for file in Path(path).iterdir())
            return f"folder {hashlib.sha256(ascii(names).encode()).hexdigest()}"
        if not stat.S_ISREG(mode):
            return None
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):
        return NOTHING


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


# --- tracing --------------------------------------------------------------------------------------------------------------


class _Trace:
    """The only audit hook of this process. Hooks can't be removed; it does nothing while no emitter runs."""

    def __init__(self) -> None:
        self.reads: FileReads | None = None
        self.written: set[str] = set()
        self._installed = False
        self._here = threading.local()

    def install(self) -> None:
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Every event of the process comes here: return first for the most frequent ones.
        if event not in _WATCHED:
            return
        reads = self.reads
        if reads is None or getattr(self._here, "busy", False):
            return
        if event in _FORKS:
            raise ForkError("an emitter must not fork")
        self._here.busy = True  # files opened to compute a digest are not the emitter's
        try:
            self._note(reads, event, arguments)
        finally:
            self._here.busy = False

    def _note(self, reads: FileReads, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _PROGRAMS:
            reads.unknown.setdefault(f"runs {_shown(arguments[0])}", _place(reads.root))
            return
        if event == "socket.connect":
            reads.unknown.setdefault(f"connects to {_shown(arguments[1])}", _place(reads.root))
            return
        if event == "ctypes.dlopen":
            if arguments[0] is not None:
                reads.unknown.setdefault(f"loads {_shown(arguments[0])}", _place(reads.root))
            return
        opened = arguments[1] if event == "os.rename" else arguments[0]
        if opened is None:
            opened = "."  # os.listdir() without an argument
        if not isinstance(opened, str | bytes | os.PathLike):
            return  # a descriptor: the event of its opening counted
        path = _source(str(Path(os.fsdecode(opened)).absolute()))
        if event in ("os.mkdir", "os.rename") or (event == "open" and _overwrites(arguments[2])):
            # A file that it read before writing it stays a read file.
            if path not in reads.files:
                self.written.add(path)
            return
        if path in reads.files or self._is_written(path) or (_is_own(path) and not path.startswith(reads.folder)):
            return
        # Before the digest: if the file changes in between, its signature differs later, and it is read again.
        signature = _signature(path)
        found = digest(path)
        if found is None:
            reads.unknown.setdefault(f"reads {path}, which is not a file", _place(reads.root))
        elif (
            found == NOTHING
            and event == "open"
            and arguments[1] is None
            and not Path(os.fsdecode(opened)).is_absolute()
        ):
            # os.open, maybe relative to a folder's descriptor, which the event does not include.
            reads.unknown.setdefault(f"reads {_shown(opened)} in an unknown folder", _place(reads.root))
        else:
            reads.files[path] = FileRead(found, _place(reads.root), signature)

    def _is_written(self, path: str) -> bool:
        """Returns whether an emitter created a file, or a folder that contains it."""
        return bool(self.written) and any(str(p) in self.written for p in (Path(path), *Path(path).parents))


_TRACE = _Trace()


def _overwrites(flags: object) -> bool:
    """Returns whether opening a file with these flags discards its content."""
    return isinstance(flags, int) and bool(flags & (os.O_TRUNC | os.O_EXCL))


def _source(path: str) -> str:
    """Returns the path of the source of a module's bytecode: only the source's changes matter."""
    if path.endswith(".pyc"):
        with contextlib.suppress(ValueError):
            return importlib.util.source_from_cache(path)
    return path


def _is_own(path: str) -> bool:
    """Returns whether a file belongs to the Python environment or to kernelgen."""
    return f"{path}{os.sep}".startswith(_environment()) or path in sys.path


@cache
def _environment() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    package = Path(__file__).absolute().parent.parent
    folders |= {*site.getsitepackages(), str(package), str(package.with_name("nki_interpreter"))}
    if sys.prefix != sys.base_prefix:  # an environment's folder holds nothing else
        folders.add(sys.prefix)
    # Package folders of the base environment. A folder of sources that a .pth file adds has another name.
    folders |= {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    both = folders | {os.path.realpath(folder) for folder in folders}
    return tuple(sorted(folder.rstrip(os.sep) + os.sep for folder in both))


def _shown(value: object) -> str:
    try:
        return ascii(os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else value)[:200]
    except Exception:  # its repr may raise anything
        return "something"


def _place(root: Path) -> Location | None:
    """Returns the innermost running line of a library's sources."""
    frame = sys._getframe()
    below = f"{root}{os.sep}"
    found = None
    while frame is not None and found is None:
        if frame.f_code.co_filename.startswith(below):
            found = Location(frame.f_code.co_filename, frame.f_lineno, 1)
        frame = frame.f_back  # type: ignore[assignment]
    return found


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Excludes files that the block opens from the trace: kernelgen opens them for an emitter and tracks them itself."""
    reads, _TRACE.reads = _TRACE.reads, None
    try:
        yield
    finally:
        _TRACE.reads = reads


# --- running --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def builtins_kept() -> Iterator[None]:
    """Restores Python's builtins when the block ends, also after an exception; calls no builtin until they are restored."""
    now = builtins.__dict__
    known = now.copy()
    try:
        yield
    finally:
        now.update(known)
        for name in set(now) - set(known):
            del now[name]


@contextlib.contextmanager
def running(reads: FileReads) -> Iterator[None]:
    """Adds the block's reads to `reads`, and undoes its changes to this process.

    At the end of the block, also after an exception, these are as before: the working folder, environment variables, recursion
    limit, umask, alarm and builtins. A copy of this process that the block forks ends there.

    Raises:
        ForkError: inside the block, if it forks.
    """
    _TRACE.install()
    outer, process = _TRACE.reads, os.getpid()
    # By descriptor: an emitter may rename or remove the folder.
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    environment, depth, alarm = dict(os.environ), sys.getrecursionlimit(), signal.getitimer(signal.ITIMER_REAL)
    mask = os.umask(0o022)  # os.umask has no form that only reads
    os.umask(mask)
    try:
        _TRACE.reads = reads
        with builtins_kept():
            yield
    finally:
        # A copy would continue as this process and answer a second time.
        if os.getpid() != process:
            os._exit(1)
        _TRACE.reads = outer
        sys.setrecursionlimit(depth)
        os.umask(mask)
        os.fchdir(folder)
        os.close(folder)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        signal.setitimer(signal.ITIMER_REAL, *alarm)
