"""docs/guides/kernels-in-numpy.md: writes its files and runs its commands, for both targets of its manifest."""

from __future__ import annotations

from pathlib import Path

import page


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    assert page.write("guides/kernels-in-numpy.md", tmp_path) == ["my_kernels/rows.py", "rows.yaml", "softplus.py"]
    assert page.check("guides/kernels-in-numpy.md", tmp_path) == 6
    text = next((tmp_path / "text").iterdir()).read_text()
    assert text.startswith("HloModule kernel") and " maximum(input0, " in text
