"""Makes benchmarks/ importable, for the scratch checkouts in which the tests build, and the double of NKI's own compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Under Bazel, this file is a link into the checkout; the scratch copies are made of the checkout itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data" / "native_kernels"))

import scratch


@pytest.fixture(scope="session")
def checkouts() -> Iterator[scratch.Checkouts]:
    with scratch.checkouts(scratch.ONE_WORKER) as made:
        yield made
