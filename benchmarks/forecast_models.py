"""Forecasts the time per token of published models, in ms, on each target and over 1, 2 and 4 cores.

    ./bazelw run //benchmarks:forecast_models [-- --markdown] [--only MODEL]

Nothing is measured. llama.cpp's graphs of one token and of a prompt of 512 tokens, with 1,024 cells, come from the
models' headers; each layer is one kernel. With several cores, each core does an equal part of the work. Quantized
weights have the layouts that `kernelgen model` chooses for one token, the target and the number of cores. The columns
"before" have ggml's layouts and products in F32: the same counts, with the rate of F32. A second table has FLOPs in F32
and bytes read, of a layer's launch and of a token, before and now. `--markdown` prints both tables for
docs/results/forecast.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

from backend_programs import Programs
from kernelgen.dispatch import chips
from kernelgen.dispatch.grouping import Groups
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.forecast.call import CallForecast, forecast
from kernelgen.forecast.time import sbuf_bytes
from kernelgen.forecast.weights import AS_GGML, Widened, choose
from kernelgen.forecast.work import Work, of_hlo
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import BF16, WEIGHTS
from kernelgen.lowering import emission
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import layers
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.kernel import GraphSpec, KernelSpec
from kernelgen.targets import PARTITIONS
from published import MODELS
from published.header import write

N_CTX, N_KV, N_PROMPT = 4096, 1024, 512
ROWS = (
    *(("Llama-3-8B", ftype) for ftype in ("F16", "Q8_0", "Q4_K_M")),
    *(
        (model, ftype)
        for model in ("Qwen3-8B", "Gemma-3-4B", "Mixtral-8x7B", "gpt-oss-20b")
        for ftype in ("F16", "Q4_K_M")
    ),
)
"""Models, and types of weights by llama-quantize's names."""
CORES = (1, 2, 4)
SHOWN = ("trn1", "inf2", "trn2", "trn3")

Spec = KernelSpec | GraphSpec


def quantized(spec: Spec) -> bool:
    """Returns whether a kernel reads quantized weights: its products in BF16 are then products with these."""
    return any(TYPES[t.dtype].quantized for kernel in spec.kernels for t in kernel.inputs if t is not None)


def in_f32(work: Work) -> Work:
    """Returns the work with its products in BF16 counted as products in F32."""
    found = [Counter(columns) for columns in (work.columns, work.columns_many)]
    for columns in found:
        columns["float32"] += columns.pop("bfloat16", 0)
    return replace(work, columns=found[0], columns_many=found[1])


def laid_out(spec: Spec, widened: Widened) -> Spec:
    """Returns a kernel with the weights in `widened` in the layout `bf16`."""
    if isinstance(spec, KernelSpec):
        return replace(spec, inputs=tuple(in_layout(spec.op, n, t, widened) for n, t in enumerate(spec.inputs)))
    nodes = []
    for node in spec.nodes:
        tensors = [in_layout(node.op, n, o and o.tensor, widened) for n, o in enumerate(node.inputs)]
        inputs = (o and t and replace(o, tensor=t) for o, t in zip(node.inputs, tensors, strict=True))
        nodes.append(replace(node, inputs=tuple(inputs)))
    return GraphSpec(tuple(nodes), spec.slots)


def in_layout(op: str, number: int, tensor: TensorDesc | None, widened: Widened) -> TensorDesc | None:
    """Returns an input of an op, in the layout `bf16` if it is one of the weights in `widened`."""
    return tensor.in_layout(BF16) if tensor is not None and tensor in widened and WEIGHTS.get(op) == number else tensor


@dataclass(frozen=True)
class Sums:
    """The sums of a launch or a call.

    Attributes:
        gflop: the FLOPs of the tensor engine in F32, in 1e9: of all columns that move through tiles of 128 x 128, used or not.
        gb: the bytes read (weights, cache and activations), in 1e9.
    """

    gflop: float
    gb: float

    @classmethod
    def of(cls, works: Sequence[tuple[Work, int]]) -> Sums:
        """Returns the sums of works, each with the number of its repetitions."""
        columns = sum(n * (work.columns["float32"] + work.columns_many["float32"]) for work, n in works)
        return cls(2 * PARTITIONS**2 * columns / 1e9, sum(n * work.read for work, n in works) / 1e9)


@dataclass(frozen=True)
class Row:
    """The forecasts of a model on a target.

    Attributes:
        target: its name.
        token: one token, over each of `CORES`.
        prompt: a prompt of `N_PROMPT` tokens on one core.
        before: one token, over each of `CORES`, with ggml's layouts of quantized weights, and their products in F32.
        prompt_before: a prompt on one core, with these layouts and products.
        layouts: the layouts of quantized weights on one core; empty if there are none.
        sums: the sums of a launch of the slowest layer, and of a token: before, and now.
    """

    target: str
    token: tuple[CallForecast, ...]
    prompt: CallForecast
    before: tuple[CallForecast, ...]
    prompt_before: CallForecast
    layouts: str
    sums: tuple[tuple[Sums, Sums], tuple[Sums, Sums]]


def forecasts(model: str, ftype: str, exporter: Exporter, catalog: Catalog) -> Iterator[Row]:
    """Yields a row for each of `SHOWN`."""
    settings = Settings((N_CTX,), N_PROMPT, 1, (1, N_PROMPT), (1,), None, "f16", "f16", (True,), False, False, ftype)
    with tempfile.TemporaryDirectory() as folder:
        file = write(MODELS[model](), Path(folder) / "model.gguf")
        calls = [DecodeCall(N_CTX, 1, n, 1, N_KV) for n in (1, N_PROMPT)]
        (header, _, token), (_, _, prompt) = exporter.graphs(file, settings, calls)
    groups = Groups(
        dict.fromkeys(segment_spec(graph, segment) for graph in (token, prompt) for segment in layers(graph))
    )

    @cache
    def hlo(spec: Spec) -> bytes:
        with contextlib.redirect_stdout(sys.stderr):  # emitters may print
            return emission.emit(catalog.emitters(catalog.kernel(spec)), spec).hlo

    @cache
    def counted(spec: Spec, sbuf: int) -> Work:
        return of_hlo(hlo(spec), sbuf)

    def before(spec: Spec, sbuf: int) -> Work:
        work = counted(spec, sbuf)
        return in_f32(work) if quantized(spec) else work

    def row(target: str) -> Row:
        chip = chips.of(target)
        sbuf = sbuf_bytes(chip)
        choices = {cores: choice for cores in CORES for choice in choose(token, [chip], cores)}
        widened: dict[int, Widened] = {cores: frozenset() for cores in CORES}
        widened |= {cores: choice.chosen.widened for cores, choice in choices.items()}

        def now(graph: Graph, cores: int) -> CallForecast:
            in_bf16 = widened[cores]

            def work_of(spec: Spec) -> Work:
                return counted(laid_out(spec, in_bf16), sbuf)

            return forecast(graph, (), groups, chip, work_of, layers=header.layers, cores=cores, widened=in_bf16)

        def past(graph: Graph, cores: int) -> CallForecast:
            found = forecast(
                graph, (), groups, chip, lambda spec: before(spec, sbuf), layers=header.layers, cores=cores
            )
            if found.missing:
                raise SystemExit(f"{model}, {ftype}: {found.missing} nodes have no kernel")
            return found

        tokens_before = tuple(past(token, cores) for cores in CORES)
        longest = tokens_before[0].launches[0].spec
        launched = [(one.spec, one.count) for one in tokens_before[0].launches]
        sums = [
            (
                Sums.of([(before(spec, sbuf), n) for spec, n in specs]),
                Sums.of([(counted(laid_out(spec, widened[1]), sbuf), n) for spec, n in specs]),
            )
            for specs in ([(longest, 1)], launched)
        ]
        layouts = choices[1].name if choices else ""
        tokens = tuple(now(token, cores) for cores in CORES)
        return Row(target, tokens, now(prompt, 1), tokens_before, past(prompt, 1), layouts, (sums[0], sums[1]))

    yield from map(row, SHOWN)


def fields(row: Row) -> tuple[str, ...]:
    """Returns the cells after the target in a line of the first table."""
    one = row.token[0]
    held = (one.memory.weights + one.memory.cache) / (1 << 30)
    parts = sorted(one.parts_ms.items(), key=lambda part: -part[1])[:2]
    return (
        short(row.layouts),
        f"{held:.1f} of {one.memory.device >> 30}",
        *map(cell, row.token),
        ", ".join(f"{part} {ms:.1f}" for part, ms in parts),
        ", ".join(map(brief, row.before)) if row.layouts else "",
        f"{row.prompt.ms:.0f} ms",
        f"{row.prompt_before.ms:.0f} ms" if row.layouts else "",
    )


def sums_fields(row: Row) -> tuple[str, ...]:
    """Returns the cells after the target in a line of the second table."""
    found = [short(row.layouts)]
    for before, now in row.sums:
        found += [f"{before.gflop:.2f}, {now.gflop:.2f}", f"{before.gb:.3f}, {now.gb:.3f}"]
    return tuple(found)


def short(layouts: str) -> str:
    """Returns the name of layouts for the tables."""
    return "as ggml's" if layouts == AS_GGML else layouts.replace(" shapes and types", "").replace(" for ", ": ")


def merged(model: str, ftype: str, found: Sequence[tuple[str, tuple[str, ...]]]) -> Iterator[list[str]]:
    """Yields the cells of each line; targets with the same figures share a line."""
    targets: dict[tuple[str, ...], list[str]] = {}
    for target, figures in found:
        targets.setdefault(figures, []).append(target)
    for figures, names in targets.items():
        yield [model, ftype, ", ".join(names), *figures]


def cell(one: CallForecast) -> str:
    """Returns ms and tokens per second, in parentheses if the model does not fit into the cores' memory."""
    text = f"{one.ms:.1f} ms, {1e3 / one.ms:.0f}"
    return text if one.memory.fits else f"({text})"


def brief(one: CallForecast) -> str:
    """Returns ms, in parentheses if the model does not fit into the cores' memory."""
    return f"{one.ms:.1f}" if one.memory.fits else f"({one.ms:.1f})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/results/forecast.md")
    parser.add_argument(
        "--only", choices=list(dict.fromkeys(model for model, _ in ROWS)), help="forecast only this model"
    )
    args = parser.parse_args(arguments)
    programs = Programs.find()
    exporter, catalog = Exporter(programs.exporter, programs.libraries), Catalog([builtin_library()])
    if not args.markdown:
        print("ms of a token and tokens a second, in parentheses what does not fit; modelled, not measured")
        print(f"one sequence, {N_KV:,} cells; of more than 1 core each does an even part of the work\n")
    print(line(HEADS, LINE, args.markdown))
    if args.markdown:
        print("|---|---|---|---|--:|--:|--:|--:|---|--:|--:|--:|")
    later: list[list[str]] = []
    for model, ftype in ROWS:
        if args.only in (None, model):
            found = list(forecasts(model, ftype, exporter, catalog))
            for figures in merged(model, ftype, [(row.target, fields(row)) for row in found]):
                print(line(figures, LINE, args.markdown), flush=True)
            if found[0].layouts:
                later += merged(model, ftype, [(row.target, sums_fields(row)) for row in found])
    print("" if args.markdown else "\n10^9 FLOPs in F32 and 10^9 bytes that are read, before and now\n")
    print(line(SUMS_HEADS, SUMS_LINE, args.markdown))
    if args.markdown:
        print("|---|---|---|---|--:|--:|--:|--:|")
    for figures in later:
        print(line(figures, SUMS_LINE, args.markdown))
    return 0


def line(values: Sequence[str], template: str, markdown: bool) -> str:
    """Returns a line of a table."""
    return f"| {' | '.join(values)} |" if markdown else template.format(*values)


HEADS = (
    "model",
    "weights",
    "target",
    "layout",
    "GiB",
    "1 core",
    "2 cores",
    "4 cores",
    "longest on 1",
    "ms before, on 1, 2, 4",
    "512 tokens",
    "512, before",
)
LINE = "{:11}  {:7}  {:10}  {:12}  {:>10}  {:>14}  {:>14}  {:>14}  {:29}  {:>25}  {:>10}  {:>11}"
SUMS_HEADS = ("model", "weights", "target", "layout", "GFLOP, layer", "GB, layer", "GFLOP, token", "GB, token")
SUMS_LINE = "{:11}  {:7}  {:22}  {:12}  {:>14}  {:>14}  {:>14}  {:>16}"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
