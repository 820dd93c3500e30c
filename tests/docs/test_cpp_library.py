"""The program in docs/reference/cpp-library.md is backend/bundle/tests/example.cc, which is compiled and run."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_program_that_is_tested() -> None:
    page = (ROOT / "docs" / "reference" / "cpp-library.md").read_text()
    section = page.partition("## Open a pack and find a kernel")[2]
    block = re.search(r"```cpp\n(.*?)```", section, re.DOTALL)
    assert block is not None
    assert block[1] == (ROOT / "backend" / "bundle" / "tests" / "example.cc").read_text()


def test_the_page_names_functions_that_exist() -> None:
    page = (ROOT / "docs" / "reference" / "cpp-library.md").read_text()
    header = (ROOT / "backend" / "bundle" / "include" / "neuron_kernels.h").read_text()
    names = set(re.findall(r"\bneuron_kernels_[a-z0-9_]+", page)) - {"neuron_kernels_llama3_trn1"}
    assert names
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", header)] == []
