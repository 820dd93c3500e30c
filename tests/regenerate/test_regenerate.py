"""Generated files are as they would be generated, and one that is not is found out and mended."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("name", list(regenerate.FILES))
def test_a_stale_file_is_named_and_written_anew(tree: Path, name: str) -> None:
    good = (tree / name).read_text()
    stale = good
    for word in (
        '"trn1n"',
        '"numpy"',
        '"trn1.2xlarge"',
        '"mul_mat"',
        "131072",
        "price PRICES",
        "| `NCC_EVRF004` |",
        "| **trn1** |",
        "kernels left out",
    ):
        stale = stale.replace(word, '"other"', 1)
    assert stale != good
    (tree / name).write_text(stale)
    checked = run(tree, "--check")
    assert (checked.returncode, checked.stdout) == (1, f"{name} is stale: ./bazelw run //tools:regenerate\n")
    assert (tree / name).read_text() != good, "a check writes nothing"
    written = run(tree)
    assert (written.returncode, written.stdout) == (0, f"{name} written\n")
    assert (tree / name).read_text() == good
    assert run(tree, "--check").stdout == ""


def test_lines_of_the_log_are_read_from_a_source() -> None:
    source = 'if (a) {\n    NEURON_WARN("core %d: %s takes %.1f MiB, "\n                "not \\"%s\\"\\n",\n                vnc);\n}\nNEURON_ERROR("%s\\n", text);'
    assert list(log_lines.lines(source)) == [("WARN", 'core …: … takes … MiB, not "…"')]
