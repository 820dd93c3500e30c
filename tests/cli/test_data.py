"""Data that an emitter reads beside its sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kernelgen.errors import KernelgenError
from kernelgen.steps import worker

from .conftest import Done

Run = Callable[..., Done]

READS = """
import pathlib
from kernelgen.emitters import emitter

FACTOR = float(pathlib.Path(__file__).with_name("factor.txt").read_text())


@emitter("scaled")
def scaled(x):
    return x * FACTOR
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/factor.txt").write_text("2")
    (tmp_path / "mine/own.py").write_text(READS)
    return tmp_path


def test_edited_file_beside_an_emitter_emits_its_kernels(kernelgen: Run, folder: Path) -> None:
    kernels = '[{op: scaled, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}]'
    (folder / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels: {kernels}\n")
    words = [
        folder / "m.yaml",
        "-o",
        folder / "out",
        "-j",
        "1",
        "--compiler",
        "simulator",
        "--kernels",
        folder / "mine",
    ]
    assert "1 built (1 compiled, 0 up to date)" in kernelgen("build", *words).out
    assert kernelgen("build", *words, "--dry-run").out == ""
    (folder / "mine/factor.txt").write_text("3.5")
    assert "1 built (1 compiled, 0 up to date)" in kernelgen("build", *words).out


# --- the steps as Bazel and CMake call them -------------------------------------------------------------------------------


def step(folder: Path, name: str, *more: str) -> tuple[int, str]:
    tensor = "(4,1,1,1)/f32"
    spec = json.dumps({"op": "scaled", "inputs": [tensor], "output": tensor, "params": {}, "alias": None})
    words = [f"--spec={spec}", "--library=mine", f"--emitter={folder / 'mine/own.py'}"]
    return worker.run([name, *words, *more])


@pytest.mark.parametrize("declared", ["mine/factor.txt", "mine"])
def test_worker_imports_an_emitter_again_when_its_data_changes(folder: Path, declared: str) -> None:
    hlos = []
    for factor in ("2", "3", "2"):
        (folder / "mine/factor.txt").write_text(factor)
        assert step(folder, "emit", f"--output={folder / 'k'}", f"--data={folder / declared}") == (0, "")
        hlos.append((folder / "k").read_bytes())
    assert hlos[0] == hlos[2] != hlos[1]


def test_depfile_names_data_and_imports_from_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere/users_helper.py").touch()
    monkeypatch.syspath_prepend(folder / "elsewhere")
    imported_before = ModuleType("kernelgen.kernels.other")  # by another kernel's emitter
    imported_before.__file__ = str(folder / "other.py")
    monkeypatch.setitem(sys.modules, imported_before.__name__, imported_before)
    (folder / "mine/own.py").write_text(f"import users_helper\n{READS}")
    words = [f"--{name}={folder / name}" for name in ("output", "depfile")]
    assert step(folder, "emit", *words, f"--data={folder / 'mine/factor.txt'}") == (0, "")
    needed = (folder / "depfile").read_text().replace("\\\n", "").split()
    assert {str(folder / file) for file in ("mine/own.py", "mine/factor.txt", "elsewhere/users_helper.py")} <= {*needed}
    assert not [
        file for file in needed if "/site-packages/" in file or file.endswith(("/json/__init__.py", "/other.py"))
    ]


def test_an_error_of_the_emitters_own_is_a_failure(folder: Path) -> None:
    (folder / "mine/own.py").write_text(
        "from kernelgen.emitters import emitter\nfrom kernelgen.errors import KernelgenError\n\n"
        "@emitter('scaled')\ndef scaled(x):\n    raise KernelgenError('done', exit_code=0)\n",
    )
    code, said = step(folder, "emit", f"--output={folder / 'k'}")
    assert code == 1 and "done" in said
    assert issubclass(KernelgenError, Exception) and not (folder / "k").exists()
