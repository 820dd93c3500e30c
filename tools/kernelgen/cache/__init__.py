"""The cache of NEFFs for builds without Bazel, which has its own caches: no NEFF is compiled twice.

A NEFF's name depends only on its `NeffKey`. There are two levels: a folder on this machine, and an optional store that machines
share. The cache checks every byte that it reads. A failing cache never fails a build: the build compiles instead, and reports the
problem once (`Notices`).

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

from kernelgen.cache import entry, shared
from kernelgen.cache.entry import DamagedEntry
from kernelgen.cache.folder import Folder
from kernelgen.cache.notices import Notices
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.neff.identity import NeffKey

__all__ = ["OFF", "Cache", "CacheSettings", "DamagedEntry", "Folder", "NeffKey", "Notices"]

FOLDER_VARIABLE = "NEURON_KERNELGEN_NEFF_CACHE"
SHARED_VARIABLE = "NEURON_KERNELGEN_SHARED_CACHE"
MODE_VARIABLE = "NEURON_KERNELGEN_SHARED_CACHE_MODE"
TIMEOUT_VARIABLE = "NEURON_KERNELGEN_SHARED_CACHE_TIMEOUT"

MODES = ("read-write", "read-only")
TIMEOUT = 60.0
"""Default time limit for one entry of a shared cache, in seconds."""

PATIENCE = 3600.0
"""Seconds to wait for another process that makes the same NEFF: it may be suspended, and must not block this build forever."""

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
        notices: receives the problems with them.
    """

    def __init__(self, settings: CacheSettings, notices: Notices) -> None:
        self._settings = settings
        self._notices = notices
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
        name = key.name
        # First without the lock: an entry appears whole, and most builds find all of theirs.
        found = self._local(name)
        if found is not None:
            return found, LOCAL
        with self._held(name, PATIENCE if patience is None else patience):
            # The previous lock holder may have made it.
            found = self._local(name)
            if found is not None:
                return found, LOCAL
            fetched = self._fetch(name)
            if fetched is not None:
                head, shared_neff = fetched
                # Keep the recorded compile time: estimates of later builds use it.
                self._keep(key, kernel, shared_neff, head.seconds)
                return shared_neff, SHARED
            begun = time.monotonic()
            made = make()
            seconds = round(time.monotonic() - begun) if timed else None
            # This machine's cache first: a failing shared cache must not lose a compiled NEFF.
            self._keep(key, kernel, made, seconds)
            self._publish(key, kernel, made, seconds)
            return made, COMPILED

    def _held(self, name: str, patience: float) -> contextlib.AbstractContextManager[None]:
        # A lock is a system lock on a file. A store at a URL has none: machines that share it may compile the same NEFF at once.
        for level in (self.folder, self.shared):
            if isinstance(level, Folder):
                return level.locked(name, patience)
        return contextlib.nullcontext()

    def _local(self, name: str) -> bytes | None:
        found = self._read_folder(self.folder, name, "local") if self.folder else None
        if found is None or self.folder is None:
            return None
        # `prune` removes the least recently used entries.
        self.folder.used(name)
        return found[1]

    def _read_folder(self, folder: Folder, name: str, level: str) -> tuple[entry.EntryHead, bytes] | None:
        where = f"the cache {folder}"
        try:
            data = folder.read(name)
            return None if data is None else entry.unpack(data, name)
        except DamagedEntry as problem:
            # Otherwise every build would read it and compile. Where this build may not write, the entry stays for builds that may.
            gone = folder.drop(name) if level == "local" or self._settings.writable else False
            what = "was removed and is compiled again" if gone else "is left alone"
            self._notices.once(
                f"{level}-damaged",
                f"{where} has damaged entries, which are not used; the first, {name}, {what}: {problem}",
            )
        except OSError as error:
            self._notices.once(f"{level}-read", f"{where} can't be read, and the build goes on without: {_why(error)}")
        return None

    def _fetch(self, name: str) -> tuple[entry.EntryHead, bytes] | None:
        if self.shared is None:
            return None
        if isinstance(self.shared, Folder):
            return self._read_folder(self.shared, name, "shared")
        # Otherwise each kernel would wait for the time limit again.
        if self._notices.down("shared-read"):
            return None
        try:
            data = self.shared.read(name)
            return None if data is None else entry.unpack(data, name)
        except DamagedEntry as problem:
            self._notices.once(
                "shared-damaged",
                f"the shared cache {self.shared} has damaged entries, which are not used; the first is {name}: {problem}",
            )
        except shared.Unavailable as problem:
            self._notices.fail(
                "shared-read",
                f"the shared cache {self.shared} can't be read, and the build goes on without: {problem}",
            )
        return None

    def _keep(self, key: NeffKey, kernel: str, neff: bytes, seconds: int | None) -> None:
        if self.folder is not None:
            self._write_folder(self.folder, key, kernel, neff, seconds, "local")

    def _write_folder(
        self, folder: Folder, key: NeffKey, kernel: str, neff: bytes, seconds: int | None, level: str
    ) -> None:
        try:
            folder.write(key.name, entry.pack(key, kernel, neff, seconds))
        except (OSError, ValueError) as error:
            text = f"the cache {folder} can't be written, and nothing is added to it: {_why(error)}"
            self._notices.once(f"{level}-write", text)

    def _publish(self, key: NeffKey, kernel: str, neff: bytes, seconds: int | None) -> None:
        if self.shared is None or not self._settings.writable:
            return
        if isinstance(self.shared, Folder):
            self._write_folder(self.shared, key, kernel, neff, seconds, "shared")
            return
        # Nor write to a store that can't be read: each NEFF would wait for the time limit again.
        if self._notices.down("shared-read") or self._notices.down("shared-write"):
            return
        try:
            self.shared.write(key.name, entry.pack(key, kernel, neff, seconds))
        except (shared.Unavailable, ValueError) as problem:
            self._notices.fail(
                "shared-write",
                f"the shared cache {self.shared} can't be written, and nothing is added to it: {problem}",
            )


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
