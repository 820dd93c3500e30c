"""The C++ test programs: from Bazel, or built here with CMake."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# For the modules that write bundles, and tables of lookups in them.
sys.path.insert(0, str(ROOT / "backend" / "bundle" / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "data"))

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Returns a function that runs a test program of backend/bundle with some arguments."""
    folder = ROOT / "backend" / "bundle"
    if not (folder / "bundle_test").exists():
        source, folder = folder, tmp_path_factory.mktemp("programs")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(["cmake", *generator, "-S", source, "-B", folder], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", folder, "--parallel"], check=True, stdout=subprocess.DEVNULL)
        folder /= "tests"

    def run(program: str, *arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [folder / program, *map(str, arguments)]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace", check=False)

    return run
