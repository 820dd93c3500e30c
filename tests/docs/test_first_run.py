"""docs/results/first-run.md counts the commands of the ways to a first answer as their guides have them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def commands(text: str) -> int:
    """Returns how many commands the indented blocks of a text have; a program in Python counts as one."""
    count = 0
    for block in re.findall(r"(?:^(?:    |        )\S.*\n|^ {4,}\S.*\n|^\n(?=    ))+", text, re.MULTILINE):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        python = any(re.match(r"(?:import|from) ", line) for line in lines)
        count += 1 if python else sum(len(line.split(" && ")) for line in lines)
    return count


def section(page: str, *headings: str) -> str:
    """Returns sections of a guide, or all of it."""
    text = (DOCS / "guides" / page).read_text()
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return "".join(part for part in parts if not headings or part.splitlines()[0].removeprefix("## ") in headings)


@pytest.mark.parametrize(
    ("page", "headings"),
    [
        ("chat.md", ["# A first chat"]),
        ("llama-cpp-python.md", []),
        ("run-a-model.md", ["Set up once", "In each shell", "Derive, build, run"]),
    ],
)
def test_the_commands_of_a_way_are_as_many_as_the_page_says(page: str, headings: list[str]) -> None:
    results = (DOCS / "results" / "first-run.md").read_text()
    (said,) = re.findall(rf"^\| \[[^]]*\]\(\.\./guides/{page}\) \| (\d+) \|", results, re.MULTILINE)
    text = section(page, *headings)
    if page == "chat.md":
        text = text.partition("    ./bazelw run //examples:chat -- --prompt")[0]
    assert commands(text) == int(said)


def test_commands_are_counted() -> None:
    assert commands("a\n\n    one && two\n    three\n\nb\n\n    import x\n    x.f()\n") == 4
