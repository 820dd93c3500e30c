"""Fixtures: libnrt.so.1 and the C program that uses it, built by Bazel or else here with CMake."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kernelgen import lowering
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

ROOT = Path(__file__).parents[2]

sys.path.insert(0, str(Path(__file__).parent))  # rank_programs

Run = Callable[..., subprocess.CompletedProcess[str]]
Make = Callable[..., Path]

MACHINES: dict[str, dict[str, str]] = {
    "trn1": {},
    "trn2": {"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "NEURON_RT_NUM_CORES": "1"},
    "inf2": {"NEURON_SIMULATOR_INSTANCE": "inf2.48xlarge", "NEURON_RT_NUM_CORES": "1"},
}
"""Variables for a simulator with one core of a target; the default is a core of trn1."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with libnrt.so.1; the program is in it or in its folder `tests`."""
    folder = ROOT / "backend" / "simulator"
    if not (folder / "libnrt.so.1").exists():
        source, folder = folder, tmp_path_factory.mktemp("simulator")
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = ["cmake", *generator, "-S", source, "-B", folder]
        subprocess.run(
            [*configure, "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wpedantic -Werror"], check=True, stdout=subprocess.DEVNULL
        )
        subprocess.run(["cmake", "--build", folder, "--parallel"], check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def library(built: Path) -> Path:
    return built / "libnrt.so.1"


@pytest.fixture(scope="session")
def environment(neuron_target: str) -> dict[str, str]:
    """Returns variables with which the simulator finds its helper and has a core of the target."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_RT_", "NEURON_SIMULATOR_"))}
    return inherited | {
        "NEURON_SIMULATOR_PYTHON": sys.executable,
        "NEURON_SIMULATOR_PATH": str(ROOT / "tools"),
        "NEURON_RT_LOG_LEVEL": "INFO",
        **MACHINES[neuron_target],
    }


@pytest.fixture(scope="session")
def machines() -> Mapping[str, dict[str, str]]:
    """Returns the variables of a machine by its target."""
    return MACHINES


@pytest.fixture(scope="session")
def client(built: Path, environment: dict[str, str]) -> Run:
    """Returns a function that runs the C program; keyword arguments are variables, None removes one."""
    program = next(p for p in (built / "nrt_client", built / "tests" / "nrt_client") if p.exists())

    def run(*arguments: object, **variables: str | None) -> subprocess.CompletedProcess[str]:
        changed = {k: v for k, v in (environment | variables).items() if v is not None}
        command = [program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=changed, timeout=120)

    return run


@pytest.fixture(scope="session")
def make_neff(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes the simulated NEFF of a kernel, with the library's emitter or another function."""
    folder = tmp_path_factory.mktemp("neffs")

    def make(spec: KernelSpec, function: Callable[..., object] | None = None) -> Path:
        path = folder / f"{spec.id}.neff"
        if not path.exists():
            if function is None:
                function = load_function(*Catalog([builtin_library()]).find(spec.op))
            path.write_bytes(
                container.write_simulated(
                    lowering.emit(spec, function), CompileConfig.make(neuron_target).flags(), "simulator 1"
                )
            )
        return path

    return make


@pytest.fixture(scope="session")
def add(make_neff: Make) -> Path:
    """Returns a NEFF that adds two float32 tensors."""
    f32 = TensorDesc.parse("(64,4,1,1)/f32")
    return make_neff(KernelSpec.make("add", [f32, f32], f32))


@pytest.fixture(scope="session")
def slow(make_neff: Make) -> Path:
    """Returns a NEFF that runs for many minutes; its unrolled loop has more instructions than a core's memory holds."""
    from jax import lax

    def function(x: object) -> object:
        return lax.fori_loop(0, 2_000_000_000, lambda _, v: v * 0.5 + 1.0, x)

    f32 = TensorDesc.parse("(64,64,1,1)/f32")
    return make_neff(KernelSpec.make("my_slow", [f32], f32), function)
