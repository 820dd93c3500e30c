"""The programs under test, and this folder's modules by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import harness


@pytest.fixture(scope="session")
def programs(there: Callable[[Path, str], Path]) -> harness.Programs:
    return harness.Programs.find(there)
