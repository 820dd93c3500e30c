"""Compares a token of a small model with layers in one launch each with one launch per node, on the simulator, in ms.

    ./bazelw run //benchmarks:layer_launches

The model is a Llama of three layers with random weights. llama-bench generates with it on the simulator, whose launches
take an additional 0, 13 and 180 µs: the last two are a device's best case and a current runtime. The same run measures
llama.cpp's CPU backend. Every figure includes the simulator's own time per launch, so only the differences between
launches are meaningful.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import figures
from simulated_model import SimulatedModel

LAUNCH_US = (0, 13, 180)


def measure(quick: bool) -> Iterator[figures.Figure]:
    with tempfile.TemporaryDirectory() as folder:
        model = SimulatedModel(Path(folder))
        for launch_us in LAUNCH_US:
            fused, unfused = (
                model.token_ms(quick, NEURON_SIMULATOR_LAUNCH_US=launch_us, GGML_NEURON_FUSION=on) for on in (1, 0)
            )
            yield figures.Figure(
                f"a token with groups, a launch taking {launch_us} µs more",
                fused,
                "ms",
                peer=figures.Peer("without groups", unfused),
                direction="peer / value",
            )
        cpu = model.token_ms(quick, device=False)
        yield figures.Figure("a token on llama.cpp's CPU backend", cpu, "ms")


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
