"""Fixtures: the exporter and llama.cpp's libraries, where Bazel puts them or where NEURON_KERNELGEN_EXPORTER and
LLAMA_CPP_PROGRAMS say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "graph-ops"))
sys.path.append(str(Path(__file__).parents[1] / "hlo"))  # last: the folder has a conftest of its own
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "llama_cpp"))

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.model.exporter import VARIABLE, Exporter
from kernelgen.spec.kernel import KernelSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def exporter(there: Callable[[Path, str], Path]) -> Exporter:
    program = there(ROOT / "backend/exporter/exporter/export-graphs", VARIABLE)
    libraries = there(ROOT / "tools/llama_cpp/llama_cpp", "LLAMA_CPP_PROGRAMS")
    assert (libraries / "libllama.so").exists()
    return Exporter(program, libraries)


Derive = Callable[..., set[KernelSpec]]


@pytest.fixture
def derive(exporter: Exporter, tmp_path: Path) -> Derive:
    """Returns a function that writes a model's manifest, `derived.yaml` in `tmp_path`, and returns its kernels."""

    def derive(source: Path, *arguments: object) -> set[KernelSpec]:
        output = tmp_path / "derived.yaml"
        assert run_model(exporter, source, output, *arguments) == 0
        return specs(output)

    return derive


def run_model(exporter: Exporter, source: Path, output: Path, *arguments: object) -> int:
    """Runs `kernelgen model`; returns the exit status. Unless the arguments have `--fuse`, all kernels are those of ops."""
    where = ("--exporter", exporter.program, "--llama-cpp", exporter.libraries, "--fuse", "none")
    return cli.run(list(map(str, ("model", source, "-o", output, *where, *arguments))))


def specs(path: Path) -> set[KernelSpec]:
    """Returns the kernels of a manifest."""
    (request,) = manifest.load([path], Catalog([builtin_library()]))
    return {kernel.spec for kernel in request.kernels}
