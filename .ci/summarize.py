"""Counts what passed and what failed in one run of the tests and the lints.

    python3 .ci/summarize.py EVENTS TEST_STATUS LINTS LINT_STATUS

EVENTS is Bazel's build event file (JSON): it names the test.xml of every test of this run and no older one. LINTS has a line
"passed: NAME" or "failed: NAME" for each lint. A step that failed without a failed test or lint counts as one failure: nothing
that went wrong may be missing from the count.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from urllib.parse import unquote, urlparse


def count_tests(events: Path, status: int) -> tuple[Counter[str], list[str]]:
    """Returns the number of passed, failed and skipped test cases, and what failed, by name."""
    counts: Counter[str] = Counter()
    failed: list[str] = []
    explained: set[str] = set()
    bad_targets: dict[str, str] = {}
    lines = events.read_text().splitlines() if events.exists() else []
    for event in map(json.loads, lines):
        if "testResult" in event:
            before = len(failed)
            for output in event["testResult"].get("testActionOutput", []):
                if output["name"] == "test.xml":
                    count_cases(Path(unquote(urlparse(output["uri"]).path)), counts, failed)
            if len(failed) > before:
                explained.add(event["id"]["testResult"]["label"])
        elif "testSummary" in event and event["testSummary"]["overallStatus"] != "PASSED":
            bad_targets[event["id"]["testSummary"]["label"]] = event["testSummary"]["overallStatus"]
    for label in sorted(bad_targets.keys() - explained):
        # A time limit, a crash or a failed build leaves no report of its own.
        failed.append(f"{label} ({bad_targets[label].lower()})")
        counts["failed"] += 1
    if status and not failed:
        failed.append(f"bazel test ended with exit status {status}")
        counts["failed"] += 1
    return counts, failed


def count_cases(report: Path, counts: Counter[str], failed: list[str]) -> None:
    """Adds the cases of one JUnit report; one that a killed test left half-written has none."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return
    for case in cases:
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            counts["failed"] += 1
            failed.append("::".join(filter(None, (case.get("classname"), case.get("name")))))
        else:
            counts["skipped" if "skipped" in outcomes else "passed"] += 1


def main(events: str, test_status: str, lints: str, lint_status: str) -> int:
    counts, failed = count_tests(Path(events), int(test_status))
    for line in Path(lints).read_text().splitlines():
        outcome, _, name = line.partition(": ")
        if outcome in ("passed", "failed") and name:
            counts[outcome] += 1
            failed += [name] if outcome == "failed" else []
    if int(lint_status) and not any(line.startswith("failed: ") for line in Path(lints).read_text().splitlines()):
        counts["failed"] += 1
        failed.append(f"//tools/lint ended with exit status {lint_status}")
    for name in failed:
        print(f"failed: {name}")
    if counts["skipped"]:
        print(f"{counts['skipped']} skipped")
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
