"""`.ci/run` counts all failures, including those without a report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT

PASS = '<testcase name="a" classname="m"/>'
FAIL = '<testcase name="b" classname="m"><failure message="x"/></testcase>'
ERROR = '<testcase name="c"><error/></testcase>'
SKIP = '<testcase name="d"><skipped/></testcase>'


class Run:
    """The files of one CI run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self.lints = "passed: one\npassed: two\n"
        self.lint_status = 0

    def test(self, label: str, outcome: str, *reports: str) -> None:
        for number, report in enumerate(reports):
            path = self.folder / f"{label.strip('/')} {number}.xml"
            path.write_text(report)
            outputs = [{"name": "test.log", "uri": "file:///none"}, {"name": "test.xml", "uri": path.as_uri()}]
            self.events.append({"id": {"testResult": {"label": label}}, "testResult": {"testActionOutput": outputs}})
        self.events.append({"id": {"testSummary": {"label": label}}, "testSummary": {"overallStatus": outcome}})
        self.status = self.status or (0 if outcome == "PASSED" else 3)

    def lines(self) -> list[str]:
        (self.folder / "events").write_text("\n".join(map(json.dumps, self.events)))
        (self.folder / "lints").write_text(self.lints)
        paths = [str(self.folder / "events"), str(self.status), str(self.folder / "lints"), str(self.lint_status)]
        done = subprocess.run(
            [sys.executable, str(ROOT / ".ci/summarize.py"), *paths], capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert done.returncode == (0 if lines[-1].endswith(" 0 failed") else 1)
        return lines


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def suite(*cases: str) -> str:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>"


def test_all_is_well(run: Run) -> None:
    run.test("//a", "PASSED", suite(PASS, PASS), suite(PASS))
    assert run.lines() == ["5 passed, 0 failed"]


def test_failures_are_named_and_skipped_tests_do_not_pass(run: Run) -> None:
    run.test("//a", "FAILED", suite(PASS, FAIL, ERROR, SKIP))
    assert run.lines() == ["failed: m::b", "failed: c", "1 skipped", "3 passed, 2 failed"]


def test_a_target_that_left_no_report_counts(run: Run) -> None:
    run.test("//a", "FAILED", suite(FAIL))
    run.test("//b", "TIMEOUT")
    run.test("//c", "FAILED", "<testsuites><testsu")
    assert run.lines()[:3] == ["failed: m::b", "failed: //b (timeout)", "failed: //c (failed)"]
    assert run.lines()[-1] == "2 passed, 3 failed"


def test_a_build_that_fails_before_any_test_counts(run: Run) -> None:
    run.status = 1
    assert run.lines() == ["failed: bazel test ended with exit status 1", "2 passed, 1 failed"]


def test_lints_count(run: Run) -> None:
    run.lints, run.lint_status = "passed: one\nfailed: two\nsome: text\n", 1
    assert run.lines() == ["failed: two", "1 passed, 1 failed"]


def test_lints_that_do_not_run_count(run: Run) -> None:
    run.lints, run.lint_status = "", 2
    assert run.lines() == ["failed: //tools/lint ended with exit status 2", "0 passed, 1 failed"]
