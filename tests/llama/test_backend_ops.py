"""test-backend-ops: a fixed sample of its cases, some for each op that has an emitter, on the simulated device."""

from __future__ import annotations

from pathlib import Path

import backend_ops
import harness
import pytest

# test-backend-ops has no case for these: inside its graphs they are views, or another op.
WITHOUT_CASES = {"RESHAPE", "TRANSPOSE"}


@pytest.fixture(scope="module")
def result(
    programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[harness.Outcome, dict[str, harness.Built]]:
    outcome, built = backend_ops.run(programs, {"sample": backend_ops.sample()}, tmp_path_factory.mktemp("work"))
    backend_ops.report(outcome, built)
    return outcome, built


def test_no_case_fails(result: tuple[harness.Outcome, dict[str, harness.Built]]) -> None:
    assert result[0].failures == []


def test_every_kernel_builds(result: tuple[harness.Outcome, dict[str, harness.Built]]) -> None:
    built = result[1]["sample"]
    assert built.failed == {}
    assert built.refused == {}, "the sample has a case that no emitter takes"


def test_every_case_of_the_sample_runs(result: tuple[harness.Outcome, dict[str, harness.Built]]) -> None:
    assert set(backend_ops.sample()) == set(result[0].passed)


def test_every_op_with_an_emitter_is_in_the_sample() -> None:
    ops = {case.partition("(")[0] for case in backend_ops.sample()}
    assert set(harness.emitted_ops()) - WITHOUT_CASES == ops


def test_an_absent_device_is_an_error(programs: harness.Programs, tmp_path: Path) -> None:
    environment = programs.environment(kernels=tmp_path)
    del environment["GGML_BACKEND_PATH"]
    with pytest.raises(RuntimeError, match="had no device NEURON0"):
        harness.run_ops(programs, "test", ["RELU"], environment)
