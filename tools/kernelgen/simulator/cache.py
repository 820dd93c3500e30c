"""Keeps XLA's executables in a folder, for later processes that load the same kernels: `NEURON_SIMULATOR_CACHE`.

A file's name is a digest of everything on which XLA's result depends: the HLO, jaxlib, the CPU, the number of threads, and XLA's
flags. A file begins with the digest of its rest, and a damaged file counts as missing. The cache removes no files: empty the folder
when it grows too large.

A file is code that runs with the user's rights. Its digest detects damage, not a foreign author, so the folder must belong to the
user and be closed to others.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kernelgen import fileio
from kernelgen.hlo.cpu import client
from kernelgen.hlo.execute import Executable

VARIABLE = "NEURON_SIMULATOR_CACHE"

_FORMAT = b"1"


def folder() -> Path | None:
    """Returns the folder that the environment names, and creates it if it is missing; None if it names none.

    Raises:
        ValueError: the folder can't be created, or other users may write to it or read it.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, exist_ok=True)  # another process may create it at the same time
        info = path.lstat()
    except OSError as error:
        raise ValueError(f"{VARIABLE}={name} can't be made: {error.strerror}") from error
    if not stat.S_ISDIR(info.st_mode):
        kind = "not a folder but a link" if stat.S_ISLNK(info.st_mode) else "not a folder"
        raise ValueError(f"{VARIABLE}={name} is {kind}; name a folder, which may be one to be made")
    if info.st_uid != os.geteuid():
        raise ValueError(
            f"{VARIABLE}={name} belongs to user {info.st_uid}, and what is in it would run as user {os.geteuid()}; "
            "name a folder of your own"
        )
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o077:
        raise ValueError(
            f"{VARIABLE}={name} is open to other users (mode {mode:03o}, expected 700), and what is in it is run; "
            f"empty it if they may have written to it, then: chmod 700 {name}"
        )
    return path


def compiled(hlo: bytes, compile_: Callable[[bytes], Executable]) -> Executable:
    """Returns the executable of a serialized `HloModuleProto` from the folder; otherwise compiles it and stores it there.

    Raises:
        ValueError: see `compile_` and `folder`.
    """
    kept = folder()
    if kept is None:
        return compile_(hlo)
    name = hashlib.sha256(_machine() + hashlib.sha256(hlo).digest()).hexdigest()
    file = kept / name[:2] / f"{name}.xla"
    loaded = _load(file)
    if loaded is not None:
        return Executable.of(hlo, loaded)
    executable = compile_(hlo)
    _store(file, executable.loaded)
    return executable


def _load(file: Path) -> Any:
    """Returns XLA's executable; None if it is missing, damaged or rejected by XLA."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        return None
    from jaxlib import _jax

    xla = client()
    try:
        return xla.deserialize_executable(data[32:], _jax.DeviceList((xla.devices()[0],)), _jax.CompileOptions())
    except Exception:  # jaxlib raises types of its own; the HLO can be compiled instead
        return None


def _store(file: Path, loaded: Any) -> None:
    try:
        data = loaded.serialize() if hasattr(loaded, "serialize") else loaded.client.serialize_executable(loaded)
    except Exception:  # XLA can't serialize all executables
        return
    try:
        fileio.write_bytes(file, hashlib.sha256(data).digest() + data)
    except OSError:
        return


@cache
def _machine() -> bytes:
    """Returns a digest of everything but the HLO on which XLA's result depends."""
    from jaxlib.version import __version__ as jaxlib_version

    environment = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_", "PJRT_"))}
    parts = [
        _FORMAT,
        jaxlib_version.encode(),
        platform.machine().encode(),
        _cpu(),
        str(len(os.sched_getaffinity(0))).encode(),
        repr(sorted(environment.items())).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).digest()


def _cpu() -> bytes:
    """Returns the system's description of the CPU: XLA generates code for exactly this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
