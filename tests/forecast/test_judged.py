"""Published measurements compared with the models: the errors, and the programs that count them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import forecast_judged


def test_the_forecast_is_as_far_from_published_figures_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast_judged.main(["--markdown"]) == 0
    said = capsys.readouterr().out
    page = (Path(__file__).resolve().parents[2] / "docs" / "results" / "forecast-judged.md").read_text()
    table, counts = said.strip().split("\n\n")
    assert table in page and counts in page
    assert sum("| added later |" in line for line in table.splitlines()) == len(forecast_judged.LATER) >= 15


def test_half_of_the_first_figures_judge_and_no_rule_was_chosen_by_them() -> None:
    first = [one for one in forecast_judged.FIGURES if not one.in_table]
    assert len(first) == 29 and not any(one.in_table for one in forecast_judged.LATER)
    errors = [one.modelled() / one.measured - 1 for one in (*first[1::2], *forecast_judged.LATER)]
    assert sum(abs(error) <= 0.3 for error in errors) >= 0.8 * len(errors)  # the goal


def test_the_time_of_the_kernel_for_attention_is_between_those_that_were_measured() -> None:
    assert forecast_judged.flash_ms("trn1", 16, 2048, 0) == pytest.approx(6.184)
    assert forecast_judged.flash_ms("trn1", 32, 2048, 6144) == pytest.approx(2 * 19.740)
    assert forecast_judged.flash_ms("trn2", 8, 2048, 0) == pytest.approx(2.742 / 2)
    assert forecast_judged.flash_ms("trn2", 8, 8192, 0) == pytest.approx(2.742 + 4.411)
    assert 14.045 < forecast_judged.flash_ms("trn2", 8, 4096, 32768) < 17
    assert forecast_judged.in_buckets(8192, 4096) == [(4096, 8192), (4096, 8192)]
