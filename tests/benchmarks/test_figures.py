"""A figure's ratio, its limit, and its JSON. These tests measure no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import figures
from figures import Figure, Limit, Peer


@pytest.mark.parametrize(
    ("figure", "ratio"),
    [
        (Figure("build", 10, "s", peer=Peer("loop", 40)), 0.25),
        (Figure("build", 10, "s", peer=Peer("loop", 40), direction="peer / value"), 4),
        # Costs per kernel: 30 s for 1,000 against 2 s for 100.
        (Figure("plan", 30, "s", 1000, Peer("smaller", 2, 100)), 1.5),
        (Figure("plan", 30, "s", 1000, Peer("smaller", 2, 100), "peer / value"), 1 / 1.5),
        # The same number of kernels: the ratio of the times.
        (Figure("plan", 30, "s", 100, Peer("other", 2, 100)), 15),
        (Figure("plan", 30, "s", 100, Peer("other", 2)), 15),
        (Figure("counted", 0, "kernels", peer=Peer("cold build", 8)), 0),
        (Figure("counted", 8, "kernels", peer=Peer("cold build", 0)), None),
        (Figure("alone", 8, "s"), None),
    ],
)
def test_ratio(figure: Figure, ratio: float | None) -> None:
    assert figure.ratio == (None if ratio is None else pytest.approx(ratio))


@pytest.mark.parametrize(
    ("limit", "met"),
    [
        (None, True),
        (Limit("value", at_most=10), True),
        (Limit("value", at_most=9.9), False),
        (Limit("value", at_least=10), True),
        (Limit("value", at_least=10.1), False),
        (Limit("ratio", at_least=0.25), True),
        (Limit("ratio", at_least=0.26), False),
        (Limit("ratio", at_most=0.24), False),
        (Limit("value", 5, 9), False),
        (Limit("value", 5, 10), True),
    ],
)
def test_limit(limit: Limit | None, met: bool) -> None:
    assert Figure("build", 10, "s", peer=Peer("loop", 40), limit=limit).met is met


def test_a_limited_ratio_that_there_is_not_is_missed() -> None:
    assert not Figure("build", 10, "s", limit=Limit("ratio", at_most=1)).met
    assert not Figure("build", 10, "s", peer=Peer("loop", 0), limit=Limit("ratio", at_most=1)).met


@pytest.mark.parametrize(
    ("value", "wanted", "met"), [(3, 3, True), (2, 3, False), (64, range(1, 65), True), (65, range(1, 65), False)]
)
def test_counts_are_exact_or_in_a_range(value: int, wanted: int | range, met: bool) -> None:
    assert figures.exactly("emits", value, wanted).met is met


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (3.0, 1)])
def test_report_exits_with_1_on_a_miss(
    tmp_path: Path, value: float, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    args = figures.arguments("Doc.\n\nMore.").parse_args(["--json", str(tmp_path / "f.json")])
    assert figures.report(args, lambda: [Figure("it", value, "s", limit=Limit("value", at_most=2))]) == status
    assert ("MISSED" in capsys.readouterr().out) is bool(status)
    assert json.loads((tmp_path / "f.json").read_text())["figures"][0]["met"] is not bool(status)
