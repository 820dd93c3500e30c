"""The output of `kernelgen --version`: the version, its commit, and the versions of Python and JAX.

tools/packaging runs this file as a script, without kernelgen on its path.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
COMMIT = "commit.txt"
"""A file of the package that tools/packaging writes when it builds a wheel or an sdist."""


def text() -> str:
    """Returns two lines: kernelgen's version and commit; and Python, JAX and the machine."""
    from kernelgen import __version__

    commit = _of_checkout(PACKAGE.parents[1]) or _of_package(PACKAGE)
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        jax = "not installed"
    return (
        f"kernelgen {__version__} ({f'commit {commit}' if commit else 'commit unknown'})\n"
        f"Python {platform.python_version()}, JAX {jax}, {platform.system()} {platform.machine()}"
    )


def describe(checkout: Path) -> str | None:
    """Returns the first twelve digits of a checkout's commit, with `-dirty` if files differ from it; None without git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _of_checkout(root: Path) -> str | None:
    """Returns the commit of the checkout that contains the package; None if there is none."""
    return describe(root) if (root / ".git").exists() and (root / "pyproject.toml").is_file() else None


def _of_package(package: Path) -> str | None:
    file = package / COMMIT
    return file.read_text().strip() if file.is_file() else None
