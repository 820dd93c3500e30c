"""What a work folder keeps between runs: what results depend on, as digests, and a lock for each folder in it."""

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
"""A dataclass with `seconds`."""

FORMAT = 1
"""Raised when results of before are not what this would write."""

COMPILED = "xla"
"""The folder beside the work folder in which the simulator keeps what XLA compiled."""

# Parts of kernelgen that neither a kernel's bytes nor its execution depend on.
_APART = {"build", "cache", "cli", "render"}

_PACKAGES = ("jax", "jaxlib", "ml_dtypes", "numpy")

_MODULES = ("cases", "harness", "kernel_builder", "case_runner", "worker_pool", "work_folder")
"""Those of this folder that results depend on."""


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
    """Returns a digest of the programs and of what they run on."""
    files = [file for file in sorted(programs.llama_cpp.iterdir()) if re.match(r"test-backend-ops|libggml", file.name)]
    environment = {k: v for k, v in os.environ.items() if re.match(r"(XLA|JAX|TF|PJRT|OMP)_", k)}
    return digest(digest_files([*files, programs.plugin, programs.libnrt]), environment, platform.machine(), _cpu())


def _cpu() -> str:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return platform.processor()


def sha256(path: Path) -> str:
    """Returns a file's digest; empty when there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a group's folder; waits while a worker of a run that was killed is still at it."""
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
        name: of the outcome.
        depends: a digest of all that it depends on.
        read: returns the outcome that fields of JSON are of.
        make: returns the outcome, with a folder for files that nobody needs afterwards.
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
