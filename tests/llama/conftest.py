"""Fixtures: the programs under test. Makes the modules of tools/llama_cpp importable."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "llama_cpp"))

import harness


@pytest.fixture(scope="session")
def programs(
    there: Callable[[Path, str], Path], neuron_target: str, tmp_path_factory: pytest.TempPathFactory
) -> harness.Programs:
    """Returns the programs; sets `harness.target()` to the target of the tests."""
    return replace(harness.Programs.find(there), compiled=tmp_path_factory.mktemp("compiled"))
