"""The programs under test, and the modules of tools/llama_cpp by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "llama_cpp"))

import harness


@pytest.fixture(scope="session", autouse=True)
def builds_share_workers(keep_workers: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Lets builds take a second or two less: their workers have imported JAX before."""
    with keep_workers():
        yield


@pytest.fixture(scope="session")
def programs(
    there: Callable[[Path, str], Path], neuron_target: str, tmp_path_factory: pytest.TempPathFactory
) -> harness.Programs:
    """Returns the programs; `harness.target()` is the target of the tests that use them."""
    return replace(harness.Programs.find(there), compiled=tmp_path_factory.mktemp("compiled"))
