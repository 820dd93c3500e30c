"""Describes the machine and the software of a measurement, to be stored with its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "numpy", "protobuf")


def describe() -> dict[str, Any]:
    """Returns CPU, cores, memory, system, load, versions, and the commit; unknown values are None.

    The result contains nothing that identifies the machine or its user.
    """
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)),
        "memory_mb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6),
        "system": _release(),
        "kernel": platform.release(),
        "load": [round(n, 2) for n in os.getloadavg()],
        "versions": {
            "python": platform.python_version(),
            "bazel": (CHECKOUT / ".bazelversion").read_text().strip(),
            "cmake": _said("cmake", "--version"),
            "ninja": _said("ninja", "--version"),
            **{name: _version(name) for name in PACKAGES},
        },
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }


def _cpu() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or None


def _release() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return platform.system()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    return _output(["git", "-C", str(CHECKOUT), *arguments])


def _said(program: str, *arguments: str) -> str | None:
    """Returns the version that a program prints: the last word of its first line."""
    if shutil.which(program) is None:
        return None
    said = _output([program, *arguments])
    return said.splitlines()[0].split()[-1] if said else None


def _output(command: Sequence[str]) -> str | None:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
