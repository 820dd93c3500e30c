"""The state of a work folder between runs: digests of what results depend on, and a lock for each folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import harness

import kernelgen
from kernelgen import fileio

Outcome = TypeVar("Outcome", bound=Any)
"""A dataclass with an attribute `seconds`."""

FORMAT = 1
"""Incremented if this code would no longer produce the same results."""

COMPILED = "xla"
"""The folder beside the work folder in which the simulator caches XLA's output."""

# Parts of kernelgen on which neither a kernel's bytes nor its execution depend.
_APART = {"build", "cache", "cli", "render"}

_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy")

_MODULES = ("cases", "harness", "kernel_builder", "case_runner", "worker_pool", "work_folder")
"""The modules of this folder on which results depend."""


def digest(*parts: object) -> str:
    """Returns the SHA-256 of some values, in hex."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def digest_files(files: Sequence[Path]) -> str:
    """Returns the SHA-256 of some files' names and contents."""
    return digest(*[(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])


def kernelgen_digest() -> str:
    """Returns a digest of kernelgen, of what it imports, and of this folder's own modules."""
    package = Path(kernelgen.__file__).parent
    files = [
        file
        for file in sorted(package.rglob("*"))
        if file.suffix in (".py", ".json") and not _APART & set(file.relative_to(package).parts)
    ]
    names = [str(file.relative_to(package)) for file in files]
    files += [Path(__file__).with_name(f"{name}.py") for name in _MODULES]
    versions = [importlib.metadata.version(package) for package in _PACKAGES]
    return digest(FORMAT, digest_files(files), names, versions, sys.version)


def programs_digest(programs: harness.Programs) -> str:
    """Returns a digest of the programs and of the machine and environment in which they run."""
    files = [file for file in sorted(programs.llama_cpp.iterdir()) if re.match(r"test-backend-ops|libggml", file.name)]
    environment = {k: v for k, v in os.environ.items() if re.match(r"(XLA|JAX|TF|PJRT|OMP)_", k)}
    return digest(digest_files([*files, programs.plugin, programs.libnrt]), environment, platform.machine(), _cpu())


def _cpu() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


def sha256(path: Path) -> str:
    """Returns a file's digest; empty if the file does not exist."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks a group's folder; waits while a worker of a killed run still uses it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept(
    work: Path,
    name: str,
    depends: str,
    read: Callable[[dict[str, Any]], Outcome],
    make: Callable[[Path], Outcome],
) -> Outcome:
    """Returns an outcome that an earlier run wrote to `NAME.json`, or a new one.

    Args:
        work: the folder with outcomes.
        name: the name of the outcome.
        depends: a digest of all that the outcome depends on.
        read: creates the outcome from JSON fields.
        make: computes the outcome, given a folder for temporary files.
    """
    result = work / f"{name}.json"
    with locked(work / name):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads(result.read_text())
            if before["key"] == depends:
                return read(before["model"])
        with tempfile.TemporaryDirectory(dir=work) as folder:
            begun = time.monotonic()
            outcome = make(Path(folder))
            outcome.seconds = round(time.monotonic() - begun, 1)
            value = {"key": depends, "model": asdict(outcome)}
            fileio.write_bytes(result, json.dumps(value, indent=1).encode())
            return outcome
