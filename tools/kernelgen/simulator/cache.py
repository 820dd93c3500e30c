"""Keeps XLA's executables in a folder, for later processes that load the same kernels: `NEURON_SIMULATOR_CACHE`.

A file's name is a digest of everything on which XLA's result depends: the HLO, jaxlib, the CPU, the number of threads, and XLA's
flags. A file begins with the digest of its rest, and a damaged file counts as missing. The cache removes no files: empty the folder
when it grows too large.

A file is code that runs with the user's rights. Its digest detects damage, not a foreign author, so the folder is the user's own.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kernelgen import fileio
from kernelgen.hlo.cpu import client
from kernelgen.hlo.execute import Executable

VARIABLE = "NEURON_SIMULATOR_CACHE"

_FORMAT = b"1"


def compiled(hlo: bytes, compile_: Callable[[bytes], Executable]) -> Executable:
    """Returns the executable of a serialized `HloModuleProto` from the folder; otherwise compiles it and stores it there.

    Raises:
        ValueError: see `compile_`.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return compile_(hlo)
    name = hashlib.sha256(_machine() + hashlib.sha256(hlo).digest()).hexdigest()
    file = Path(folder) / name[:2] / f"{name}.xla"
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
