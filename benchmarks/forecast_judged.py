"""What others measured beside what `kernelgen forecast` says for it: `./bazelw run //benchmarks:forecast_judged`.

The work is written down here in JAX, as it was on the device (dense transformers in BF16 by XLA, all of a step in one graph unless
said), traced to HLO, and counted as the command counts kernels. Figures that the table of the chips was taken from are marked: they
can't judge it. `--markdown` prints the table of docs/forecast.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from kernelgen.dispatch import chips
from kernelgen.dispatch.modelled_cost import nanoseconds
from kernelgen.forecast.time import Time, of_work, sbuf_bytes
from kernelgen.forecast.work import Work, of_hlo
from kernelgen.lowering.op import traced_hlo

WITHIN = 0.3
QUICKER = 0.1
"""Below a measured time by more than this part of it is too quick."""

Shape = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Model:
    """A dense transformer: width, layers, heads, heads of keys, their size, width of the feed-forward layer, tokens it knows."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    feed: int
    vocabulary: int


LLAMA_8B = Model(4096, 32, 32, 8, 128, 14336, 128256)
QWEN_06B = Model(1024, 28, 16, 8, 128, 3072, 151936)
QWEN_8B = Model(4096, 36, 32, 8, 128, 12288, 151936)
QWEN_32B = Model(5120, 64, 64, 8, 128, 25600, 151936)


def bf16(*shape: int) -> Shape:
    return shape, "bfloat16"


def counted(function: Callable[..., Any], shapes: Sequence[Shape], chip: chips.Chip) -> Work:
    """Returns the work of a function of arrays."""
    hlo, _ = traced_hlo(function, shapes)
    return of_hlo(hlo, sbuf_bytes(chip))


def norm(x: Any, w: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * w


def rope(x: Any, sin: Any, cos: Any) -> Any:
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Scores of all keys in F32: q [sequences, heads, rows, head], k and v [sequences, heads of keys, cells, head]."""
    n, heads, rows, size = q.shape
    grouped = q.reshape(n, k.shape[1], heads // k.shape[1] * rows, size)
    scores = jnp.einsum("nhrd,nhcd->nhrc", grouped, k, preferred_element_type=jnp.float32) * size**-0.5
    positions = jnp.arange(scores.shape[2]) % rows + k.shape[2] - rows
    scores = jnp.where(jnp.arange(k.shape[2]) <= positions[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(q.dtype)
    return jnp.einsum("nhrc,nhcd->nhrd", weights, v).reshape(q.shape)


def feed_forward(x: Any, gate: Any, up: Any, down: Any) -> Any:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


@cache
def layer(model: Model, ranks: int, n_seqs: int, rows: int, cells: int, target: str) -> Work:
    """Returns the work of a layer on one of the cores that share it."""
    heads, kv, feed = model.heads // ranks, max(model.kv_heads // ranks, 1), model.feed // ranks
    size = model.head

    def function(
        x: Any,
        a: Any,
        b: Any,
        wq: Any,
        wk: Any,
        wv: Any,
        wo: Any,
        gate: Any,
        up: Any,
        down: Any,
        k: Any,
        v: Any,
        sin: Any,
    ) -> Any:
        y = norm(x, a)
        q, new_k, new_v = (
            (y @ w).reshape(n_seqs, rows, n, size).swapaxes(1, 2) for w, n in ((wq, heads), (wk, kv), (wv, kv))
        )
        q, new_k = rope(q, sin, sin), rope(new_k, sin, sin)
        at = (0, 0, cells - rows, 0)
        k, v = jax.lax.dynamic_update_slice(k, new_k, at), jax.lax.dynamic_update_slice(v, new_v, at)
        made = attention(q, k, v).swapaxes(1, 2).reshape(n_seqs * rows, heads * size)
        x = x + made @ wo
        return x + feed_forward(norm(x, b), gate, up, down), k, v

    d, cache_shape = model.width, bf16(n_seqs, kv, cells, size)
    shapes = [bf16(n_seqs * rows, d), bf16(d), bf16(d), bf16(d, heads * size), bf16(d, kv * size), bf16(d, kv * size)]
    shapes += [bf16(heads * size, d), bf16(d, feed), bf16(d, feed), bf16(feed, d), cache_shape, cache_shape]
    return counted(function, [*shapes, bf16(rows, size // 2)], chips.of(target))


def step(
    model: Model,
    target: str,
    *,
    ranks: int = 1,
    n_seqs: int = 1,
    rows: int = 1,
    cells: int = 256,
    launches: int = 1,
    flash: bool = False,
) -> float:
    """Returns the ms of a step: `rows` tokens of each of `n_seqs` sequences, then the logits of the last ones."""
    chip = chips.of(target)
    work = layer(model, ranks, n_seqs, rows, cells, target)
    beside = 0.0
    if flash:  # scores stay on the chip, blocks above the diagonal are left out, and the engines share the work
        shapes = [bf16(n_seqs, model.heads // ranks, rows, model.head)]
        shapes += [bf16(n_seqs, max(model.kv_heads // ranks, 1), cells, model.head)] * 2
        inner = counted(attention, shapes, chip)
        for name in ("vector", "vector_two", "scalar", "either"):
            setattr(inner, name, getattr(inner, name) / 2)
        work = replace(
            work,
            spilled=0.0,
            columns=work.columns - inner.columns,
            **{n: getattr(work, n) - 2 * getattr(inner, n) for n in ("vector", "vector_two", "scalar", "either")},
        )
        time = of_work(inner, chip)
        beside = max(time.tensor / 2, time.vector, time.scalar)
    head = counted(lambda x, w: x @ w, [bf16(n_seqs, model.width), bf16(model.width, model.vocabulary // ranks)], chip)
    inside = sum(n * (t.total - t.launch) for n, t in ((model.layers, of_work(work, chip)), (1, of_work(head, chip))))
    # A barrier of the execution is not in it: launches that are queued hide it.
    summed = 2 * model.layers * chip.number("all_reduce_us") if ranks > 1 else 0.0
    return (inside + model.layers * beside + summed + launches * chip.by("launch_us", "queued")) / 1e3


def program(target: str, function: Callable[..., Any], *shapes: Shape) -> Time:
    """Returns what a program takes beside its launch."""
    chip = chips.of(target)
    return replace(of_work(counted(function, shapes, chip), chip), launch=0.0)


def feed_forward_ms(rows: int) -> float:
    shapes = [bf16(rows, 4096), bf16(4096, 14336), bf16(4096, 14336), bf16(14336, 4096)]
    return program("inf2", feed_forward, *shapes).total / 1e3


def attention_ms(target: str, heads: int, kv: int, rows: int, cells: int) -> float:
    shapes = [bf16(1, heads, rows, 128), bf16(1, kv, cells, 128), bf16(1, kv, cells, 128)]
    return program(target, attention, *shapes).total / 1e3


def product_ms(target: str, rows: int, inner: int, columns: int) -> float:
    return program(target, lambda x, w: x @ w, bf16(rows, inner), bf16(inner, columns)).total / 1e3


def unpacked_ms(**work: Any) -> float:
    """Returns the ms of 64 instructions that convert [128, 4096] elements on one engine of trn1."""
    none: dict[str, dict[str, int]] = {name: {} for name in ("tensor", "vector", "scalar", "gpsimd", "dma")}
    instructions = dict.fromkeys(none, 0) | dict.fromkeys(work, 64)
    return max(nanoseconds(none | work, instructions, chips.of("trn1")).values()) / 1e6


def nki_calls_ms(count: int) -> float:
    """Returns the ms of a graph of as many NKI kernels, each of which reads 4,096 x 4,096 weights."""
    chip = chips.of("trn1")
    return count * (chip.number("nki_call_us") / 1e3 + 2 * 4096**2 / chip.at("dma_gb_per_s", 8192) / 1e6)


@dataclass(frozen=True)
class Published:
    """A figure: what was measured, where from, its ms, what the model says, and whether the table of the chips is taken from it."""

    what: str
    source: str
    measured: float
    modelled: Callable[[], float]
    in_table: bool = False


KILN = "foxl-ai/kiln"


def prompt(name: str, model: Model, target: str, cores: int, n: int, ms: float, *, flash: bool = True) -> Published:
    """Returns the figure of a prompt of `n` tokens over several cores, which attention computes as in XLA or, `flash`, in NKI."""
    return Published(
        f"{name} over {cores} cores, prompt of {n}, {target}, {'flash' if flash else 'XLA'}",
        KILN,
        ms,
        lambda: step(model, target, ranks=cores, rows=n, cells=n, flash=flash),
    )


FIGURES = (
    Published(
        "4,096 x 4,096 weights by 16 rows in a chain, trn1",
        KILN,
        0.148,
        lambda: product_ms("trn1", 16, 4096, 4096),
        True,
    ),
    Published("8 NKI calls of 4,096 x 4,096 in a graph, trn1", KILN, 2.71, lambda: nki_calls_ms(8), True),
    *(
        Published(
            f"feed-forward layer 4,096 x 14,336, {n} rows, inf2",
            "AnchovyPark",
            ms,
            lambda n=n: feed_forward_ms(n),
            n in (128, 512),
        )
        for n, ms in ((128, 1.07), (256, 2.90), (512, 3.82), (1024, 6.81))
    ),
    *(
        Published(
            f"4,096 x 4,096 weights by {n} rows, trn2",
            KILN,
            2 * n * 4096**2 / 106e9,
            lambda n=n: product_ms("trn2", n, 4096, 4096),
            n == 1024,
        )
        for n in (1024, 4096)
    ),
    Published("Qwen3-0.6B's logits of 8 rows, trn1", KILN, 1.6, lambda: product_ms("trn1", 8, 1024, 151936)),
    Published("Qwen3-0.6B, a step of 8 sequences, trn1", KILN, 10.07, lambda: step(QWEN_06B, "trn1", n_seqs=8)),
    Published("the same, 16 launches", KILN, 10.23, lambda: step(QWEN_06B, "trn1", n_seqs=8, launches=16)),
    *(
        Published(
            f"Qwen3-0.6B, 6 sequences of {n} tokens, trn1",
            KILN,
            ms,
            lambda n=n: step(QWEN_06B, "trn1", n_seqs=6, cells=n),
        )
        for n, ms in ((128, 9.0), (512, 14.6), (2048, 22.3))
    ),
    Published("Qwen3-0.6B, a step of 8 sequences, trn2", KILN, 7.66, lambda: step(QWEN_06B, "trn2", n_seqs=8)),
    Published("Qwen3-8B over 2 cores, a token, trn1", KILN, 38.1, lambda: step(QWEN_8B, "trn1", ranks=2)),
    Published("Llama-3.1-8B over 2 cores, a token, inf2", "ZML", 40.0, lambda: step(LLAMA_8B, "inf2", ranks=2)),
    Published("Llama-3.1-8B over 4 cores, a token, trn2", KILN, 9.98, lambda: step(LLAMA_8B, "trn2", ranks=4), True),
    Published("the same, 14 launches", KILN, 10.9, lambda: step(LLAMA_8B, "trn2", ranks=4, launches=14), True),
    Published("Qwen3-32B over 4 cores, a token, trn2", KILN, 34.7, lambda: step(QWEN_32B, "trn2", ranks=4)),
    Published(
        "Qwen3-8B over 4 cores, a step of 8 sequences, trn2",
        KILN,
        20.1,
        lambda: step(QWEN_8B, "trn2", ranks=4, n_seqs=8),
    ),
    *(prompt("Qwen3-8B", QWEN_8B, "trn1", 2, n, ms, flash=False) for n, ms in ((2048, 1080.0), (8192, 7150.0))),
    *(prompt("Qwen3-8B", QWEN_8B, "trn1", 2, n, ms) for n, ms in ((2048, 500.0), (8192, 2860.0))),
    *(prompt("Qwen3-8B", QWEN_8B, "trn2", 4, n, ms) for n, ms in ((2048, 160.0), (8192, 560.0), (32768, 3300.0))),
    *(prompt("Qwen3-32B", QWEN_32B, "trn2", 4, n, ms) for n, ms in ((2048, 550.0), (8192, 2100.0))),
    *(
        Published(
            f"attention, 4,096 rows behind {n} cells, trn2, XLA",
            KILN,
            ms,
            lambda n=n: attention_ms("trn2", 8, 2, 4096, n + 4096),
        )
        for n, ms in ((0, 8.0), (4096, 15.3), (28672, 71.2))
    ),
    Published("[128, 4096] FP8 to BF16, vector engine, trn1", KILN, 0.00584, lambda: unpacked_ms(vector={"one": 4096})),
    Published("the same, scalar engine", KILN, 0.00443, lambda: unpacked_ms(scalar={"one": 4096})),
    Published("the same, by scales in SBUF, vector engine", KILN, 0.0085, lambda: unpacked_ms(vector={"two": 4096})),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/forecast.md")
    args = parser.parse_args(arguments)
    if args.markdown:
        print("| work | measured by | ms | modelled | error |\n|---|---|--:|--:|--:|")
    judging = within = quick = 0
    for one in FIGURES:
        ms = one.modelled()
        error = ms / one.measured - 1
        mark = " (in the table)" if one.in_table else ""
        if not one.in_table:
            judging += 1
            within += abs(error) <= WITHIN
            quick += error < -QUICKER
        if args.markdown:
            print(f"| {one.what} | {one.source}{mark} | {one.measured:.4g} | {ms:.4g} | {100 * error:+.0f} % |")
        else:
            print(f"{one.what:60} {one.measured:10.4g} ms {ms:10.4g} ms {100 * error:+5.0f} %{mark}")
    print(
        f"\n{len(FIGURES)} figures; of {judging} that the table is not taken from, {within} are within {100 * WITHIN:.0f} %, "
        f"and {quick} are modelled quicker by more than {100 * QUICKER:.0f} %"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
