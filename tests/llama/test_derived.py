"""What `kernelgen model` derives is what a run asks for; `bazel run //tests/llama:derived` does it for every architecture."""

from __future__ import annotations

import derived
import harness
import pytest

# A sliding window, a recurrent model, one with both and experts, and attention sinks.
ARCHITECTURES = ("gemma3", "mamba", "qwen3next", "gpt-oss")


@pytest.fixture(scope="module")
def rows(programs: harness.Programs) -> list[derived.Compared]:
    return derived.compare_all(programs, ARCHITECTURES)


def test_no_kernel_is_missing(rows: list[derived.Compared]) -> None:
    assert {row.name.partition(" ")[0] for row in rows} == set(ARCHITECTURES)
    for row in rows:
        assert row.failure == ""
        assert row.missing == ()
        assert row.refused == ()
        assert row.derived >= row.recorded > 40


def test_the_page_has_a_row_for_each(rows: list[derived.Compared]) -> None:
    text = derived.page([*rows, derived.Compared("broken", failure="no | model")])
    assert text.count("\n| ") == len(rows) + 2
    assert "| broken | | | | | | no / model |\n" in text
    written = derived.PAGE.read_text(encoding="utf-8")
    for row in rows:
        assert any(line in written for line in text.splitlines() if line.startswith(f"| {row.name} |"))
