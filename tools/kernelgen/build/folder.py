"""The build folder: its files and its lock.

All intermediate files between the manifests and the bundles are in one folder, `<output>/.kernelgen`:

    hlo/<kernel>.hlo.pb     the last emitted HLO; <kernel>.inputs beside it lists its inputs, so that an unchanged kernel is kept
    neff/<key>.neff         key: digest of the HLO's bytes, the compiler's identity and its flags, and of nothing else;
                            <key>.origin beside it has the digest of the NEFF (`kernelgen.neff.provenance`), <key>.log
                            what the compiler printed
    manifests/<bundle>      the output folder, and the path of the manifest that the bundle was built from
    logs/  tmp/             files of the workers

So a NEFF with a matching digest is up to date, independent of the kernel, manifest or build that made it. A compile step first
looks for a missing NEFF in a cache that builds share (`kernelgen.cache`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kernelgen import cache, fileio
from kernelgen.bundle.contents import pack_name
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.neff import provenance
from kernelgen.spec.filenames import STATE, keyed_neff_file


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """The settings of a build.

    Attributes:
        output: the output folder.
        compiler: `neuronx-cc` or `simulator`, as resolved.
        identity: the compiler's identity.
        executable: the compiler's program, if it is one.
        jobs: number of workers.
        memory_mb: MiB that all compiles may use together.
        timeout: time limit of one step in seconds, or None.
        cache: the caches that builds share.
    """

    output: Path
    compiler: str
    identity: str
    executable: Path | None
    jobs: int
    memory_mb: int
    timeout: float | None = None
    cache: cache.CacheSettings = cache.OFF

    @property
    def state(self) -> Path:
        return self.output / STATE


@contextlib.contextmanager
def locked(settings: BuildSettings) -> Iterator[None]:
    """Locks the output folder for this build and removes leftovers of a killed build.

    Raises:
        KernelgenError: another build holds the lock, or one of kernelgen's own paths there is a link or not a file.
        OSError: the folder can't be written.
    """
    # The whole folder may be a link: its owner keeps it elsewhere.
    settings.state.mkdir(parents=True, exist_ok=True)
    for folder in (settings.state / name for name in ("hlo", "neff", "manifests", "logs", "tmp")):
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise KernelgenError(f"{folder} is a link: kernelgen keeps its own files there; remove it")
    with _open_lock(settings.state / "lock") as lock:
        # The system drops the lock when its holder dies, so it can't go stale.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KernelgenError(f"{settings.output}: another build is at work there") from None
        _tidy(settings)
        try:
            yield
        finally:
            _tidy(settings)


def _open_lock(path: Path) -> IO[bytes]:
    """Opens a file without content; does not follow a link or block on a FIFO."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise KernelgenError(f"{path} is a link: kernelgen locks a file of its own there; remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise KernelgenError(f"{path} is not a file: kernelgen locks a file of its own there; remove it")
    return os.fdopen(file, "r+b")


def _tidy(settings: BuildSettings) -> None:
    shutil.rmtree(settings.state / "tmp", ignore_errors=True)
    for folder in ("hlo", "neff"):
        for leftover in (settings.state / folder).glob(".*.tmp"):
            leftover.unlink(missing_ok=True)


def check_manifest(settings: BuildSettings, bundle: str, manifest: Path) -> None:
    """Checks that a bundle of this name in the folder is of the same manifest.

    Raises:
        KernelgenError: it is of another one, which still exists and has other content.
    """
    try:
        folder, _, note = _note(settings, bundle).read_bytes().partition(b"\0")
        if os.fsdecode(folder) != str(settings.output.absolute()):
            return  # the state was moved here from another folder
        before = Path(os.fsdecode(note))
        is_other = before.is_file() and not before.samefile(manifest) and before.read_bytes() != manifest.read_bytes()
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return
    if is_other and any((settings.output / name).exists() for name in (bundle, pack_name(bundle))):
        hint = "change the `name:` of one of them, or build it into another folder (-o)"
        message = f"{manifest}: {settings.output} has a bundle {bundle} of another manifest, {before}"
        raise KernelgenError(Diagnostic(message, hint=hint))


def note_manifest(settings: BuildSettings, bundle: str, manifest: Path) -> None:
    """Notes that a bundle in the folder is of this manifest."""
    note = b"\0".join(map(os.fsencode, (settings.output.absolute(), manifest.absolute())))
    fileio.write_bytes(_note(settings, bundle), note)


def _note(settings: BuildSettings, bundle: str) -> Path:
    return settings.state / "manifests" / bundle


def neff_file(settings: BuildSettings, hlo: bytes, config: CompileConfig) -> Path:
    return settings.state / "neff" / keyed_neff_file(cache.NeffKey.make(hlo, settings.identity, config.flags()).name)


def is_whole(path: Path) -> bool:
    """Returns whether a NEFF has the bytes that its step wrote. The build makes a changed one again."""
    return provenance.is_as_made(path, provenance.read(provenance.beside(path)))
