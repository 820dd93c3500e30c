"""Kernels in NKI that misbehave: each is an error at its file and line, within a time limit, and does not affect the
next kernel.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path

import pytest

from kernelgen.steps import worker
from nki_interpreter import loading, program

HEAD = """
import nki
import nki.isa as nisa
import nki.language as nl

from kernelgen.emitters import emitter
from kernelgen.languages.nki import inline

def copied(x):
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=x)
    return result
"""
BODIES = {
    "counts": "for i in nl.affine_range(10 ** 15): pass",
    "misses": "import nki.no_such_module",
    "works": "return copied(x)",
    "exits": "import sys; sys.exit(0)",
    "recurses": "return recurses_kernel(x)",
    "sbuf": "nl.zeros((128, 10 ** 12), x.dtype, buffer=nl.sbuf)",
    "reads": "return copied(x.ap([[1, 10 ** 12]]))",
    "nothing": "pass",
}
REFUSED = {
    "misses": "ModuleNotFoundError: No module named 'nki.no_such_module'",
    "exits": "SystemExit: 0",
    "recurses": "RecursionError: ",
    "sbuf": "err_sbuf_exceed_arch_limit",
    "reads": "err_access_out_of_bounds",
}


def source() -> str:
    text = HEAD
    for name, body in BODIES.items():
        text += f"\ndef {name}_kernel(x):\n    {body}\n\n"
        text += f'@emitter("{name}", language="nki")\ndef {name}(x):\n    return inline({name}_kernel, x)[0]\n'
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(source())
    return tmp_path


def emit(folder: Path, op: str, *more: str) -> tuple[int, str]:
    """Emits a kernel like a build, but in this process, and checks that the process is unchanged."""
    before = gc.isenabled()
    tensor = "(4,4,1,1)/f32"
    spec = json.dumps({"op": op, "inputs": [tensor], "output": tensor, "params": {}, "alias": None})
    found = worker.run(
        [
            *("emit", f"--spec={spec}", "--library=mine", f"--emitter={folder / 'mine/own.py'}"),
            *(f"--output={folder / op}", *more),
        ]
    )
    assert gc.isenabled() == before
    assert not program.recording()
    assert not {name for name in sys.modules if name.split(".")[0] in loading.PACKAGES}
    assert (folder / op).exists() == (found[0] == 0)
    return found


def located(op: str, said: str) -> bool:
    line = source()[: source().index(f"def {op}_kernel")].count("\n") + 2
    return re.match(rf"\S+own\.py:({line}):1: error: ", said) is not None


@pytest.mark.parametrize("op", sorted(REFUSED))
def test_a_kernel_that_misbehaves_is_an_error_at_its_line(folder, op):
    code, said = emit(folder, op)
    assert code
    assert re.search(REFUSED[op], said), said
    assert located(op, said), said
    assert emit(folder, "works")[0] == 0


def test_a_kernel_that_never_ends_is_stopped_before_it_fills_the_memory(folder, monkeypatch):
    monkeypatch.setattr(program, "MOST_STEPS", 1000)
    code, said = emit(folder, "counts")
    assert code
    assert "err_too_many_instructions" in said
    assert located("counts", said), said


def test_a_kernel_without_a_result_is_an_error(folder):
    code, said = emit(folder, "nothing")
    assert code
    assert "err_no_result" in said
