"""Whole architectures over two simulated NeuronCores: a sample of the checks of `bazel run
//tools/llama_cpp:split_architectures`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import harness
import pytest
import split_architectures
from models import ArchitectureRow
from split_architectures import SplitResult, SplitRunner

SAMPLE = ("llama", "qwen3", "gemma3", "qwen35moe", "apertus", "mamba")
"""Dense and with experts; one head of keys; a window; a recurrent one with experts; one without a file; one that
llama.cpp does not split.
"""

GOOD = SplitResult(
    rows=[
        ArchitectureRow(0.0, "OK", "OK", "CPU", "Dense"),
        ArchitectureRow(1e-10, "OK", "OK", "Neuron", "Dense"),
        ArchitectureRow(1e-13, "OK", "SKIP", "Meta", "Dense"),
    ],
    kernels=80,
    ran=1000,
    kept={"GET_ROWS": 4},
    reductions=16,
)


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLE)
def test_architectures_run_on_kernels_of_their_slices(programs: harness.Programs, tmp_path: Path, name: str) -> None:
    runner = SplitRunner(programs, tmp_path / "work", 1, 2, "none")
    model = runner.do(name, lambda stage, number: None)
    print(split_architectures.line(name, model))
    assert model.passed, model
    assert bool(model.refused) == (name == "mamba")
    assert bool(model.asked) == (name == "apertus")
    assert model.refused or model.reductions > 0
    assert set(model.kept) <= {"GET_ROWS"}
    assert runner.do(name, lambda stage, number: pytest.fail("computed again")) == model


@pytest.mark.long
def test_sums_are_in_kernels_where_slices_differ(programs: harness.Programs, tmp_path: Path) -> None:
    """The columns of a feed-forward network, 384, split unevenly over two cores: kernels contain attention and the sums
    beside it.
    """
    model = SplitRunner(programs, tmp_path, 1, 2, "step").do("gpt2", lambda stage, number: None)
    assert model.passed, model
    assert model.launches > 0 and model.reductions == 0


def test_what_is_on_the_cpu_or_off_the_limit_does_not_pass() -> None:
    assert GOOD.passed
    assert SplitResult(refused="llama.cpp splits no tensors of it").passed
    changes: tuple[dict[str, object], ...] = (
        {"elsewhere": {"ADD": 1}},
        {"failure": "exit status 1"},
        {"rows": GOOD.rows[:2]},  # no row for both cores
        {"rows": [*GOOD.rows[:2], replace(GOOD.rows[2], nmse=2e-4)]},
        {"rows": [GOOD.rows[0], replace(GOOD.rows[1], roundtrip="FAIL"), GOOD.rows[2]]},
    )
    for change in changes:
        bad = SplitResult(**GOOD.__dict__ | change)
        assert not bad.passed
        assert "FAILED" in split_architectures.line("bad", bad)


def test_the_page_has_a_row_for_each_model() -> None:
    found = {
        "good": GOOD,
        "bad": SplitResult(**GOOD.__dict__ | {"elsewhere": {"ADD": 1, "MUL": 2}, "reasons": {"ADD: not | cut": 1}}),
        "worse": SplitResult(failure="it ended | with status 1\nand more"),
        "none": SplitResult(refused="llama.cpp splits no tensors of it"),
    }
    text = split_architectures.page(found, 2, "none")
    assert "| good | Dense | 1.0e-13 | 1.0e-10 | 80 | 1000 | 16 |  | 4 GET_ROWS |\n" in text
    assert "| bad | Dense | 1.0e-13 | 1.0e-10 | 80 | 1000 | 16 | 2 MUL, 1 ADD (ADD: not / cut) | 4 GET_ROWS |\n" in text
    assert "| worse | | | | | | | it ended / with status 1 | |\n" in text
    assert "Of 4 architectures llama.cpp splits 3 (2 models). 1 of these pass" in text
    assert "llama.cpp splits no tensors of none." in text


def test_the_page_says_that_all_pass() -> None:
    """The page has the sample's rows, without an op on the CPU."""
    text = split_architectures.PAGE.read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("| ")][1:]
    assert {row[0] for row in rows} >= set(SAMPLE) - {"mamba"}
    assert all(row[7] == "" and float(row[2]) <= 1e-4 for row in rows), rows
