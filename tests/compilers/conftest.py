"""Fixtures of the compiler tests: an HLO to compile, and the double of neuronx-cc with any behaviour."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelgen import lowering
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import KernelSpec

DOUBLE = Path(__file__).parent / "fake_neuronx_cc"


@pytest.fixture(scope="session")
def spec() -> KernelSpec:
    tensor = TensorDesc.parse("(64,4,1,1)/f32")
    return KernelSpec.make("sqr", [tensor], tensor)


@pytest.fixture(scope="session")
def module(spec: KernelSpec) -> bytes:
    """The HLO of `spec`."""
    return lowering.emit(spec, lambda x: x * x)


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """Installs the double as `<folder>/bin/neuronx-cc` with the given behaviour; returns its path."""

    def install(folder: str = "sdk", **manners: Any) -> Path:
        program = tmp_path / folder / "bin" / "neuronx-cc"
        program.parent.mkdir(parents=True, exist_ok=True)
        lines = DOUBLE.read_text().splitlines()
        program.write_text("\n".join([f"#!{sys.executable}", *lines[1:], ""]))
        shutil.copymode(DOUBLE, program)
        program.with_name("neuronx-cc.json").write_text(json.dumps(manners))
        return program

    return install
