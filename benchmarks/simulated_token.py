"""A generated token on the simulator, against llama.cpp's CPU backend: `./bazelw run //benchmarks:simulated_token`.

A Llama of 125M parameters with random weights, of each type that users have, on one processor: llama-bench, the simulator's
helper and XLA share it when the device computes, and llama-bench has it alone with the CPU backend. Layers are one launch each,
or there is a launch per node. With SMOLLM2, the path of a model, also that one. The figures are processor time. They say how
fast tests are, and nothing of a device.
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
TYPES = "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4".split()
QUICK_TYPES = ("F16", "Q8_0", "Q4_K")
PER_NODE = ("F16", "Q8_0")
"""Types that are also measured with a launch per node."""
LIMIT = 3
"""Times of the CPU backend's time that a token takes at most, with layers in one launch each."""


def measure(quick: bool) -> Iterator[figures.Figure]:
    # What is started later keeps to the same processor.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for weights in QUICK_TYPES if quick else TYPES:
        kind = np.float16 if weights == "F16" else gguf.GGMLQuantizationType[weights]
        with tempfile.TemporaryDirectory() as folder:
            model = SimulatedModel(Path(folder) / weights, size=QUICK if quick else SIZE, weights=kind)
            yield from _token(weights, model, quick, per_node=weights in PER_NODE)
    real = os.environ.get("SMOLLM2")
    if real and not quick:
        with tempfile.TemporaryDirectory() as folder:
            model = SimulatedModel(Path(folder) / "model", file=Path(real))
            yield from _token(Path(real).stem, model, quick)


def _token(name: str, model: SimulatedModel, quick: bool, *, per_node: bool = False) -> Iterator[figures.Figure]:
    for fused, what in ((1, "layers in one launch"), (0, "a launch per node"))[: 2 if per_node else 1]:
        # The first run compiles.
        model.token_ms(True, GGML_NEURON_FUSION=fused)
        cpu = model.token_cpu_ms(quick, device=False)
        yield figures.Figure(
            f"{name}: a token on the simulator, {what}",
            model.token_cpu_ms(quick, GGML_NEURON_FUSION=fused),
            "ms",
            peer=figures.Peer("llama.cpp's CPU backend", cpu),
            limit=figures.Limit("ratio", at_most=LIMIT) if fused and not quick else None,
        )


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
