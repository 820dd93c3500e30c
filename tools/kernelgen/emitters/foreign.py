"""Runs the code of emitters, which nobody has checked: traces what it reads, and undoes what it changes in this process.

Python reports every file that is opened and every folder that is listed (its audit events). Files of the Python environment and
kernelgen's own are covered by other means, as are the sources of a library (`kernelgen.emitters.dependencies`); the rest is
data. What Python does not report is not known here: environment variables, the time, whether a file exists.
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
"""The digest of a file that is not there."""

_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"})
_FORKS = frozenset({"os.fork", "os.forkpty"})
_WATCHED = frozenset(
    {"open", "os.listdir", "os.mkdir", "os.rename", "os.scandir", "sqlite3.connect", "socket.connect", "ctypes.dlopen"}
    | _PROGRAMS
    | _FORKS
)


class Forked(RuntimeError):
    """An emitter forks: JAX has threads, and a copy of this process would answer for it."""


@dataclass(frozen=True, slots=True)
class Read:
    """One file or folder that was read.

    Attributes:
        digest: of what was there then (`digest`).
        place: where the emitter's library reads it.
        signature: what tells without reading that it is still the same.
    """

    digest: str
    place: Location | None
    signature: tuple[int, ...] | None


@dataclass(slots=True)
class Reads:
    """What the emitters of one library read in this process since they were imported: they may have kept any of it.

    Attributes:
        root: the library's folder.
        files: what was read, by absolute path.
        unknown: what else they did whose result kernelgen cannot follow, and where.
    """

    root: Path
    files: dict[str, Read] = field(default_factory=dict)
    unknown: dict[str, Location | None] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The library's folder as the absolute paths of what is below it begin."""
        return f"{self.root.absolute()}{os.sep}"

    def changed(self) -> bool:
        """Returns whether a file is not what it was when it was read."""
        return any(
            digest(path) != read.digest
            for path, read in self.files.items()
            if read.signature is None or read.signature != _signature(path)
        )


def digest(path: str) -> str | None:
    """Returns the SHA-256 of a file's bytes, or of a folder's names; `NOTHING` for what is not there, None for what has no end."""
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
    """The one audit hook of this process. It can't be removed again, and does nothing while no emitter runs."""

    def __init__(self) -> None:
        self.reads: Reads | None = None
        self.written: set[str] = set()
        self._installed = False
        self._here = threading.local()

    def install(self) -> None:
        if not self._installed:
            self._installed = True
            sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        # Every event of the process comes here: what is most often is left first.
        if event not in _WATCHED:
            return
        reads = self.reads
        if reads is None or getattr(self._here, "busy", False):
            return
        if event in _FORKS:
            raise Forked("an emitter must not fork")
        self._here.busy = True  # what is opened to make a digest is not the emitter's
        try:
            self._note(reads, event, arguments)
        finally:
            self._here.busy = False

    def _note(self, reads: Reads, event: str, arguments: tuple[Any, ...]) -> None:
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
            opened = "."  # os.listdir()
        if not isinstance(opened, str | bytes | os.PathLike):
            return  # a descriptor: of what was opened before
        path = _source(str(Path(os.fsdecode(opened)).absolute()))
        if event in ("os.mkdir", "os.rename") or (event == "open" and _overwrites(arguments[2])):
            # What it read before it wrote it stays a file that it read.
            if path not in reads.files:
                self.written.add(path)
            return
        if path in reads.files or self._is_written(path) or (_is_own(path) and not path.startswith(reads.folder)):
            return
        # Before the digest: a file that changes in between has another signature afterwards, and is read again.
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
            # os.open, maybe relative to a folder's descriptor, which is not told.
            reads.unknown.setdefault(f"reads {_shown(opened)} in an unknown folder", _place(reads.root))
        else:
            reads.files[path] = Read(found, _place(reads.root), signature)

    def _is_written(self, path: str) -> bool:
        """Returns whether an emitter made a file, or a folder that it is in."""
        return bool(self.written) and any(str(p) in self.written for p in (Path(path), *Path(path).parents))


_TRACE = _Trace()


def _overwrites(flags: object) -> bool:
    """Returns whether a file that is opened with these flags has no content of before."""
    return isinstance(flags, int) and bool(flags & (os.O_TRUNC | os.O_EXCL))


def _source(path: str) -> str:
    """Returns the source of a module's bytecode: that is what changes."""
    if path.endswith(".pyc"):
        with contextlib.suppress(ValueError):
            return importlib.util.source_from_cache(path)
    return path


def _is_own(path: str) -> bool:
    """Returns whether a file is of the Python environment or of kernelgen."""
    return f"{path}{os.sep}".startswith(_environment()) or path in sys.path


@cache
def _environment() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    package = Path(__file__).absolute().parent.parent
    folders |= {*site.getsitepackages(), str(package), str(package.with_name("nki_interpreter"))}
    if sys.prefix != sys.base_prefix:  # an environment has nothing else in its folder
        folders.add(sys.prefix)
    # Those of an environment that this one is laid over. A folder of sources that a .pth file names is called otherwise.
    folders |= {folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")}
    both = folders | {os.path.realpath(folder) for folder in folders}
    return tuple(sorted(folder.rstrip(os.sep) + os.sep for folder in both))


def _shown(value: object) -> str:
    try:
        return ascii(os.fsdecode(value) if isinstance(value, bytes | os.PathLike) else value)[:200]
    except Exception:  # whatever its repr may do
        return "something"


def _place(root: Path) -> Location | None:
    """Returns the innermost line of a library's sources that is being run."""
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
    """Leaves out what the block opens: kernelgen does that for an emitter, and knows of it."""
    reads, _TRACE.reads = _TRACE.reads, None
    try:
        yield
    finally:
        _TRACE.reads = reads


# --- running --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def builtins_kept() -> Iterator[None]:
    """Makes Python's builtins what they were when the block ends, however it does; until then it calls none of them."""
    now = builtins.__dict__
    known = now.copy()
    try:
        yield
    finally:
        now.update(known)
        for name in set(now) - set(known):
            del now[name]


@contextlib.contextmanager
def running(reads: Reads) -> Iterator[None]:
    """Adds what the block reads to `reads`, and ends what it does to this process.

    The working folder, the environment's variables, the limit of recursion, the mask of new files' modes and the alarm are as
    before when the block ends, however it does; and so are the builtins. A copy of this process that the block makes ends there.

    Raises:
        Forked: inside the block, where it forks.
    """
    _TRACE.install()
    outer, process = _TRACE.reads, os.getpid()
    # By descriptor: an emitter may rename or remove the folder.
    folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC)
    environment, depth, alarm = dict(os.environ), sys.getrecursionlimit(), signal.getitimer(signal.ITIMER_REAL)
    mask = os.umask(0o022)  # there is no other way to ask for it
    os.umask(mask)
    try:
        _TRACE.reads = reads
        with builtins_kept():
            yield
    finally:
        # A copy would go on as this process and answer a second time.
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
