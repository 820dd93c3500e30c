"""The resources that programs need: memory beside their tensors, and the core for which they were compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import proto
from kernelgen.hlo.estimate import estimate
from kernelgen.lowering.kernel import traced_hlo
from kernelgen.neff import container
from kernelgen.neff.memory import estimated_scratchpad_bytes
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import TARGETS

Run = Callable[..., subprocess.CompletedProcess[str]]
Make = Callable[..., Path]
Array = Any

MIB = 1 << 20
PROGRAM = 250 << 10
MICROCODE = 96 * MIB
"""Bytes for each physical core."""


def total(x: Array) -> Array:
    from jax import lax

    return lax.reduce(x, np.float32(0), lax.add, (1,))


def scaled(x: Array) -> Array:
    """Multiplies each element by the sum of its row: the sums take memory, and the result has its own tensor."""
    return x * total(x)[:, None]


def twice(x: Array) -> Array:
    """A product, its exponential in place, and the sum of each row beside it."""
    from jax import lax

    y = lax.exp(x @ x)
    return y / total(y)[:, None]


def kept(x: Array) -> Array:
    """Needs both products at the same time."""
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
    assert estimated_scratchpad_bytes(hlo) == expected


@pytest.fixture
def larger(make_neff: Make, neuron_target: str) -> Callable[[int], Path]:
    """Returns a function that makes a program which needs `size` MiB beside its tensors and the state buffer."""
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
    sizes = [taken(path, neuron_target) for path in paths]
    loaded = [*(sum(sizes[:n]) for n in range(1, 5)), *(sum(sizes[n:]) for n in range(1, 5))]
    assert used == [n + size for n, size in zip(loaded, pages, strict=True)]


def test_a_program_whose_scratchpad_has_no_memory_is_refused(
    client: Run, neuron_target: str, add: Path, larger: Callable[[int], Path]
) -> None:
    microcode = TARGETS[neuron_target].lnc * MICROCODE
    memory = microcode + PROGRAM + taken(larger(1), neuron_target) + 63 * MIB
    done = client("programs", add, larger(1), add, NEURON_SIMULATOR_MEMORY=str(memory))
    rest = microcode + PROGRAM
    assert done.stdout.splitlines() == [
        *(str(rest), f"NRT_RESOURCE {rest}", str(rest + PROGRAM)),
        *(str(rest), str(rest), str(microcode)),
    ], done.stderr
    assert "nrt_load: no device memory for a program on core 0: " in done.stderr


def taken(neff: Path, target: str) -> int:
    """Returns the bytes of a program's instructions and rings; a small program takes the size that AWS documents."""
    made = estimate(container.read_simulated(neff.read_bytes()).hlo, target)
    return max(PROGRAM, made.code_bytes + made.ring_bytes)


def picked(count: int) -> Callable[[Array, Array], Array]:
    """Returns a function that picks `count` single elements, each a DMA descriptor."""

    def function(x: Array, at: Array) -> Array:
        return x.reshape(-1)[at.reshape(-1)].reshape(1, 1, 1, count)

    return function


@pytest.mark.parametrize(
    ("count", "strict", "refused"), [(1 << 25, "1", True), (1 << 22, "1", False), (1 << 25, "0", False)]
)
def test_a_program_of_too_many_descriptors_is_refused(
    client: Run, make_neff: Make, count: int, strict: str, refused: bool
) -> None:
    x, at, y = (TensorDesc.parse(t) for t in ("(4096,1,1,1)/f32", f"({count},1,1,1)/i32", f"({count},1,1,1)/f32"))
    neff = make_neff(KernelSpec.make(f"my_pick_{count}", [x, at], y), picked(count))
    done = client("programs", neff, NEURON_SIMULATOR_STRICT=strict)
    assert done.stdout.startswith("NRT_RESOURCE") == refused, done.stderr
    assert ("Descriptor limit reached: the program has some " in done.stderr) == refused


@pytest.mark.parametrize("strict", ["0", "1"])
def test_a_program_of_several_ranks_is_refused(
    client: Run, neuron_target: str, add: Path, tmp_path: Path, strict: str
) -> None:
    """XLA would compute the sum over one rank, which is not the sum over all ranks."""
    module = proto.parse(container.read_simulated(add.read_bytes()).hlo)
    sum_of = next(i for i in proto.entry(module).instructions if i.opcode == "add")
    sum_of.opcode = "all-reduce"
    neff = tmp_path / "ranks.neff"
    flags = CompileConfig.make(neuron_target).flags()
    neff.write_bytes(container.write_simulated(proto.serialize(module), flags, "simulator 1"))
    done = client("programs", neff, NEURON_SIMULATOR_STRICT=strict)
    assert done.stdout.startswith("NRT_FAILURE"), done.stderr
    assert (
        "is a collective: a program of several ranks is one NEFF, which every rank loads with nrt_load_collectives"
        in done.stderr
    )


LAUNCHES = """
import sys, time
from pathlib import Path
from kernelgen.device.libnrt import Libnrt

nrt = Libnrt(Path(sys.argv[1]))
nrt.init()
model = nrt.load(Path(sys.argv[2]).read_bytes())
sets = [nrt.tensor_set({name: nrt.allocate(size) for name, size in sizes.items()}) for sizes in (model.inputs, model.outputs)]
nrt.execute(model, *sets)
times = []
for _ in range(300):
    begun = time.perf_counter()
    nrt.execute(model, *sets)
    times.append(time.perf_counter() - begun)
waited = time.perf_counter()
queued = [nrt.schedule(model, *sets) for _ in range(30)]
while not nrt.is_completed(queued[-1]):
    pass
print(min(times), time.perf_counter() - waited)
"""


def test_a_launch_takes_what_its_target_takes(
    library: Path, environment: dict[str, str], add: Path, tmp_path: Path
) -> None:
    """The fastest launch takes at least this time; the machine adds its own. trn1: 140 µs, and 15 in a queue; trn2: 133
    and 70.
    """
    for target, lnc, waited, queued in (("trn1", 1, 140, 15), ("trn2", 2, 133, 70)):
        neff = compiled_for(add, tmp_path, target, lnc)
        command = [sys.executable, "-c", LAUNCHES, library, neff]
        changed = environment | {
            "NEURON_SIMULATOR_LAUNCH_US": "target",
            "NEURON_SIMULATOR_INSTANCE": {"trn1": "trn1.2xlarge", "trn2": "trn2.48xlarge"}[target],
            "PYTHONPATH": environment["NEURON_SIMULATOR_PATH"],
        }
        done = subprocess.run(command, env=changed, capture_output=True, text=True, check=True, timeout=120)
        took = [float(word) for word in done.stdout.split()]
        assert took[0] >= waited / 1e6 and took[1] >= 30 * queued / 1e6, done.stderr


def test_code_and_rings_are_memory(client: Run, make_neff: Make, neuron_target: str) -> None:
    """The instructions of a product of 4096 rows exceed a small program's memory; without strictness none are counted."""
    weights, x, y = (TensorDesc.parse(f"(4096,4096,1,1)/{t}") for t in ("f16", "f32", "f32"))
    neff = make_neff(KernelSpec.make("mul_mat", [weights, x], y))
    size = taken(neff, neuron_target)
    assert size > 4 * PROGRAM
    done = client("programs", neff)
    assert int(done.stdout.split()[0]) - TARGETS[neuron_target].lnc * MICROCODE >= size, done.stderr
    assert client("programs", neff, NEURON_SIMULATOR_STRICT="0").stdout.split()[0] == "0"


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
