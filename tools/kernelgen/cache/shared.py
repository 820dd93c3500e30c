"""A store of entries that machines share, at a URL that fsspec supports: `s3://`, `gs://`, `http(s)://` and others.

fsspec and its packages for the protocol are imported when a store is opened, not before. Every call respects the time limit,
and every failure raises `Unavailable`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from kernelgen.cache import entry
from kernelgen.cache.entry import DamagedEntry, EntryHead
from kernelgen.errors import Diagnostic, KernelgenError

T = TypeVar("T")

CONNECT_SECONDS = 10.0
"""Seconds that a store may take to answer at all."""

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


class Unavailable(OSError):
    """The store failed; the message gives the reason, without secrets."""


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

    def read(self, name: str) -> tuple[EntryHead, bytes] | None:
        """Returns an entry's head and NEFF after checking every byte; None if there is no entry.

        Raises:
            Unavailable: the store failed.
            DamagedEntry: the entry is damaged.
        """
        return self._limited(lambda: entry.read(self._get, name))

    def write(self, head: EntryHead, neff: bytes) -> None:
        """Publishes an entry; replaces an existing one.

        Raises:
            Unavailable: the store does not accept it.
        """

        def write() -> None:
            fs, root = self._filesystem()
            if self._protocol not in PACKAGES:  # these have no folders
                fs.makedirs(root, exist_ok=True)
            fs.pipe_file(f"{root}/{head.key.name}{entry.NEFF}", neff)
            fs.pipe_file(f"{root}/{head.key.name}{entry.JSON}", head.encode())

        self._limited(write)

    def _get(self, file: str) -> bytes | None:
        """Returns a file's bytes; None if there is none."""
        fs, root = self._filesystem()
        try:
            data: bytes = fs.cat_file(f"{root}/{file}")
        except FileNotFoundError:
            return None
        return data

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
