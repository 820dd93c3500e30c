"""Fixtures of the cache's tests: entries, an HTTP store with faults, and builds in their own processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernelgen import cache, lowering
from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

from .store import Store

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(__file__).absolute().parents[2] / "tools"
"""Links are not resolved: Bazel puts bytecode beside the links."""

TRN1 = CompileConfig.make("trn1")


@pytest.fixture(scope="session")
def modules() -> list[bytes]:
    """Returns the HLO of a few kernels."""
    made = []
    for n in range(1, 5):
        tensor = TensorDesc.parse(f"({8 * n},4,1,1)/f32")
        made.append(lowering.emit(KernelSpec.make("sqr", [tensor], tensor), lambda x: x * x))
    return made


@pytest.fixture(scope="session")
def neffs(modules: list[bytes]) -> list[tuple[cache.NeffKey, bytes]]:
    """Returns the keys and NEFFs of `modules`."""
    return [
        (
            cache.NeffKey.make(module, "simulator 1", TRN1.flags()),
            container.write_simulated(module, TRN1.flags(), "simulator 1"),
        )
        for module in modules
    ]


@pytest.fixture
def store() -> Iterator[Store]:
    """An HTTP store."""
    with Store() as made:
        yield made


@pytest.fixture
def sdk(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that installs the double of neuronx-cc as an SDK with some settings, and returns the SDK's folder."""
    return lambda folder="sdk", **manners: install(tmp_path / folder, **manners)


def install(folder: Path, **manners: Any) -> Path:
    """Installs the double of neuronx-cc as an SDK in a folder; returns the folder."""
    double = ROOT / "tests" / "compilers" / "fake_neuronx_cc"
    program = folder / "bin" / "neuronx-cc"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("\n".join([f"#!{sys.executable}", *double.read_text().splitlines()[1:], ""]))
    shutil.copymode(double, program)
    program.with_name("neuronx-cc.json").write_text(json.dumps({"steady": True, **manners}))
    return folder


def manifest(folder: Path, *ops: str, name: str = "small", targets: str = "trn1") -> Path:
    """Writes a manifest with a kernel of each op."""
    lines = ["format: 1", f"name: {name}", f"targets: [{targets}]", "kernels:"]
    lines += [f'  - {{op: {op}, inputs: ["(8,4,1,1)/f32"], output: "(8,4,1,1)/f32"}}' for op in ops]
    path = folder / f"{name}.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(**more: object) -> dict[str, str]:
    """Returns the environment of a separate process: the same modules as here, and only the given caches."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NEURON_", "AWS_")) and "proxy" not in k.lower()}
    path = os.pathsep.join([str(TOOLS), *filter(None, sys.path)])
    return {**kept, "PYTHONPATH": path, **{k: str(v) for k, v in more.items()}}


@pytest.fixture
def kernelgen(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs a command line in its own process, with the cache in `cache`."""

    def run(*arguments: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kernelgen", *map(str, arguments)],
            env=environment(**{"NEURON_KERNELGEN_NEFF_CACHE": tmp_path / "cache", **more}),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


def compiles(record: Path) -> list[str]:
    """Returns the targets of the compiles that doubles with this `record` ran."""
    if not record.exists():
        return []
    calls = [json.loads(line)["arguments"] for line in record.read_text().splitlines()]
    return [call[call.index("--target") + 1] for call in calls if call[0] == "compile"]
