"""test-backend-ops: a fixed sample of its cases, some for each op, on the simulated device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import backend_ops
import cases
import harness
import pytest


@pytest.fixture(scope="module")
def summary(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> backend_ops.Summary:
    found = backend_ops.run(programs, tmp_path_factory.mktemp("work"), chosen=backend_ops.sample())
    backend_ops.report(found)
    return found


def test_no_case_fails(summary: backend_ops.Summary) -> None:
    assert summary.outcome.of(cases.FAILED) == []
    assert summary.outcome.failures == []


def test_every_kernel_builds(summary: backend_ops.Summary) -> None:
    assert summary.failed_kernels == {}


def test_every_case_of_the_sample_runs(summary: backend_ops.Summary) -> None:
    passed = Counter(result.case for result in summary.outcome.of(cases.PASSED))
    assert set(backend_ops.sample()) == set(passed)
    assert summary.outcome.ran >= len(passed) * 0.9  # some cases have no elements and run nothing


def test_the_sample_is_large_and_has_some_of_every_op(programs: harness.Programs, tmp_path: Path) -> None:
    sample = backend_ops.sample()
    assert len(sample) == len(set(sample)) >= 400
    listed = {row.op for row in cases.listing(programs, tmp_path)}
    assert len(listed) > 100
    assert listed == {cases.op_of(case) for case in sample}


def test_an_absent_device_is_an_error(programs: harness.Programs, tmp_path: Path) -> None:
    environment = programs.environment(kernels=harness.odd_kernel(tmp_path))
    del environment["GGML_BACKEND_PATH"]
    with pytest.raises(RuntimeError, match="had no device NEURON0"):
        cases.run(programs, "test", environment, chosen=["RELU"])
