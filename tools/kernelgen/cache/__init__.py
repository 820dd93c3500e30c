"""The cache of NEFFs for builds without Bazel, which has its own caches: no NEFF is compiled twice.

A NEFF's name depends only on its `NeffKey`. There are two levels: a folder on this machine, and an optional store that machines
share. The cache checks every byte that it reads. A failing cache never fails a build: the build compiles instead, and reports the
problem.

Builds call `cache.Cache.neff`. `folder` and `shared` are the levels, `entry` is the format, `archive` exports and imports.
docs/reference/caching.md is the user documentation.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelgen import fileio
from kernelgen.cache import shared
from kernelgen.cache.entry import DamagedEntry, EntryHead
from kernelgen.cache.folder import Folder
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.neff.identity import NeffKey

__all__ = ["OFF", "Cache", "CacheSettings", "DamagedEntry", "EntryHead", "Folder", "NeffKey"]

FOLDER_VARIABLE = "NEURON_KERNELGEN_NEFF_CACHE"
SHARED_VARIABLE = "NEURON_KERNELGEN_SHARED_CACHE"
MODE_VARIABLE = "NEURON_KERNELGEN_SHARED_CACHE_MODE"
TIMEOUT_VARIABLE = "NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT"

MODES = ("read-write", "read-only")
TIMEOUT = 60.0
"""Default time limit for one entry of a shared cache, in seconds."""

PATIENCE = 3600.0
"""Seconds to wait for another process that makes the same NEFF: it may be suspended, and must not block this build forever."""

RETRY_SECONDS = 60.0
"""Seconds before a build asks a shared cache again that failed."""

COMPILED, LOCAL, SHARED = "compiled", "local", "shared"
"""The source of a NEFF."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The caches that a build uses.

    Attributes:
        folder: this machine's cache folder, or None.
        shared: a URL or a folder that machines share, or None.
        writable: whether the build adds NEFFs to the shared cache.
        timeout: time limit for one entry of the shared cache, in seconds.
    """

    folder: Path | None = None
    shared: str | None = None
    writable: bool = True
    timeout: float = TIMEOUT

    @staticmethod
    def make(
        folder: str | None = None,
        shared_at: str | None = None,
        mode: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CacheSettings:
        """Returns the settings from the arguments; the environment supplies the rest.

        Args:
            folder: a folder, or `off`; by default kernelgen's own folder.
            shared_at: a URL, a folder, or `off`, which is the default.
            mode: one of `MODES`.
            env: the environment; this process's by default.

        Raises:
            KernelgenError: a value is invalid, or a package that the URL needs is not installed.
        """
        env = os.environ if env is None else env
        folder = folder or env.get(FOLDER_VARIABLE)
        shared_at = shared_at or env.get(SHARED_VARIABLE)
        mode = mode or env.get(MODE_VARIABLE) or MODES[0]
        if mode not in MODES:
            raise KernelgenError(f"{MODE_VARIABLE}: unknown mode '{mode}'{did_you_mean(mode, MODES)}")
        if folder and shared.is_url(folder):
            raise KernelgenError(
                Diagnostic(
                    f"the cache of this machine is a folder, not {shared.redacted(folder)}",
                    hint=f"a URL is for the shared cache: {SHARED_VARIABLE}, or --shared-cache",
                )
            )
        local = Path(folder).absolute() if folder else default_folder(env)
        if folder == "off":
            local = None
        if not shared_at or shared_at == "off":
            return CacheSettings(local)
        return CacheSettings(local, _location(shared_at), mode == MODES[0], _timeout(env.get(TIMEOUT_VARIABLE)))

    def arguments(self) -> list[str]:
        """Returns the settings as arguments of a build step; `from_arguments` is the inverse."""
        words = [f"--cache={self.folder}"] if self.folder else []
        if self.shared:
            mode = MODES[0] if self.writable else MODES[1]
            words += [f"--shared-cache={self.shared}", f"--shared-cache-mode={mode}"]
            words += [f"--shared-cache-timeout={self.timeout:g}"]
        return words

    @staticmethod
    def from_arguments(folder: str | None, at: str | None, mode: str | None, timeout: str | None) -> CacheSettings:
        """Returns the settings of a build step."""
        return CacheSettings(
            Path(folder) if folder else None, at, mode != MODES[1], float(timeout) if timeout else TIMEOUT
        )


OFF = CacheSettings()
"""No cache at all."""


def default_folder(env: Mapping[str, str]) -> Path | None:
    """Returns the default folder of NEFFs; None if the user has no home folder."""
    own = own_folder(env)
    return own / "neff" if own else None


def own_folder(env: Mapping[str, str]) -> Path | None:
    """Returns the folder of kernelgen's files for a user on this machine; None if the user has no home folder."""
    if own := env.get("NEURON_KERNELGEN_CACHE"):
        return Path(own).absolute()
    if base := env.get("XDG_CACHE_HOME"):
        return Path(base).absolute() / "neuron-kernelgen"
    try:
        return Path.home() / ".cache" / "neuron-kernelgen"
    except RuntimeError:
        return None


def _location(text: str) -> str:
    if text.startswith("file://"):
        text = text.removeprefix("file://")
        if not text.startswith("/"):
            raise KernelgenError(f"shared cache file://{text}: expected file:/// and an absolute path")
    if not shared.is_url(text):
        return str(Path(text).absolute())
    shared.check(text)
    return text


def _timeout(text: str | None) -> float:
    if not text:
        return TIMEOUT
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise KernelgenError(f"{TIMEOUT_VARIABLE} is a number of seconds, not '{text}'")
    return value


class Cache:
    """The cache levels of some settings.

    Args:
        settings: the caches.
        warn: prints a problem with them.
        failure: a file in which the processes of a build record that the shared cache failed; None for a single process.
    """

    def __init__(self, settings: CacheSettings, warn: Callable[[str], None], failure: Path | None = None) -> None:
        self._settings = settings
        self._warn = warn
        self._warnings: set[str] = set()
        self._failure = failure
        self._failed_at = -RETRY_SECONDS
        self.folder = Folder(settings.folder) if settings.folder else None
        self.shared: shared.Shared | Folder | None = None
        if settings.shared:
            if shared.is_url(settings.shared):
                self.shared = shared.Shared(settings.shared, settings.timeout)
            else:
                self.shared = Folder(Path(settings.shared))

    def neff(
        self, key: NeffKey, kernel: str, make: Callable[[], bytes], patience: float | None = None, timed: bool = False
    ) -> tuple[bytes, str]:
        """Returns a NEFF, and its source: `LOCAL`, `SHARED` or `COMPILED`.

        If several processes of this machine need a NEFF that is in neither level, one makes it and the others wait.

        Args:
            key: the inputs that it depends on.
            kernel: the kernel's name, for people.
            make: compiles it; its exceptions propagate, and then nothing is stored.
            patience: seconds to wait for another process; `PATIENCE` by default.
            timed: whether to record the duration of `make`, for estimates of later builds.
        """
        with self._locked(key.name, PATIENCE if patience is None else patience):
            if self.folder and (pair := self._read(self.folder, key.name)):
                self.folder.used(key.name)
                return pair[1], LOCAL
            if self.shared and (pair := self._read(self.shared, key.name)):
                # Keep the recorded compile time: estimates of later builds use it.
                self._write(self.folder, *pair)
                return pair[1], SHARED
            started_at = time.monotonic()
            neff = make()
            head = EntryHead.make(key, kernel, neff, round(time.monotonic() - started_at) if timed else None)
            # This machine's cache first: a failing shared cache must not lose a compiled NEFF.
            self._write(self.folder, head, neff)
            if self._settings.writable:
                self._write(self.shared, head, neff)
            return neff, COMPILED

    def _locked(self, name: str, patience: float) -> contextlib.AbstractContextManager[None]:
        # A lock is a system lock on a file. A store at a URL has none: machines that share it may compile the same NEFF at once.
        for level in (self.folder, self.shared):
            if isinstance(level, Folder):
                return level.locked(name, patience)
        return contextlib.nullcontext()

    def _read(self, level: Folder | shared.Shared, name: str) -> tuple[EntryHead, bytes] | None:
        try:
            return None if self._is_down(level) else level.read(name)
        except DamagedEntry as problem:
            self._warn_once(f"the cache {level} has a damaged entry, which is not used: {name}: {problem}")
        except OSError as error:
            text = f"the cache {level} can't be read, and the build goes on without: {error.strerror or error}"
            if isinstance(error, shared.Unavailable):
                self._record_failure(text)
            self._warn_once(text)
        return None

    def _write(self, level: Folder | shared.Shared | None, head: EntryHead, neff: bytes) -> None:
        if level is None or self._is_down(level):
            return
        try:
            level.write(head, neff)
        except (OSError, KernelgenError) as error:
            reason = getattr(error, "strerror", None) or error
            self._warn_once(f"the cache {level} can't be written, and nothing is added to it: {reason}")

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
            self._warn(text)

    def _record_failure(self, text: str) -> None:
        self._failed_at = time.monotonic()
        if self._failure:
            with contextlib.suppress(OSError):
                fileio.write_bytes(self._failure, text.encode())

    def _is_down(self, level: Folder | shared.Shared) -> bool:
        """Returns whether a store failed so recently that it is not asked: each kernel would wait for its time limit."""
        if isinstance(level, Folder):
            return False
        if time.monotonic() - self._failed_at < RETRY_SECONDS:
            return True
        with contextlib.suppress(OSError):
            # A clock that was set back must not keep it down for long.
            if self._failure and abs(time.time() - self._failure.stat().st_mtime) < RETRY_SECONDS:
                self._warn_once(self._failure.read_text())
                return True
        return False
