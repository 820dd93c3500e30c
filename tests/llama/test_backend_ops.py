"""test-backend-ops on the simulated device: a fixed sample of its cases, some of each op."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
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


NKI = ("nki", "jax")
PER_TYPE = {"MUL_MAT": 5, "MUL_MAT_ID": 4, "FLASH_ATTN_EXT": 10}
"""Cases with a kernel in NKI for each op and each type of its weights or keys."""


def sample_in_nki(programs: harness.Programs, folder: Path, op: str) -> dict[str, list[str]]:
    """Returns cases with a kernel in NKI by the type of the weights or keys: spread evenly over the list, the cheapest
    of each stretch.
    """
    rows = backend_ops.computed_by(cases.listing(programs, folder, chosen=[op]), "nki", NKI)
    costs: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        kind = re.search(r"type_[aK]=(\w+)", row.case)
        assert kind
        costs[kind[1]][row.case] = row.elements
    return {kind: backend_ops.choose(of_kind, PER_TYPE[op]) for kind, of_kind in costs.items()}


@pytest.mark.long
@pytest.mark.parametrize("op", PER_TYPE)
def test_cases_of_each_type_pass_with_the_kernels_in_nki(programs: harness.Programs, tmp_path: Path, op: str) -> None:
    """Uses test-backend-ops' own limits and inputs."""
    chosen = sample_in_nki(programs, tmp_path / "list", op)
    print({kind: len(of_kind) for kind, of_kind in chosen.items()})
    assert {"f32", "f16", "bf16"} <= set(chosen)
    packed = {kind for kind in chosen if kind.startswith("q")}
    quantized = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"}
    assert packed == (set() if op == "FLASH_ATTN_EXT" else quantized)
    wanted = [case for of_kind in chosen.values() for case in of_kind]
    found = backend_ops.run(programs, tmp_path / "work", chosen=wanted, languages=NKI, language="nki")
    backend_ops.report(found)
    assert found.ok
    passed, uncompared = (
        {result.case for result in found.outcome.of(status)} for status in (cases.PASSED, cases.UNCOMPARED)
    )
    assert passed | uncompared == set(wanted)
    assert len(passed) >= 0.8 * len(wanted)  # the CPU does not compute quantized weights times F16
    made = sum((Counter(done.built.languages) for done in found.groups.values()), Counter[str]())
    assert made["nki"] >= len(passed) * 0.9


def test_an_absent_device_is_an_error(programs: harness.Programs, tmp_path: Path) -> None:
    environment = programs.environment(kernels=harness.odd_kernel(tmp_path))
    del environment["GGML_BACKEND_PATH"]
    with pytest.raises(RuntimeError, match="had no device NEURON0"):
        cases.run(programs, "test", environment, chosen=["RELU"])
