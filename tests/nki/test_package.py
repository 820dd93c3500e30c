"""The interpreter as a package of its own: its imports, its page, and its wheel."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nki_interpreter

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


def test_the_page_runs(tmp_path: Path) -> None:
    kernel, api = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    (tmp_path / "add.py").write_text(kernel)
    (tmp_path / "api.py").write_text(api)
    done = subprocess.run(
        [sys.executable, "api.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
