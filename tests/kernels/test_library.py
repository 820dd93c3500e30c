"""The built-in kernels as a whole."""

from __future__ import annotations

import re
from pathlib import Path

from harness import LIBRARY
from reference import REFERENCES

from kernelgen.ggml.ops import OPS


def test_every_op_that_a_manifest_can_name_has_an_emitter() -> None:
    assert sorted(LIBRARY.scan()) == sorted(OPS)


def test_every_emitter_has_a_reference() -> None:
    assert sorted(set(LIBRARY.scan()) - set(REFERENCES)) == []


def test_every_reference_is_used() -> None:
    """A reference without a test would only look like one."""
    text = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_library.py")
    assert [op for op in REFERENCES if not re.search(rf'"{op}"', text)] == []
