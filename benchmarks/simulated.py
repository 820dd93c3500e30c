"""A generated token on the simulator, against llama.cpp's CPU backend: `./bazelw run //benchmarks:simulated`.

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

# Links, where Bazel runs this: beside them is what it built. Python is started without this folder in its path.
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools" / "llama_cpp"))
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).absolute().parents[1] / "benchmarks"))

import gguf
import numpy as np
import random_llama

import figures
import groups
from derive import Programs

SIZE = random_llama.Size(n_embd=768, n_head=12, n_head_kv=12, n_ff=2048, n_layer=12, n_vocab=32000)
QUICK = random_llama.Size(n_embd=256, n_ff=512, n_layer=2, n_vocab=1000)
WEIGHTS: dict[str, type[np.floating] | gguf.GGMLQuantizationType] = {
    "F16": np.float16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
}
LIMIT = 3
"""Times of the CPU backend's time that a token takes at most, with layers in one launch each."""


def measure(quick: bool) -> Iterator[figures.Figure]:
    programs = Programs.find()
    # What is started later keeps to the same processor.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for weights, kind in WEIGHTS.items():
            model, manifest, kernels = (folder / f"{weights}{end}" for end in (".gguf", ".yaml", ""))
            random_llama.write(model, weights=kind, size=QUICK if quick else SIZE)
            groups.build(programs, model, manifest, kernels)
            device = groups.device(kernels, folder / "cache")
            # The first run compiles.
            for fused in ("1", "0"):
                groups.token_ms(programs, model, True, GGML_NEURON_FUSION=fused, **device)
            cpu = groups.token_ms(programs, model, quick)
            for fused, what in (("1", "layers in one launch"), ("0", "a launch per node")):
                yield figures.Figure(
                    f"{weights}: a token on the simulator, {what}",
                    groups.token_ms(programs, model, quick, GGML_NEURON_FUSION=fused, **device),
                    "ms",
                    peer=figures.Peer("llama.cpp's CPU backend", cpu),
                    limit=figures.Limit("ratio", at_most=LIMIT) if fused == "1" and not quick else None,
                )


def main() -> int:
    args = figures.arguments(__doc__).parse_args()
    return figures.report(args, lambda: measure(args.quick))


if __name__ == "__main__":
    sys.exit(main())
