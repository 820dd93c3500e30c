"""tools/reproduce: builds under different conditions give equal bytes, and a build that differs is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

import reproduce

CLOCK = """
import time

import numpy as np

from kernelgen.emitters import emitter


@emitter("add")
def add(a, b, *, out):
    return a + b * np.float32(time.time_ns() % 1000003)
"""


@pytest.mark.long
def test_builds_are_the_same_under_other_conditions() -> None:
    found = reproduce.compare(["basic"])
    assert [comparison.differences for comparison in found] == [[], [], []]
    assert [comparison.compared["NEFFs"] for comparison in found] == [10, 20, 10]
    assert found[1].compared["actions"] > 20


def test_an_emitter_that_asks_the_clock_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "clock.py").write_text(CLOCK)
    (found,) = reproduce.compare(["basic"], with_bazel=False, kernels=tmp_path)
    differing = {line.split()[0] for line in found.differences}
    assert differing >= {"HLOs", "NEFFs", "packs"}
    assert all("add-" in line or line.startswith(("packs", "indexes")) for line in found.differences)


def test_what_only_one_build_has_is_a_difference() -> None:
    comparison = reproduce.Comparison("x")
    comparison.files("packs", {"a": "1"}, {"b": "1"})
    assert comparison.differences == ["packs a is in the first build only", "packs b is in the second build only"]
    comparison = reproduce.Comparison("x")
    comparison.files("packs", {}, {})
    assert comparison.differences == ["no packs at all"]
