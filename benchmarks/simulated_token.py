"""A generated token on the simulator, against llama.cpp's CPU backend: `./bazelw run //benchmarks:simulated_token`.

A Llama of 125M parameters with random weights, F16 and Q8_0, on one processor: llama-bench, the simulator's helper and XLA share it
when the device computes, and llama-bench has it alone with the CPU backend. Layers are one launch each, or there is a launch per
node. It says how fast tests are, and nothing of a device.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import gguf
import numpy as np

import figures
from simulated_model import SimulatedModel, random_llama

SIZE = random_llama.Size(n_embd=768, n_head=12, n_head_kv=12, n_ff=2048, n_layer=12, n_vocab=32000)
QUICK = random_llama.Size(n_embd=256, n_ff=512, n_layer=2, n_vocab=1000)
WEIGHTS: dict[str, type[np.floating] | gguf.GGMLQuantizationType] = {
    "F16": np.float16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}
LIMIT = 3
"""Times of the CPU backend's time that a token takes at most, with layers in one launch each."""


def measure(quick: bool) -> Iterator[figures.Figure]:
    # What is started later keeps to the same processor.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        for weights, kind in WEIGHTS.items():
            model = SimulatedModel(Path(folder) / weights, size=QUICK if quick else SIZE, weights=kind)
            # The first run compiles.
            for fused in (1, 0):
                model.token_ms(True, GGML_NEURON_FUSION=fused)
            cpu = model.token_ms(quick, device=False)
            for fused, what in ((1, "layers in one launch"), (0, "a launch per node")):
                yield figures.Figure(
                    f"{weights}: a token on the simulator, {what}",
                    model.token_ms(quick, GGML_NEURON_FUSION=fused),
                    "ms",
                    peer=figures.Peer("llama.cpp's CPU backend", cpu),
                    limit=figures.Limit("ratio", at_most=LIMIT) if fused and not quick else None,
                )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
