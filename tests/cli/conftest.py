"""Fixtures of the command line's tests: running kernelgen in this process, or in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernelgen import cli

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def kernelgen(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Returns a function that runs a command line in this process."""

    def run(*args: str | Path) -> Done:
        capsys.readouterr()
        code = cli.run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


def environment() -> dict[str, str]:
    """Returns the environment of a separate process: the same modules as here, and a width independent of the terminal."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "120"}


@pytest.fixture
def process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a command line in its own process."""

    def run(*args: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kernelgen", *map(str, args)],
            env={**environment(), **more},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.fixture
def basic() -> Path:
    return ROOT / "manifests" / "basic.yaml"
