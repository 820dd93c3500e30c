"""Makes the references and kernel_harness importable by name, and marks most cases of each test as long."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

SAMPLE = 3
"""Without the long tests, every third case of a parametrized test runs: each case traces and compiles a kernel."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            test = item.nodeid.partition("[")[0]
            if seen[test] % SAMPLE:
                item.add_marker("long")
            seen[test] += 1
