"""Generated files are up to date, and one that differs is found and written again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import regenerate
from regenerate import log_lines

ROOT = Path(__file__).parents[2]


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "BUILD_WORKSPACE_DIRECTORY": str(root)}
    return subprocess.run(
        [sys.executable, "-m", "regenerate", *arguments], env=env, capture_output=True, text=True, check=False
    )


def test_every_generated_file_is_up_to_date() -> None:
    assert list(regenerate.stale(ROOT)) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the generated files."""
    for name in regenerate.FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / name).chmod(0o644)
    return tmp_path


WORDS = (
    '"trn1n"',
    '"numpy"',
    '"trn1.2xlarge"',
    '"mul_mat"',
    "131072",
    "price PRICES",
    "| `NCC_EVRF004` |",
    "| **trn1** |",
    "kernels left out",
    '"mxfp4"',
)
"""Each generated file has one of these."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(regenerate.FILES), id="all"),
        pytest.param(list(regenerate.FILES)[:1], id="one", marks=pytest.mark.long),
    ],
)
def test_stale_files_are_named_and_written_anew(tree: Path, names: list[str]) -> None:
    good = {name: (tree / name).read_text() for name in names}
    stale = dict(good)
    for name in names:
        if name.startswith("tests/data/"):
            stale[name] = stale[name].replace('"hash": "', '"hash": "0', 1)
        else:
            for word in WORDS:
                stale[name] = stale[name].replace(word, '"other"', 1)
        assert stale[name] != good[name], name
        (tree / name).write_text(stale[name])
    checked = run(tree, "--check")
    said = "".join(f"{name} is stale: ./bazelw run //tools:regenerate\n" for name in names)
    assert (checked.returncode, checked.stdout) == (1, said)
    assert {name: (tree / name).read_text() for name in names} == stale, "a check writes nothing"
    written = run(tree)
    assert (written.returncode, written.stdout) == (0, "".join(f"{name} written\n" for name in names))
    assert {name: (tree / name).read_text() for name in names} == good
    assert run(tree, "--check").stdout == ""


def too_long(kind: str, message: str) -> bool:
    """Returns whether a message does not fit a terminal, or contains details that only debugging needs."""
    said = message.split("\n")
    return len(said) > 3 or any(len(line) > 120 for line in said) or (kind != "DEBUG" and "nearest is" in message)


def test_messages_of_the_backend_fit_a_terminal() -> None:
    """At most three lines: the event, the reason, the command to type. Details for debugging are for GGML_NEURON_LOG=2."""
    assert [(source, said) for kind, said, source in log_lines.messages() if too_long(kind, said)] == []
    assert {kind for kind, _, _ in log_lines.messages()} == set(log_lines.TITLES)


def test_parts_of_messages_fit_too() -> None:
    string = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')
    for path in sorted(log_lines.SOURCES.rglob("*.cpp")):
        if "tests" not in path.parts:
            for part in string.findall(path.read_text(encoding="utf-8")):
                text = log_lines.CONVERSION.sub("…", re.sub(r'"\s*"', "", part)[1:-1])
                assert " " not in text or not too_long("DEBUG", text.removesuffix("\\n").replace("\\n", "\n")), (
                    path.name
                )
