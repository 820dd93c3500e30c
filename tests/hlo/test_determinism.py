"""Equal kernels emit equal bytes in any process and folder, for any comments and layout of the emitter's source."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.lowering import kernel as lowering_kernel
from kernelgen.spec.kernel import KernelSpec

SPECS = [
    ("rms_norm", ["(64,5,1,1)/f32"], "(64,5,1,1)/f32", {"eps": 1e-5}),
    ("rope", ["(64,3,6,1)/f32", "(6,1,1,1)/i32"], "(64,3,6,1)/f32", {"n_dims": 64}),
    ("set_rows", ["(8,4,1,1)/f32", "(4,1,1,1)/i64", "(8,9,1,1)/f16"], "(8,9,1,1)/f16", {}),
    ("gelu", ["(9,1,1,1)/f32"], "(9,1,1,1)/f32", {}),
    ("cont", ["(4,3,5,1)/f32/(4,20,56,280)"], "(4,3,5,1)/f32", {}),
    (
        "flash_attn_ext",
        ["(16,5,8,1)/f32", "(16,12,2,1)/f16", "(16,12,2,1)/f16", "(12,5,1,1)/f16"],
        "(16,8,5,1)/f32",
        {"scale": 0.25},
    ),
]

# Prints a digest per kernel; the library's folder and the order of the kernels are arguments.
PROGRAM = """
import hashlib, json, sys
from pathlib import Path
from kernelgen import hlo, lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import KernelSpec
lib = Library("kernelgen", Path(sys.argv[1]))
made = {}
for op, inputs, output, params in json.loads(sys.argv[2]):
    spec = KernelSpec.make(op, map(TensorDesc.parse, inputs), TensorDesc.parse(output), params)
    made[op] = hashlib.sha256(lowering.emit(spec, load_function(*Catalog([lib]).find(op)))).hexdigest()
print(json.dumps(made, sort_keys=True))
"""


def emitted(folder: Path, reverse: bool = False, **environment: str) -> str:
    import json

    specs = SPECS[::-1] if reverse else SPECS
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), json.dumps(specs)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return done.stdout


def disturbed(text: str) -> str:
    """Returns a module's source with comments and blank lines between its top-level statements and inside its functions."""
    lines = ["# A new comment.", ""]
    depth = 0
    for line in text.splitlines():
        if depth == 0 and line.startswith(("    return ", "    x = ")):
            lines += ["", "    # Why this is so.", ""]
        lines.append(line)
        depth = depth + line.count("(") - line.count(")")
    return "\n".join([*lines, "", "# The end.", ""])


def test_processes_seeds_folders_and_comments_do_not_show(tmp_path: Path) -> None:
    source = builtin_library().root
    folder = tmp_path / "elsewhere" / "kernels with a blank"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    changed = 0
    for file in folder.glob("*.py"):
        text = disturbed(file.read_text())
        changed += text.count("# Why this is so.")
        file.write_text(text)
    assert changed > 10
    first = emitted(source, PYTHONHASHSEED="1")
    assert (
        emitted(folder, reverse=True, PYTHONHASHSEED="2", JAX_ENABLE_X64="1", JAX_DEFAULT_MATMUL_PRECISION="highest")
        == first
    )


def test_what_was_emitted_before_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = builtin_library()

    def emit(case: tuple) -> bytes:  # type: ignore[type-arg]
        op, inputs, output, params = case
        spec = KernelSpec.make(op, map(TensorDesc.parse, inputs), TensorDesc.parse(output), params)
        return lowering.emit(spec, load_function(*Catalog([lib]).find(op)))

    once = [emit(case) for case in SPECS]
    monkeypatch.setattr(lowering_kernel, "CLEAR_EVERY", 1)
    assert [emit(case) for case in reversed(SPECS)][::-1] == once


def test_jax_keeps_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has emitted thousands of kernels holds as much memory as one that has emitted a few."""
    import gc

    lib = builtin_library()
    function = load_function(*Catalog([lib]).find("rms_norm"))

    def jaxprs() -> int:
        from jax.extend import core

        gc.collect()
        return sum(isinstance(o, core.Jaxpr) for o in gc.get_objects())

    monkeypatch.setattr(lowering_kernel, "CLEAR_EVERY", 8)
    monkeypatch.setattr(lowering_kernel, "_lowered", 0)
    counts = []
    for n in range(1, 33):
        t = TensorDesc.make((n * 3, 2, 1, 1), "f32")
        lowering.emit(KernelSpec.make("rms_norm", [t], t, {"eps": 1e-5}), function)
        if n % 8 == 0:
            counts.append(jaxprs())
    assert counts[-1] <= counts[0] + 4, counts
