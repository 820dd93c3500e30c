"""The interpreter as a package of its own: its imports, its page, its command line, and its wheel."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import nki_interpreter
from nki_interpreter import __main__ as program

PACKAGE = Path(nki_interpreter.__file__).parent
ALLOWED = {*sys.stdlib_module_names, "nki_interpreter", "numpy", "ml_dtypes", "jax", "jaxlib"}


def imported(path: Path) -> set[str]:
    """Returns the packages that a module imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_it_needs_nothing_of_kernelgen() -> None:
    modules = [*PACKAGE.rglob("*.py")]
    assert len(modules) > 30
    assert {str(path): more for path in modules if (more := imported(path) - ALLOWED)} == {}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    kernel, _ = blocks("python")
    (tmp_path / "add.py").write_text(kernel)
    return tmp_path


def test_the_page_runs(folder: Path) -> None:
    (command,), (_, api) = blocks("sh"), blocks("python")
    (folder / "api.py").write_text(api)
    for line in (command, "python api.py"):
        done = subprocess.run(
            line.replace("python", sys.executable, 1),
            shell=True,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = program.main(list(map(str, words)))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_results_are_those_of_the_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    np.save(folder / "one.npy", one)
    code, out, _ = run(capsys, folder / "add.py", "add", folder / "one.npy", "f32[64,8]", "--output", folder / "out")
    assert code == 0
    assert out.startswith("result 0: float32[64, 8], from ") and "modelled, not measured: instructions" in out
    made = np.load(folder / "out" / "result0.npy")
    other = np.random.default_rng(0).standard_normal((64, 8), dtype=np.float32)
    np.testing.assert_array_equal(made, one + other)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add.py", "sub"), "has no function 'sub'"),
        (("none.py", "add"), "none.py is not a file"),
        (("add.py", "add", "f32[4"), "'f32[4': expected a .npy file, or a dtype and a shape such as f32[128,512]"),
        (("add.py", "add", "f32[99999,99999]"), "more than 4 GiB"),
        (("add.py", "add", "none.npy"), "none.npy: [Errno 2] No such file or directory"),
        (("add.py", "add", "f32[64,8]"), "err_arguments: add: missing a required argument: 'b'"),
        (("add.py", "add", "f32[129,8]", "f32[129,8]"), "add.py:8: err_num_partition_exceed_arch_limit"),
        (("add.py", "add", "--static", "x"), "'x': expected NAME=VALUE"),
        (("add.py", "add", "--grid", "2,x"), "--grid 2,x: expected numbers"),
    ],
)
def test_mistakes_are_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(folder)
    code, out, err = run(capsys, *words)
    assert (code, out) == (1, "")
    assert err.startswith("error: ") and said in err


def test_the_wheel_has_every_module(tmp_path: Path) -> None:
    source = tmp_path / "nki_interpreter"
    for path in [*PACKAGE.rglob("*.py"), PACKAGE / "pyproject.toml", PACKAGE / "README.md"]:
        target = source / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.endswith(".py")}
    assert packed == {f"nki_interpreter/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
