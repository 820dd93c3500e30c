"""Kernels that a manifest names by their source, in every language: checked, and built again after an edit."""

from __future__ import annotations

import shutil
from pathlib import Path

import page
import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "source_kernels"
BUILD = "kernelgen build sources.yaml -o build --compiler simulator"


def test_kernels_of_published_styles_give_what_their_references_do(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    page.program(tmp_path)
    assert page.run("kernelgen check sources.yaml", tmp_path).endswith("4 ok, 0 different, 5 without a reference\n")


@pytest.mark.long
def test_an_edit_builds_what_it_changes_and_a_comment_compiles_nothing(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    page.program(tmp_path)

    def edit(file: str, old: str, new: str) -> str:
        text = (tmp_path / file).read_text()
        assert text.count(old) == 1
        (tmp_path / file).write_text(text.replace(old, new))
        return page.run(BUILD, tmp_path).splitlines()[-1]

    assert "18 built (18 compiled, 0 up to date)" in page.run(BUILD, tmp_path)
    numpy = "kernels/in_numpy.py"
    assert "(0 compiled, 18 up to date)" in edit(numpy, "def quantize", "# A comment.\ndef quantize")
    assert "(0 compiled, 18 up to date)" in edit(
        "kernels/in_nki.py", "        tile", "        # A comment.\n        tile"
    )
    assert "(2 compiled, 16 up to date)" in edit("kernels/rows.py", "rows[-1:]", "rows[:1]")
    assert "(2 compiled, 16 up to date)" in edit("sources.yaml", "{BLOCK: 512}", "{BLOCK: 256}")
