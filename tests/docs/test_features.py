"""The table of llama.cpp's features: the tests and the options of `kernelgen model` that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from kernelgen.cli import model

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/reference/features.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| feature ")
]


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def missing(cell: str) -> list[str]:
    """Returns the names in a cell of the last column that do not exist."""
    source = (ROOT / "tools/llama_cpp/program_cases.py").read_text()
    cases = re.findall(r'^ +(?:Case|_drafts)\(\s*"([a-z0-9-]+)"', source, re.MULTILINE)
    found = []
    for name in re.findall("`([^`]+)`", cell):
        file, _, function = name.partition("::")
        there = function in functions(ROOT / file) if function else name in cases
        found += [] if there else [name]
    return found


def test_each_test_that_is_named_exists() -> None:
    assert len(ROWS) > 30
    assert {len(row) for row in ROWS} == {5}
    assert [name for *_, cell in ROWS for name in missing(cell)] == []
    named = [cell for *_, cell in ROWS if cell]
    assert all(re.fullmatch(r"(`tests/\S+\.py::test_\w+`)?( ?\(`[a-z0-9-]+`\))?", cell) for cell in named), named


def test_each_option_that_is_named_exists() -> None:
    known = {option for parameter in model.command.params for option in parameter.opts}
    named = {option for _, _, cell, *_ in ROWS for option in re.findall(r"--[a-z0-9-]+", cell)}
    assert named <= known
    assert {"--lora", "--context-shift", "--embeddings", "--model-draft", "--control-vector"} <= named
