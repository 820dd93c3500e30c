"""Compares the modelled times of kernelgen's NKI kernels, in µs, with the same op in JAX.

    ./bazelw run //benchmarks:nki_work [-- --target TARGET]

Nothing is measured. The time of an NKI kernel is that of its busiest engine (kernelgen.dispatch.modelled_cost). The
time of a JAX kernel is the forecast without its launch (kernelgen.forecast.time). Both are for one core of the target.
A second table has each engine's time for the products with packed weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from kernelgen.dispatch import chips, modelled_cost
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.forecast.time import of_work, sbuf_bytes
from kernelgen.forecast.work import of_hlo
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.lowering import emission
from kernelgen.spec.kernel import KernelSpec

ATTENTION = ((1, 4096), (1, 8192), (1, 32768), (8, 8192), (32, 8192), (128, 4096))
PROMPTS = ((512, 512), (512, 1024), (512, 2048), (512, 4096), (2048, 2048))
"""Tokens and keys of attention, computed without and with `causal`."""
F8 = "q8_0:f8_e4m3_128x128"
PRODUCTS = (
    *((kind, 1) for kind in ("q4_0", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "bf16")),
    *((kind, 512) for kind in ("q4_0", "q8_0", "q4_K", "q6_K")),
    *((F8, rows) for rows in (1, 8, 128, 512)),
)
"""Types of weights, and numbers of rows."""
HEADER = (
    "| kernel | tensor, vector, scalar, DMA instructions | MB by DMA | SBUF, KiB "
    "| busiest engine | µs | µs in JAX | of these spilled |"
)
ENGINES = ("tensor", "vector", "scalar", "dma")
ENGINES_HEADER = f"| kernel | {', '.join(ENGINES)}: µs | together µs | µs in JAX |"


def kernels() -> Iterator[tuple[str, KernelSpec]]:
    """Yields attention with 32 heads of queries and 8 of keys, by tokens and keys, and products of rows with weights."""
    attention = [(n, n_kv, {}) for n, n_kv in ATTENTION]
    attention += [(n, n_kv, causal) for n, n_kv in PROMPTS for causal in ({}, {"causal": True})]
    for n, n_kv, params in attention:
        q, kv = f"(128,{n},32,1)/f32", f"(128,{n_kv},8,1)/f16"
        inputs = [TensorDesc.parse(t) for t in (q, kv, kv, f"({n_kv},{n},1,1)/f16")]
        out = TensorDesc.parse(f"(128,32,{n},1)/f32")
        name = f"attention, {n} × {n_kv:,}{', causal' if params else ''}"
        yield name, KernelSpec.make("flash_attn_ext", inputs, out, {"scale": 0.125, **params})
    for kind, rows in PRODUCTS:
        inputs = [TensorDesc.parse(t) for t in (f"(4096,4096,1,1)/{kind}", f"(4096,{rows},1,1)/f32")]
        name = f"4096 × 4096 {kind.partition(':')[2] or kind}, {rows} row{'s' * (rows > 1)}"
        yield name, KernelSpec.make("mul_mat", inputs, TensorDesc.parse(f"(4096,{rows},1,1)/f32"), {})


def rows(name: str, spec: KernelSpec, catalog: Catalog, target: str) -> tuple[str, str]:
    """Returns a kernel as a line of the table, and as a line of the table of engines, which is empty if NKI declines the kernel."""
    made = {}
    for language in ("nki", "jax"):
        chosen = catalog.choose(spec, (language,), target)
        assert chosen is not None
        if chosen[1].fits(spec):
            made[language] = emission.emit_functions(spec, {spec.op: load_function(*chosen)}, language, (target,))
    chip = chips.of(target, 1)
    parts = of_work(of_hlo(made["jax"].hlo, sbuf_bytes(chip)), chip).parts
    in_jax = f"{sum(parts.values()) - parts['launch']:,.0f}"
    in_nki, engines = "declined | – | – | – | –", ""
    if "nki" in made:
        (noted,) = made["nki"].notes["costs"]
        cost = modelled_cost.of_noted(noted, target)
        counts = ", ".join(f"{cost['instructions'][engine]:,}" for engine in ENGINES)
        in_nki = (
            f"{counts} | {cost['dma_bytes'] / 1e6:,.1f} | {cost['sbuf_bytes_per_partition'] / 1024:.0f} "
            f"| {cost['bottleneck']} | {max(cost['ns'].values()) / 1e3:,.0f}"
        )
        each = ", ".join(f"{cost['ns'][engine] / 1e3:,.0f}" for engine in ENGINES)
        engines = f"| {name} | {each} | {cost['elapsed_ns'] / 1e3:,.0f} | {in_jax} |"
    return f"| {name} | {in_nki} | {in_jax} | {parts['spills']:,.0f} |", engines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="trn1", choices=("trn1", "inf2", "trn2"))
    args = parser.parse_args()
    catalog = Catalog([builtin_library()])
    print(HEADER, "|---|---|--:|--:|---|--:|--:|--:|", sep="\n")
    engines = [ENGINES_HEADER, "|---|--:|--:|--:|"]
    for name, spec in kernels():
        whole, parts = rows(name, spec, catalog, args.target)
        print(whole, flush=True)
        if spec.op == "mul_mat" and TYPES[spec.inputs[0].dtype].quantized and not spec.inputs[0].layout:
            engines.append(parts)
    print("", *engines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
