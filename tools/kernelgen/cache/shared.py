"""A store of entries that machines share, at a URL that fsspec supports: `s3://`, `gs://`, `http(s)://` and others.

fsspec and its packages for the protocol are imported when a store is opened, not before. Every call respects the time limit,
and every failure raises `Unavailable`.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from kernelgen.cache import entry
from kernelgen.cache.entry import DamagedEntry, EntryHead
from kernelgen.errors import Diagnostic, KernelgenError

T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""Seconds that a store may take to answer at all."""

SLOW_SECONDS = 5.0
SLOW_BYTES = 1 << 16
"""A store that sends fewer bytes in so many seconds is not waited for: the compile is as fast."""

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""The package that fsspec needs for each protocol."""

_WHOLE = frozenset(PACKAGES) | {"memory", "oci", "oss", "r2"}
"""Protocols whose objects appear whole; for others, entries are written under a temporary name and renamed."""


class Unavailable(Exception):
    """The store failed; the message gives the reason, without secrets."""


class _Enough(Exception):
    """Stops a transfer that needs no more data."""


class _Limit:
    """Stops reading an entry that exceeds its stated size, has no valid header, or comes too slowly.

    Args:
        name: the entry's.
        file: the file that receives it.
        over: an event that is set when no build waits for the entry any more.
    """

    def __init__(self, name: str, file: IO[bytes], over: threading.Event) -> None:
        self._over = over
        self._name = name
        self._file = file
        self._stated: int | None = None
        self._begun: float | None = None
        self._counted = 0

    def __call__(self, size: int | None, count: int) -> None:
        if self._over.is_set():
            raise _Enough
        now = time.monotonic()
        if self._begun is None or now - self._begun >= SLOW_SECONDS:
            received = count - self._counted
            if self._begun is not None and received < SLOW_BYTES and count != size:
                raise Unavailable(f"it sent only {received} bytes in {now - self._begun:.1f} s")
            self._begun, self._counted = now, count
        if max(size or 0, count) > entry.MAX_SIZE:
            raise DamagedEntry(f"it has {max(size or 0, count)} bytes, more than any entry")
        # Up to a buffer's worth of the written bytes may not be in the file yet.
        if self._stated is None and count >= entry.MAX_HEAD + io.DEFAULT_BUFFER_SIZE:
            head, end = entry.read_head(os.pread(self._file.fileno(), entry.MAX_HEAD, 0), self._name)
            self._stated = end + head.size
        if self._stated is not None and count > self._stated:
            raise DamagedEntry(f"it is longer than the {self._stated} bytes that its header gives")


class Shared:
    """Entries at a URL.

    Args:
        url: `<protocol>://…`; the folder, prefix or collection that holds the entries.
        timeout: seconds that one entry may take.

    Raises:
        KernelgenError: the protocol is unknown, or a package for it is not installed.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = redacted(url)
        self._timeout = timeout
        # fsspec nests protocols with `::`: in `filecache::s3://…` the last one holds the objects.
        self._protocol = url.partition("://")[0].rpartition("::")[2]
        self._root = url.rstrip("/")
        self._open: Any = None
        check(url)

    def __str__(self) -> str:
        return self.url

    def read(self, name: str) -> bytes | None:
        """Returns an entry's unchecked bytes, or None if there is none; `entry.unpack` checks them.

        The bytes go to an unnamed file first, and reading stops where the entry should end: a store may send anything.

        Raises:
            Unavailable: the store failed.
            DamagedEntry: it is not an entry of that name, or its size differs from its header.
        """
        over = threading.Event()

        def read() -> bytes | None:
            with tempfile.TemporaryFile() as file:
                try:
                    self._get(name, file, _Limit(name, file, over))
                except FileNotFoundError:
                    return None
                size = os.fstat(file.fileno()).st_size
                entry.check_size(os.pread(file.fileno(), entry.MAX_HEAD, 0), size, name)
                file.seek(0)
                return file.read(size)

        try:
            return self._limited(read)
        finally:
            over.set()  # stops a thread that still reads after the time limit

    def write(self, name: str, data: bytes) -> None:
        """Publishes an entry; replaces an existing one. It appears whole.

        Raises:
            Unavailable: the store does not accept it.
        """

        def write() -> None:
            fs, root = self._filesystem()
            path = f"{root}/{entry.file_name(name)}"
            if self._protocol in _WHOLE:
                fs.pipe_file(path, data)
                return
            fs.makedirs(root, exist_ok=True)
            # This is not an entry's name, so `names` skips what a killed writer left.
            temporary = f"{root}/.{name}.{secrets.token_hex(6)}"
            try:
                fs.pipe_file(temporary, data)
                fs.mv(temporary, path)
            except BaseException:
                with contextlib.suppress(Exception):
                    fs.rm_file(temporary)
                raise

        self._limited(write)

    def names(self) -> list[str]:
        """Returns the names of the entries, sorted.

        Raises:
            Unavailable: the store can't list its entries, as most HTTP servers can't.
        """

        def names() -> list[str]:
            fs, root = self._filesystem()
            try:
                paths = fs.ls(root, detail=False)
            except FileNotFoundError:
                if self._protocol in ("http", "https"):
                    raise  # a server that lists no folders gives the same answer
                return []
            found = (entry.name_of(str(path).rstrip("/").rpartition("/")[2]) for path in paths)
            return sorted({name for name in found if name})

        return self._limited(names)

    def heads(self, names: list[str]) -> Iterator[EntryHead]:
        """Yields the headers of entries; skips entries that can't be read.

        Raises:
            Unavailable: the store does not answer.
        """

        def starts() -> list[Any]:
            fs, root = self._filesystem()
            if self._protocol in ("http", "https"):
                # A server without support for ranges sends the whole entry.
                return [self._start(name) for name in names]
            paths = [f"{root}/{entry.file_name(name)}" for name in names]
            got: list[Any] = fs.cat_ranges(paths, [0] * len(paths), [entry.MAX_HEAD] * len(paths), on_error="return")
            return got

        for name, start in zip(names, self._limited(starts), strict=True):
            with contextlib.suppress(DamagedEntry):
                # The result for an entry that was removed meanwhile is an exception.
                if isinstance(start, bytes):
                    yield entry.read_head(start, name)[0]

    def _get(self, name: str, file: IO[bytes], hook: Callable[[int | None, int], None]) -> None:
        """Writes an entry to a file; calls `hook` with its size, if available, and the bytes written so far."""
        from fsspec.callbacks import Callback

        fs, root = self._filesystem()
        # fsspec writes to a path; this is the path of an unnamed file.
        path = f"/proc/self/fd/{file.fileno()}"
        fs.get_file(f"{root}/{entry.file_name(name)}", path, callback=Callback(hooks={"limit": hook}))

    def _start(self, name: str) -> bytes | None:
        def enough(size: int | None, count: int) -> None:
            if count >= entry.MAX_HEAD + io.DEFAULT_BUFFER_SIZE:
                raise _Enough

        with tempfile.TemporaryFile() as file:
            with contextlib.suppress(_Enough, FileNotFoundError):
                self._get(name, file, enough)
            return os.pread(file.fileno(), entry.MAX_HEAD, 0)

    def _filesystem(self) -> tuple[Any, str]:
        # Open once: later calls use its credentials and connections.
        if self._open is None:
            import fsspec.core

            self._open = fsspec.core.url_to_fs(self._root, **_options(self._protocol, self._timeout))
        fs, root = self._open
        return fs, str(root).rstrip("/")

    def _limited(self, work: Callable[[], T]) -> T:
        """Runs a function in its own thread and waits at most the time limit."""
        answer: list[T] = []
        problem: list[BaseException] = []

        def run() -> None:
            try:
                answer.append(work())
            except BaseException as error:  # an implementation may raise anything
                problem.append(error)

        # A store's code can't be interrupted. A daemon thread at least does not keep the process alive after the build.
        thread = threading.Thread(target=run, name="shared cache", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if answer:
            return answer[0]
        if problem and isinstance(problem[0], DamagedEntry | Unavailable):
            raise problem[0]
        if problem:
            # Without the cause: its text may contain the URL with a password.
            raise Unavailable(_reason(problem[0])) from None
        raise Unavailable(f"it did not answer in {self._timeout:g} s")


def is_url(text: str) -> bool:
    """Returns whether a shared cache is at a URL rather than in a folder."""
    return "://" in text


def redacted(url: str) -> str:
    """Returns a printable URL: without user, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def check(url: str) -> None:
    """Raises if this machine can't use a URL, whether or not its store is reachable.

    Raises:
        KernelgenError: the protocol is unknown, or a package for it is not installed.
    """
    protocol = url.partition("://")[0].rpartition("::")[2]
    try:
        import fsspec
    except ImportError:
        raise _lacks(url, "fsspec") from None
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise _lacks(url, PACKAGES.get(protocol) or str(error)) from None
    except ValueError:
        raise KernelgenError(
            Diagnostic(
                f"shared cache {redacted(url)}: there is no protocol '{protocol}'",
                hint="expected a folder, or a URL with s3://, gs://, http://, https:// or another protocol of fsspec",
            )
        ) from None


def _lacks(url: str, package: str) -> KernelgenError:
    return KernelgenError(
        Diagnostic(
            f"shared cache {redacted(url)}: the Python package {package} is needed for it and not installed",
            hint=f"pip install {package}, into the environment that runs kernelgen (CMake: NEURON_KERNELGEN_PYTHON)",
        )
    )


def _options(protocol: str, timeout: float) -> dict[str, Any]:
    """Returns options that make a file system respect the time limit; users configure fsspec themselves (FSSPEC_…)."""
    connect = min(CONNECT_SECONDS, timeout)
    if protocol in ("http", "https"):
        import aiohttp

        limits = aiohttp.ClientTimeout(total=timeout, sock_connect=connect)
        # trust_env enables proxies, and a password from ~/.netrc.
        return {"client_kwargs": {"timeout": limits, "trust_env": True}}
    if protocol in ("s3", "s3a"):
        # One try may use the whole time limit, so there is no second.
        retries = {"max_attempts": 1}
        return {"config_kwargs": {"connect_timeout": connect, "read_timeout": timeout, "retries": retries}}
    if protocol in ("gs", "gcs"):
        return {"timeout": timeout}
    return {}


def _reason(error: BaseException) -> str:
    """Returns the reason of a failure in one line, without the URL, which may hold a password."""
    status = getattr(error, "status", None)
    if isinstance(status, int) and status >= 400:
        return f"it answered {status} {getattr(error, 'message', '')}".rstrip()
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    system = getattr(error, "os_error", error)
    if isinstance(system, OSError) and system.strerror:
        return system.strerror if isinstance(system.strerror, str) else type(error).__name__
    first = str(error).partition("\n")[0]
    return type(error).__name__ if not first or "://" in first else f"{type(error).__name__}: {first[:200]}"
