"""Keeps what XLA compiled in a folder, for processes that load the same kernels one after another: `NEURON_SIMULATOR_CACHE`.

A file's name is the digest of all that XLA's result depends on: the HLO, jaxlib, the CPU, how many threads it compiles for, and its
flags. A file begins with the digest of the rest, and one that is damaged counts as missing. Nothing is ever removed: empty the
folder when it grows too large.

A file is code, which runs with the user's rights; its digest tells damage, not who wrote it. So the folder must be the user's own,
and closed to others.
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
    """Returns the folder that the environment names, and makes it if need be; None when it names none.

    Raises:
        ValueError: it can't be made, or other users may write to it or read it.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, exist_ok=True)  # another process may be as quick
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
    """Returns the executable of a serialized `HloModuleProto`: from the folder, else from `compile_`, and then it is kept.

    Raises:
        ValueError: as `compile_` and `folder` do.
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
    """Returns XLA's executable; None when there is none, or none that it takes."""
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
    except Exception:  # jaxlib raises types of its own; whatever they say, the HLO can be compiled
        return None


def _store(file: Path, loaded: Any) -> None:
    try:
        data = loaded.serialize() if hasattr(loaded, "serialize") else loaded.client.serialize_executable(loaded)
    except Exception:  # not everything that XLA compiles can be written down
        return
    try:
        fileio.write_bytes(file, hashlib.sha256(data).digest() + data)
    except OSError:
        return


@cache
def _machine() -> bytes:
    """Returns a digest of what XLA's result depends on besides the HLO."""
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
    """Returns what the system says of the CPU: XLA generates code for exactly this one."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))
