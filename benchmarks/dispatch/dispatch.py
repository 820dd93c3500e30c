"""The backend's overhead per op: the time of graph_compute minus the time of nrt_execute, on a libnrt that does nothing.

The bundle has 10,000 kernels. Figures of ops are medians per op of a graph of 100. `repeated`: the same graph again, as when
llama.cpp generates tokens. `walked`: the same without the number by which ggml's scheduler identifies a graph, so that the
backend must compare each node. `resolved`: a new graph, with lookups and tensor sets. `host`: tensors in host memory, which
are copied.

Figures of a graph are of 1,000 nodes in 50 groups of 20, as a whole; one kernel computes each group. `in pieces`: the graph
has twice as many rows as its longest kernel, with kernels for 64 numbers of rows.

The programs are always quick.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

import figures
from backend_programs import built
from figures import Figure, Limit, Peer

REPEATED = Limit("value", at_most=3)
"""The most microseconds that the backend may add to an op of a graph that is computed again."""

FIRST = Limit("value", at_most=1000)
"""The most microseconds that a graph of 1,000 nodes may take the first time."""

PIECES_BYTES = 64 * 8 * 64 * 4
"""Bytes of a tensor of the longest kernel: 512 rows of 64 float32."""


def times(programs: Path, kernels: Path, case: str) -> dict[str, float]:
    """Returns the microseconds that the program prints for a case.

    Raises:
        CalledProcessError: the program failed.
    """
    n_bytes = PIECES_BYTES if case == "pieces" else 64 * 4
    environment = os.environ | {
        "GGML_NEURON_LIBNRT": str(programs / "libnrt-noop.so"),
        "GGML_NEURON_KERNEL_DIR": str(kernels),
        "GGML_NEURON_BUFFERS": "host" if case == "host" else "device",
        "NEURON_RT_NUM_CORES": "1",
        "NOOP_NRT_TENSORS": ",".join(f"{name}={n_bytes}" for name in ("input0", "input1", "output0")),
    }
    command = [programs / "dispatch", case, programs / "libggml-neuron.so", programs / "libnrt-noop.so"]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name: float(us) for name, us in (line.split() for line in output.splitlines())}


def measure(quick: bool) -> Iterator[Figure]:
    programs = built("backend/ggml-neuron/test_programs", "GGML_NEURON_TEST_PROGRAMS")
    os.environ["LD_LIBRARY_PATH"] = str(built("tools/llama_cpp/llama_cpp", "LLAMA_CPP_PROGRAMS"))
    with tempfile.TemporaryDirectory() as folder:
        kernels = Path(folder, "kernels.gguf")
        subprocess.run([programs / "dispatch", "pack", kernels], check=True)
        for case in ("device", "host"):
            bare, *ops = times(programs, kernels, case).items()
            for name, us in ops:
                limit = REPEATED if name == "repeated" else None
                yield Figure(f"above nrt_execute, {name}", us - bare[1], "µs", peer=Peer(*bare), limit=limit)
        for case in ("groups", "pieces"):
            us = times(programs, kernels, case)
            graph = f"a graph of 1,000 nodes in groups{' in pieces' if case == 'pieces' else ''}"
            for when, limit in (("first", FIRST), ("again", None)):
                by_node = us.get(f"by-node-{when}")
                peer = None if by_node is None else Peer("without groups", by_node)
                yield Figure(
                    f"{graph}, {'seen first' if when == 'first' else when}", us[when], "µs", peer=peer, limit=limit
                )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
