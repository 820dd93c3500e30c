"""The programs under test, and the modules of tools/llama_cpp by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "llama_cpp"))

import harness


@pytest.fixture(scope="session")
def programs(there: Callable[[Path, str], Path], neuron_target: str) -> harness.Programs:
    """Returns the programs; `harness.target()` is the target of the tests that use them."""
    return harness.Programs.find(there)
