"""A scratch copy of the checkout for projects that use it, and the double of neuronx-cc.

benchmarks/cmake_project.py and benchmarks/incremental_cmake.py are importable here: the tests build projects like the
benchmark.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Under Bazel, this file is a link into the checkout; the scratch copies are made of the checkout itself.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cmake_project

ROOT = Path(__file__).resolve().parents[2]

SMALL = """\
format: 1
name: small
targets: [trn1, inf2]
kernels:
  - {op: add, inputs: ["(64,4,1,1)/f32", "(64,1,1,1)/f32"], output: "(64,4,1,1)/f32"}
  - {op: relu, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32", compiler: {optlevel: 1}}
  - {op: rms_norm, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32", params: {eps: 1.0e-6}}
"""
"""A manifest of three kernels, from two modules, one with its own compile settings."""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout that no test changes."""
    return cmake_project.copy(tmp_path_factory.mktemp("checkout") / "kernel [ge]n")


@pytest.fixture
def project(checkout: Path, tmp_path: Path) -> Callable[..., cmake_project.Project]:
    """Returns a function that writes a project with the small manifest and some calls; it is built in `build`."""

    def project(*calls: str, generator: str = "Ninja", languages: str = "NONE") -> cmake_project.Project:
        made = cmake_project.Project(tmp_path / "project", tmp_path / "build", generator)
        cmake_project.write(made.source, [f'include("{checkout}/rules/cmake/NeuronKernels.cmake")', *calls], languages)
        (made.source / "small.yaml").write_text(SMALL)
        return made

    return project


@pytest.fixture
def sdk(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that installs the double of neuronx-cc, with some behaviour, as an SDK in a folder."""

    def sdk(folder: str = "sdk", **manners: Any) -> Path:
        double = ROOT / "tests" / "compilers" / "fake_neuronx_cc"
        program = tmp_path / folder / "bin" / "neuronx-cc"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("\n".join([f"#!{sys.executable}", *double.read_text().splitlines()[1:], ""]))
        shutil.copymode(double, program)
        program.with_name("neuronx-cc.json").write_text(json.dumps(manners))
        return tmp_path / folder

    return sdk
