"""docs/guides/source-kernels.md and the pages that follow it: writes their files and runs the guide's commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import page

PAGE = "guides/source-kernels.md"
REFERENCE = "reference/source-kernels.md"


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    files = ["kernels/cumsum.py", "kernels/norm.py", "kernels/reference.py", "sums.yaml"]
    assert page.write(PAGE, tmp_path) == files
    assert page.check(PAGE, tmp_path, failing=("kernelgen check sums.yaml --only 'cumsum_3'",)) == 6


def test_the_program_that_finds_a_kernel_by_its_name_is_right_for_the_library(tmp_path: Path) -> None:
    assert page.write("reference/cpp-library.md", tmp_path) == ["find.c"]
    header = page.DOCS.parent / "backend" / "bundle" / "include"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{header}", "find.c"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_the_functions_of_the_page_are_tied_for_jax(tmp_path: Path) -> None:
    page.write(PAGE, tmp_path)
    text = (page.DOCS / REFERENCE).read_text(encoding="utf-8")
    code = next(c for c in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) if "operator(" in c)
    (tmp_path / "use.py").write_text(code)
    assert page.run(f"'{sys.executable}' use.py", tmp_path) == "[ 0.12304688 -0.00195312]\n"
