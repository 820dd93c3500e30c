"""docs/guides/kernels-in-numpy.md: writes its files and runs its commands, for both targets of its manifest."""

from __future__ import annotations

from pathlib import Path

import page


def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    assert page.write("guides/kernels-in-numpy.md", tmp_path) == ["my_kernels/rows.py", "rows.yaml", "softplus.py"]
    assert page.check("guides/kernels-in-numpy.md", tmp_path) == 6
    text = next((tmp_path / "text").iterdir()).read_text()
    assert text.startswith("HloModule kernel") and " maximum(input0, " in text
    # An edit without effect compiles nothing; an edit with effect compiles only that kernel, for each target.
    source = tmp_path / "my_kernels" / "rows.py"
    source.write_text(source.read_text().replace("    return np.max", "    # a comment\n    return np.max"))
    build = "kernelgen build rows.yaml --kernels my_kernels -o build --compiler simulator"
    assert "6 built (0 compiled, 6 up to date)" in page.run(build, tmp_path)
    source.write_text(source.read_text().replace("np.maximum(x, 0)", "np.maximum(x, 0) + 1"))
    assert "6 built (2 compiled, 4 up to date)" in page.run(build, tmp_path)
