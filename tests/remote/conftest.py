"""Makes benchmarks/scratch.py importable: the tests build in its scratch checkouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Under Bazel, this file is a link into the checkout; the scratch copies are made of the checkout itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import scratch


@pytest.fixture(scope="session")
def checkouts() -> Iterator[scratch.Checkouts]:
    with scratch.checkouts(scratch.ONE_WORKER) as made:
        yield made


@pytest.fixture
def checkout(checkouts: scratch.Checkouts) -> Iterator[scratch.Checkout]:
    with checkouts.lend("project") as made:
        yield made
