"""What programs need of a core: memory besides their tensors, and a core that they were compiled for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.lowering.op import traced_hlo
from kernelgen.neff import container
from kernelgen.simulator.scratchpad import scratchpad_bytes
from kernelgen.spec.op_kernel import KernelSpec
from kernelgen.targets import TARGETS

Run = Callable[..., subprocess.CompletedProcess[str]]
Make = Callable[..., Path]
Array = Any

MIB = 1 << 20
PROGRAM = 250 << 10
MICROCODE = 96 * MIB
"""Of a physical core."""


def total(x: Array) -> Array:
    from jax import lax

    return lax.reduce(x, np.float32(0), lax.add, (1,))


def scaled(x: Array) -> Array:
    """Each element by the sum of its row: the sums lie somewhere, and the result has its tensor."""
    return x * total(x)[:, None]


def twice(x: Array) -> Array:
    """A product, and its exponential in its place, beside which lies its sum of each row."""
    from jax import lax

    y = lax.exp(x @ x)
    return y / total(y)[:, None]


def kept(x: Array) -> Array:
    """Both products at the same time."""
    from jax import lax

    y = x @ x
    return lax.sort(y) + y @ y


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * 2 + 1, 0),
        (lambda x: x.astype("float16") @ x.T.astype("float16"), 0),
        (scaled, 4 * 64),
        (twice, 4 * 64 * 65),
        (kept, 3 * 4 * 64 * 64),
    ],
)
def test_the_estimate_of_a_programs_memory(function: Callable[[Array], Array], expected: int) -> None:
    hlo, _ = traced_hlo(function, [((64, 64), "float32")])
    assert scratchpad_bytes(hlo) == expected


@pytest.fixture
def larger(make_neff: Make, neuron_target: str) -> Callable[[int], Path]:
    """Returns a function that makes a program, which needs so many MiB besides its tensors and the state buffer."""
    target = TARGETS[neuron_target]
    state_buffer = target.state_buffer_mib * target.lnc

    def make(size: int) -> Path:
        def function(x: Array) -> Array:
            from jax import lax

            rows = lax.sort(
                x.reshape(1, 1) * np.ones(((state_buffer + size) * MIB // 1024, 256), np.float32), dimension=0
            )
            return total(rows.reshape(1, -1)).reshape(1, 1, 1, 1)

        one = TensorDesc.parse("(1,1,1,1)/f32")
        return make_neff(KernelSpec.make(f"my_large_{size}", [one], one), function)

    return make


@pytest.mark.parametrize(("release", "page"), [("2.32", 64), ("2.30", 512)])
def test_the_largest_programs_scratchpad_is_there_for_all(
    client: Run, neuron_target: str, add: Path, larger: Callable[[int], Path], release: str, page: int
) -> None:
    paths = [add, larger(1), larger(2), larger(65)]
    done = client("programs", *paths, NEURON_SIMULATOR_RELEASE=release)
    assert done.returncode == 0, done.stderr
    used = [int(line) - TARGETS[neuron_target].lnc * MICROCODE for line in done.stdout.split()]
    most = page * (2 if page == 64 else 1) * MIB
    pages = [0, page * MIB, page * MIB, most, most, most, most, 0]
    programs = [1, 2, 3, 4, 3, 2, 1, 0]
    assert used == [n * PROGRAM + size for n, size in zip(programs, pages, strict=True)]


def test_a_program_whose_scratchpad_has_no_memory_is_refused(
    client: Run, neuron_target: str, add: Path, larger: Callable[[int], Path]
) -> None:
    microcode = TARGETS[neuron_target].lnc * MICROCODE
    memory = microcode + 2 * PROGRAM + 63 * MIB
    done = client("programs", add, larger(1), add, NEURON_SIMULATOR_MEMORY=str(memory))
    rest = microcode + PROGRAM
    assert done.stdout.splitlines() == [
        *(str(rest), f"NRT_RESOURCE {rest}", str(rest + PROGRAM)),
        *(str(rest), str(rest), str(microcode)),
    ], done.stderr
    assert "nrt_load: no device memory for a program on core 0: " in done.stderr


def compiled_for(add: Path, folder: Path, target: str, lnc: int) -> Path:
    path = folder / f"{target}-{lnc}.neff"
    hlo = container.read_simulated(add.read_bytes()).hlo
    path.write_bytes(container.write_simulated(hlo, CompileConfig.make(target, lnc=lnc).flags(), "simulator 1"))
    return path


@pytest.mark.parametrize(
    ("target", "lnc", "variables", "status"),
    [
        ("trn2", 2, {}, "NRT_SUCCESS"),
        ("trn2", 1, {}, "NRT_INVALID"),
        ("trn2", 1, {"NEURON_LOGICAL_NC_CONFIG": "1"}, "NRT_SUCCESS"),
        ("trn2", 1, {"NEURON_SIMULATOR_STRICT": "0"}, "NRT_SUCCESS"),
        ("trn2", 2, {"NEURON_SIMULATOR_INSTANCE": "trn1.2xlarge"}, "NRT_INVALID"),
        ("trn2", 2, {"NEURON_SIMULATOR_INSTANCE": None}, "NRT_SUCCESS"),
        ("trn1", 1, {"NEURON_LOGICAL_NC_CONFIG": "1"}, "NRT_UNSUPPORTED_NEFF_VERSION"),
        ("trn1", 1, {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_ALLOW_LEGACY_NEFF": "TRUE"}, "NRT_SUCCESS"),
        ("trn2", 1, {"NEURON_SIMULATOR_INSTANCE": "trn1.2xlarge"}, "NRT_UNSUPPORTED_NEFF_VERSION"),
        ("trn1", 1, {"NEURON_SIMULATOR_INSTANCE": "inf2.48xlarge"}, "NRT_SUCCESS"),
    ],
)
def test_a_program_for_other_cores_is_refused(
    client: Run, add: Path, tmp_path: Path, target: str, lnc: int, variables: dict[str, str | None], status: str
) -> None:
    path = compiled_for(add, tmp_path, target, lnc)
    variables = {"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "NEURON_RT_NUM_CORES": "1"} | variables
    done = client("load", path, **variables)
    assert done.stdout.strip() == status, done.stderr


def test_each_physical_core_has_its_micro_code(client: Run, add: Path, tmp_path: Path) -> None:
    path = compiled_for(add, tmp_path, "trn2", 2)
    done = client("programs", path, NEURON_SIMULATOR_INSTANCE="trn2.48xlarge", NEURON_RT_NUM_CORES="1")
    assert done.stdout.split() == [str(2 * MICROCODE + PROGRAM), str(2 * MICROCODE)], done.stderr
