"""Every mistake of a manifest is reported once, at its place, with the expected value: cases and exact messages in
mistakes.txt.

A case is a line `=== title`, a manifest, a line `-- expected` and the messages. After a change of messages,

  PYTHONPATH=tools python tests/manifest/test_mistakes.py

writes the new ones into the file; read the diff.

For brevity a case may begin with `%kernels` (entries follow), `%graphs` (the same) or `%compiler` (settings follow).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError

CASES = Path(__file__).with_name("mistakes.txt")

HEAD = "format: 1\nname: t\ntargets: [trn1]\n"
ENTRY = 'kernels:\n  - {op: relu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}\n'


def cases() -> dict[str, tuple[str, str]]:
    """Returns (manifest, messages) by title."""
    found = {}
    for block in CASES.read_text(encoding="utf-8").split("=== ")[1:]:
        title, _, rest = block.partition("\n")
        text, _, expected = rest.partition("-- expected\n")
        found[title] = (text, expected)
    return found


def expand(text: str) -> str:
    """Returns the whole manifest of a case."""
    kind, _, rest = text.partition("\n")
    if kind == "%kernels":
        return f"{HEAD}kernels:\n{rest}"
    if kind == "%graphs":
        return f"{HEAD}graphs:\n{rest}"
    if kind == "%compiler":
        return f"{HEAD}compiler:\n{rest}{ENTRY}"
    return text


def messages(text: str, library: Library, folder: Path) -> str:
    """Returns the messages about a manifest, each beginning with line and column."""
    file = folder / "m.yaml"
    file.write_text(expand(text), encoding="utf-8")
    try:
        manifest.load([file], Catalog([library]))
    except KernelgenError as error:
        # The list of ops grows with every emitter; a message must have the whole list.
        ops = ", ".join(sorted(library.scan()))
        return "".join(f"{d}\n".replace(f"{file}:", "").replace(ops, "%ops") for d in error.diagnostics)
    return ""


@pytest.mark.parametrize("title", cases())
def test_each_mistake_has_one_message_with_place_and_remedy(title: str, library: Library, tmp_path: Path) -> None:
    text, expected = cases()[title]
    assert expected, "a case without messages"
    assert messages(text, library, tmp_path) == expected


def update() -> None:
    """Writes the current messages of the cases."""
    from conftest import make_library

    with tempfile.TemporaryDirectory() as folder:
        library = make_library(Path(folder) / "stub")
        blocks = [
            f"=== {title}\n{text}-- expected\n{messages(text, library, Path(folder))}"
            for title, (text, _) in cases().items()
        ]
    CASES.write_text("".join(blocks), encoding="utf-8")


if __name__ == "__main__":
    update()
