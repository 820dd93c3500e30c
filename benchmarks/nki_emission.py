"""Measures emitting NKI kernels, in s and lines of HLO, against the same computation in JAX, and counts the kernels' work.

    ./bazelw run //benchmarks:nki_emission

The first kernel, a product of large matrices, is defined here, with a DMA per tile of each product. The other kernels
are kernelgen's own, in NKI and in JAX, for a Llama of 8 billion parameters. Seconds are CPU time on one core, the least
of three runs: recording, rolling loops, and lowering through JAX to canonical HLO. In the first run, JAX also traces
its own functions. Each kernel is compared with the emitter in JAX in the same run. For kernelgen's own kernels, the
program also prints instructions and DMA descriptors on trn1: for NKI, counted from the record, with one descriptor per
run of contiguous memory; for JAX, estimated from the HLO. Exit status 1 if emitting a kernel takes more than a second,
or if it has more than 1,000 lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).absolute().parent))

import jax
import jax.numpy as jnp

import figures
from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import proto
from kernelgen.hlo.estimate import estimate
from kernelgen.spec.op_kernel import KernelSpec
from nki_interpreter import kernel, loading

with loading.interpreter():
    import nki.isa as nisa
    import nki.language as nl

SECONDS, LINES = 1.0, 1000
TIMES = 3


def product(stationary: Any, moving: Any) -> Any:
    """Computes `stationary.T @ moving` in tiles of [128, 128] and [128, 512], with a DMA for each tile of each product."""
    rows, columns = stationary.shape[1], moving.shape[1]
    result = nl.ndarray((rows, columns), stationary.dtype, buffer=nl.shared_hbm)
    for m in nl.affine_range(rows // 128):
        for n in nl.affine_range(columns // 512):
            sums = nl.ndarray((128, 512), nl.float32, buffer=nl.psum)
            for k in nl.affine_range(stationary.shape[0] // 128):
                a = nl.ndarray((128, 128), stationary.dtype, buffer=nl.sbuf)
                b = nl.ndarray((128, 512), moving.dtype, buffer=nl.sbuf)
                nisa.dma_copy(dst=a, src=stationary[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
                nisa.dma_copy(dst=b, src=moving[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
                nisa.nc_matmul(dst=sums, stationary=a, moving=b)
            done = nl.ndarray((128, 512), stationary.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=done, src=sums)
            nisa.dma_copy(dst=result[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], src=done)
    return result


@dataclass(frozen=True)
class Cost:
    """The cost of emitting a kernel: the least CPU seconds, those of the first run, and the lines of its HLO.

    `instructions` and `descriptors` are the kernel's work on a device.
    """

    seconds: float
    first: float
    lines: int
    instructions: int = 0
    descriptors: int = 0


def done(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Runs work several times; returns the least CPU seconds, those of the first run, and the result."""
    seconds = []
    for _ in range(TIMES):
        start = time.process_time()
        made = work()
        seconds.append(time.process_time() - start)
    return min(seconds), seconds[0], made


def traced(function: Callable[..., Any], inputs: list[Any]) -> Cost:
    """Returns the cost of lowering a function of arrays to HLO."""
    # A new function each time, because JAX caches traced functions.
    seconds, first, made = done(lambda: jax.jit(lambda *given: function(*given)).lower(*inputs).compiler_ir("hlo"))
    return Cost(seconds, first, len(made.as_hlo_text().splitlines()))


def emitted(spec: KernelSpec, language: str, catalog: Catalog) -> Cost:
    """Returns the cost of emitting a kernel in a language; the lines are the instructions of its HLO."""
    chosen = catalog.choose(spec, (language,), "trn1")
    assert chosen is not None
    assert chosen[1].fits(spec)
    function = load_function(*chosen)
    seconds, first, made = done(lambda: lowering.emit_in(language, spec, function, ("trn1",)))
    lines = sum(len(computation.instructions) for computation in proto.parse(made.hlo).computations)
    if language == "nki":
        (cost,) = made.notes["costs"]
        descriptors = sum(n // int(run) for run, n in cost["work"]["dma"].items())
        return Cost(seconds, first, lines, sum(cost["instructions"].values()), descriptors)
    taken = estimate(made.hlo, "trn1")
    return Cost(seconds, first, lines, taken.total, taken.dma_descriptors)


def library() -> Iterator[tuple[str, KernelSpec]]:
    """Yields kernels of a Llama of 8 billion parameters, for 1 token with 4,096 cells of cache and for 512 tokens with 1,024.

    The products with 8 of 128 experts are those of a Qwen3 of 30 billion parameters, for 1 to 32 tokens.
    """
    for kind, n in (("bf16", 1), ("bf16", 8), ("bf16", 32), ("q4_K", 1), ("q4_K", 8), ("q4_K", 32)):
        inputs = [f"(2048,768,128,1)/{kind}", f"(2048,1,{n},1)/f32", f"(8,{n},1,1)/i32"]
        tensors = [TensorDesc.parse(t) for t in inputs]
        yield f"mul_mat_id {kind}, {n}", KernelSpec.make("mul_mat_id", tensors, TensorDesc.parse(f"(768,8,{n},1)/f32"))
    for n, cells in ((1, 4096), (512, 1024)):
        x, weights = f"(4096,{n},1,1)/f32", "(4096,14336,1,1)"
        q, kv = f"(128,{n},32,1)/f32", f"(128,{cells},8,1)/f16"
        tables = {
            f"mul_mat f16, {n}": ("mul_mat", [f"{weights}/f16", x], f"(14336,{n},1,1)/f32", {}),
            f"mul_mat q8_0, {n}": ("mul_mat", [f"{weights}/q8_0", x], f"(14336,{n},1,1)/f32", {}),
            f"rms_norm, {n}": ("rms_norm", [x], x, {"eps": 1e-5}),
            f"soft_max, {n}": (
                "soft_max",
                [f"({cells},{n},32,1)/f32", f"({cells},{n},1,1)/f16"],
                f"({cells},{n},32,1)/f32",
                {"scale": 0.125},
            ),
            f"flash_attn_ext, {n}": (
                "flash_attn_ext",
                [q, kv, kv, f"({cells},{n},1,1)/f16"],
                f"(128,32,{n},1)/f32",
                {"scale": 0.125},
            ),
            f"rope, {n}": (
                "rope",
                [f"(128,32,{n},1)/f32", f"({n},1,1,1)/i32"],
                f"(128,32,{n},1)/f32",
                {"n_dims": 128},
            ),
        }
        for name, (op, inputs, output, params) in tables.items():
            yield name, KernelSpec.make(op, [TensorDesc.parse(t) for t in inputs], TensorDesc.parse(output), params)


def measured(quick: bool) -> Iterator[tuple[str, Cost, Cost]]:
    """Yields each kernel's name, and its costs in NKI and in JAX; only the first kernel if `quick`."""
    square = [jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)] * 2
    base = traced(lambda a, b: a.T @ b, square)
    found = traced(lambda a, b: kernel.record(product, [a, b], {}, older=False)(a, b), square)
    yield "matmul 4096 x 4096 x 4096 bf16", found, base
    catalog = Catalog([builtin_library()])
    for name, spec in [] if quick else library():
        base = emitted(spec, "jax", catalog)
        yield name, emitted(spec, "nki", catalog), base


def measure(quick: bool) -> Iterator[figures.Figure]:
    jax.jit(lambda x: x + 1).lower(jnp.zeros(3))  # JAX's own start
    for name, own, base in measured(quick):
        within = figures.Limit("value", at_most=SECONDS)
        yield figures.Figure(name, own.seconds, "s", peer=figures.Peer("in JAX", base.seconds), limit=within)
        yield figures.Figure(f"{name}, the first time", own.first, "s", peer=figures.Peer("in JAX", base.first))
        within = figures.Limit("value", at_most=LINES)
        yield figures.Figure(
            f"{name}, lines of HLO", own.lines, "lines", peer=figures.Peer("in JAX", base.lines), limit=within
        )
        if own.instructions:
            for unit in ("instructions", "descriptors"):
                peer = figures.Peer("in JAX, estimated", getattr(base, unit))
                yield figures.Figure(f"{name}, {unit}", getattr(own, unit), unit, peer=peer)


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
