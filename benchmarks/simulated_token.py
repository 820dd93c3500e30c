"""Measures a generated token on the simulator against llama.cpp's CPU backend, as CPU ms on one processor.

    ./bazelw run //benchmarks:simulated_token [-- TYPE…]

The model is a Llama of 125M parameters with random weights in F16 and in BF16, or in the given types, such as `-- Q8_0`.
llama-bench, the simulator's helper and XLA share one processor; with the CPU backend, llama-bench has it alone. Layers
are one launch each. If SMOLLM2 is set to the path of a model, that model is measured too. The figures are CPU time:
those of the median of several ratios, each from consecutive runs. They show the speed of tests, and say nothing about a
device.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import gguf
import numpy as np

import figures
from simulated_model import SimulatedModel, random_llama

SIZE = random_llama.Size(n_embd=768, n_head=12, n_head_kv=12, n_ff=2048, n_layer=12, n_vocab=32000)
QUICK = random_llama.Size(n_embd=256, n_ff=512, n_layer=2, n_vocab=1000)
TYPES = ("F16", "BF16")
ROUNDS = 3
"""The number of ratios; the median counts."""
TOKENS = 24
"""Tokens per repetition."""
LIMIT = 2.5
"""The limit of a token's time in F16 and BF16, as a multiple of the CPU backend's time."""


def measure(quick: bool, types: Sequence[str] = ()) -> Iterator[figures.Figure]:
    # Processes started later inherit this affinity.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for name in types or TYPES:
        weights = np.float16 if name == "F16" else gguf.GGMLQuantizationType[name]
        with tempfile.TemporaryDirectory() as folder:
            model = SimulatedModel(Path(folder) / name, size=QUICK if quick else SIZE, weights=weights, n_tokens="1")
            yield token_figure(name, model, quick, limited=name in TYPES and not quick)
    real = os.environ.get("SMOLLM2")
    if real and not quick and not types:
        with tempfile.TemporaryDirectory() as folder:
            model = SimulatedModel(Path(folder) / "model", file=Path(real), n_tokens="1")
            yield token_figure(Path(real).stem, model, quick, limited=False)


def token_figure(name: str, model: SimulatedModel, quick: bool, *, limited: bool) -> figures.Figure:
    """Returns the median of a token's CPU ms on the simulator, beside the CPU backend's."""
    fused = {"GGML_NEURON_FUSION": 1}
    model.token_ms(True, **fused)  # compiles
    pairs = [
        (model.token_cpu_ms(quick, tokens=TOKENS, **fused), model.token_cpu_ms(quick, device=False))
        for _ in range(1 if quick else ROUNDS)
    ]
    simulator_ms, cpu_ms = sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]
    return figures.Figure(
        f"{name}: a token on the simulator, layers in one launch",
        simulator_ms,
        "ms",
        peer=figures.Peer("llama.cpp's CPU backend", cpu_ms),
        limit=figures.Limit("ratio", at_most=LIMIT) if limited else None,
    )


if __name__ == "__main__":
    parser = figures.arguments(__doc__)
    parser.add_argument("types", nargs="*", help="types of weights to measure, such as Q8_0; by default F16 and BF16")
    args = parser.parse_args()
    sys.exit(figures.report(args, lambda: measure(args.quick, args.types)))
