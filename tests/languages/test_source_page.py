"""docs/source-kernels.md: its files are written where it says, and its commands print what it shows."""

from __future__ import annotations

import subprocess
from pathlib import Path

import page

PAGE = "source-kernels.md"


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    assert {"find.c", "kernels/cumsum.py", "sums.yaml"} <= {*page.write(PAGE, tmp_path)}
    assert page.check(PAGE, tmp_path) == 3
    # An edit that means the same compiles nothing.
    source = tmp_path / "kernels" / "cumsum.py"
    source.write_text(source.read_text().replace("    return np.", "    # a comment\n    return np."))
    build = "kernelgen build sums.yaml -o build --compiler simulator"
    assert "4 built (0 compiled, 4 up to date)" in page.run(build, tmp_path)


def test_the_program_of_the_page_is_right_for_the_library(tmp_path: Path) -> None:
    page.write(PAGE, tmp_path)
    header = page.DOCS.parent / "backend" / "bundle" / "include"
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{header}", "find.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
