"""Measures the round trip of a launch on the simulator, in µs, against two processes that wake each other and against XLA alone.

    ./bazelw run //benchmarks/launch

A client executes a kernel that adds 256 numbers. The simulator computes in another process, so a launch takes at least
the time of two processes to wake each other, and XLA's time to execute the small kernel. Both are measured in the same
run. The figure shows the speed of tests with many small kernels, and says nothing about a device.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

import backend_programs
import figures
from kernelgen import lowering
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

LIMIT_US = 20
ROUNDS = 15
EACH = 2000


def _hlo() -> bytes:
    """Returns a kernel that adds two arrays of 64 × 4 floats."""
    f32 = TensorDesc.parse("(64,4,1,1)/f32")
    return lowering.emit(
        KernelSpec.make("add", [f32, f32], f32), load_function(*Catalog([builtin_library()]).find("add"))
    )


def _launches(kernel: bytes, rounds: int) -> tuple[float, float]:
    """Returns the median microseconds of a launch, and of an empty exchange between two processes."""
    program = backend_programs.built("benchmarks/launch/launches", "LAUNCHES")
    with tempfile.NamedTemporaryFile(suffix=".neff") as file:
        file.write(container.write_simulated(kernel, CompileConfig.make("trn1").flags(), "simulator 1"))
        file.flush()
        found = {
            "NEURON_SIMULATOR_PYTHON": sys.executable,
            "NEURON_SIMULATOR_PATH": str(backend_programs.ROOT / "tools"),
        }
        done = subprocess.run(
            [program, file.name, str(rounds)], env=os.environ | found, stdout=subprocess.PIPE, check=True, text=True
        )
    launches, exchanges = zip(*(map(float, line.split()) for line in done.stdout.splitlines()), strict=True)
    return statistics.median(launches), statistics.median(exchanges)


def _xla(kernel: bytes) -> float:
    """Returns the median microseconds of an execution by XLA, repeated in one process."""
    executable = execute.compile_for_cpu(kernel)
    buffers = [execute.put(np.zeros(shape, dtype)) for _, dtype, shape in executable.parameters]
    times = []
    for _ in range(EACH):
        begun = time.perf_counter()
        for buffer in executable.begin(buffers):
            buffer.block_until_ready()
        times.append((time.perf_counter() - begun) * 1e6)
    return statistics.median(times)


def measure(quick: bool) -> Iterator[figures.Figure]:
    kernel = _hlo()
    launch, exchange = _launches(kernel, 1 if quick else ROUNDS)
    yield figures.Figure(
        "a launch of a small kernel on the simulator",
        launch,
        "µs",
        peer=figures.Peer("two processes that wake each other", exchange),
        limit=None if quick else figures.Limit("value", at_most=LIMIT_US),
    )
    yield figures.Figure(
        "a launch of a small kernel on the simulator",
        launch,
        "µs",
        peer=figures.Peer("XLA alone, in one process", _xla(kernel)),
    )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
