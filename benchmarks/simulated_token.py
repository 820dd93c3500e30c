"""Measures a generated token on the simulator against llama.cpp's CPU backend, as CPU ms on one processor.

    ./bazelw run //benchmarks:simulated_token [-- TYPE… --without-functions]

The model is a Llama of 125M parameters with random weights, measured with each type of weights that users have.
llama-bench, the simulator's helper and XLA share one processor; with the CPU backend, llama-bench has it alone. Layers
are one launch each, or each node is a launch. If SMOLLM2 is set to the path of a model, that model is measured too. On
a processor with AVX-512, products with AVX2 alone are also measured. The figures are CPU time: those of the median of
several ratios, each from consecutive runs. They show the speed of tests, and say nothing about a device. Arguments
select types, such as `-- Q4_0 BF16`. `--without-functions` also measures the simulator without its functions for
quantized weights.
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
TYPES = (
    "F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4"
    " IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S TQ1_0 TQ2_0 NVFP4 Q1_0 Q2_0"
).split()
QUICK_TYPES = ("F16", "Q8_0", "Q4_K")
FLOATS = ("F16", "BF16")
WITHOUT = "layers in one launch, without functions"
PER_NODE = ("F16", "Q8_0")
"""Types that are also measured with one launch per node."""
ROUNDS = 3
"""The number of ratios; the median counts."""
TOKENS = 24
TOKENS_WITHOUT = 1
"""Tokens per repetition, with functions for quantized weights and without. Without, a token takes a second, and one is measured."""
LIMIT = 3
"""The limit of a token's time with layers in one launch each, as a multiple of the CPU backend's time."""


def measure(quick: bool, types: Sequence[str] = (), *, without: bool = False) -> Iterator[figures.Figure]:
    # Processes started later inherit this affinity.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    for weights in types or (QUICK_TYPES if quick else TYPES):
        kind = np.float16 if weights == "F16" else _type_of(weights)
        with tempfile.TemporaryDirectory() as folder:
            model = SimulatedModel(Path(folder) / weights, size=QUICK if quick else SIZE, weights=kind, n_tokens="1")
            yield from _token(weights, model, quick, per_node=weights in PER_NODE, without=without)
    real = os.environ.get("SMOLLM2")
    if real and not quick and not types:
        with tempfile.TemporaryDirectory() as folder:
            model = SimulatedModel(Path(folder) / "model", file=Path(real), n_tokens="1")
            yield from _token(Path(real).stem, model, quick, without=without)


def _type_of(weights: str) -> gguf.GGMLQuantizationType | random_llama.ByGgml:
    by_ggml = random_llama.ByGgml.__members__.get(weights)
    return gguf.GGMLQuantizationType[weights] if by_ggml is None else by_ggml


def _token(
    name: str, model: SimulatedModel, quick: bool, *, per_node: bool = False, without: bool = False
) -> Iterator[figures.Figure]:
    ways: dict[str, dict[str, object]] = {"layers in one launch": {"GGML_NEURON_FUSION": 1}}
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split() and name not in FLOATS:
        ways["layers in one launch, AVX2"] = {"GGML_NEURON_FUSION": 1, "NEURON_SIMULATOR_VECTORS": "avx2"}
    if per_node:
        ways["a launch per node"] = {"GGML_NEURON_FUSION": 0}
    for fused in {way["GGML_NEURON_FUSION"] for way in ways.values()}:
        model.token_ms(True, GGML_NEURON_FUSION=fused)  # compiles
    if without and name not in FLOATS:
        ways[WITHOUT] = {"GGML_NEURON_FUSION": 1, "NEURON_SIMULATOR_LIBRARY": ""}
    pairs: dict[str, list[tuple[float, float]]] = {what: [] for what in ways}
    for i in range(1 if quick else ROUNDS):
        found = {
            what: model.token_cpu_ms(quick, tokens=TOKENS_WITHOUT if what == WITHOUT else TOKENS, **variables)
            for what, variables in ways.items()
            if what != WITHOUT or i == 0
        }
        cpu = model.token_cpu_ms(quick, device=False)
        for what, mine in found.items():
            pairs[what].append((mine, cpu))
    for what, ratios in pairs.items():
        limited = ways[what]["GGML_NEURON_FUSION"] and what != WITHOUT and not quick
        value, cpu = sorted(ratios, key=lambda pair: pair[0] / pair[1])[len(ratios) // 2]
        yield figures.Figure(
            f"{name}: a token on the simulator, {what}",
            value,
            "ms",
            peer=figures.Peer("llama.cpp's CPU backend", cpu),
            limit=figures.Limit("ratio", at_most=LIMIT) if limited else None,
        )


if __name__ == "__main__":
    parser = figures.arguments(__doc__)
    parser.add_argument(
        "types", nargs="*", help="types of weights to measure, such as Q4_0; by default all, and the model SMOLLM2"
    )
    parser.add_argument(
        "--without-functions",
        action="store_true",
        help="also measure the simulator without its functions for quantized weights",
    )
    args = parser.parse_args()
    sys.exit(figures.report(args, lambda: measure(args.quick, args.types, without=args.without_functions)))
