"""docs/results/first-run.md has the right numbers of commands for the guides to a first answer."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FIRST_RUN = runpy.run_path(str(ROOT / "tools" / "first_run" / "first_run.py"))
commands, run, table = FIRST_RUN["commands"], FIRST_RUN["run"], FIRST_RUN["table"]


def section(page: str, *headings: str) -> str:
    """Returns sections of a guide, or the whole guide."""
    text: str = FIRST_RUN["sections"]((DOCS / "guides" / page).read_text(), headings)
    return text


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
    assert len(list(commands(text))) == int(said)


PAGE = """Type:

    export X=7 && echo said
    cat

`answer.py`:

        import sys
        if sys.argv:
            print("first", $X)

Then:

    sh -c 'exit 0'
"""


def test_commands_of_a_page_run_in_one_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    todo = list(commands(PAGE))
    assert [one.shown for one in todo] == ["export X=7", "echo said", "cat", "(answer.py)", "sh -c 'exit 0'"]
    timed = list(run(todo, tmp_path, dict(os.environ)))
    assert [one.command for one in timed] == todo
    assert [one.first is None for one in timed] == [True, False, True, True, True]
    assert (tmp_path / "answer.py").read_text() == 'import sys\nif sys.argv:\n    print("first", $X)\n'
    assert len(list(table(timed))) == 2 + len(todo) + 1
    assert "$ echo said\n\nsaid" not in capsys.readouterr().out


def test_a_command_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit status 3: sh -c 'exit 3'"):
        list(run(list(commands("    sh -c 'exit 3'\n    touch there\n")), tmp_path, dict(os.environ)))
    assert not (tmp_path / "there").exists()


def test_processor_seconds_are_those_of_the_command_and_not_of_waiting(tmp_path: Path) -> None:
    waits, computes = run(
        list(commands("    sleep 0.4\n    python3 -c 'sum(range(20_000_000))'\n")), tmp_path, dict(os.environ)
    )
    assert waits.seconds >= 0.4
    assert waits.processor < 0.1 < computes.processor
