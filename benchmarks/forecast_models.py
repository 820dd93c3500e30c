"""What a token of published models takes by the forecast, on each target and over 1, 2 and 4 cores:
`./bazelw run //benchmarks:forecast_models`.

llama.cpp says what it computes for one token and for a prompt of 512 with 1,024 cells, from the models' headers; each layer is one
kernel. More than one core is not built yet. A column is of products by quantized weights in F32, as they were before their kernels
rounded both factors to BF16: the same counts, with the rate of F32. `--markdown` prints the table of docs/forecast.md.
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
from kernelgen.forecast.work import Work, of_hlo
from kernelgen.ggml.types import TYPES
from kernelgen.lowering import emission
from kernelgen.model.exporter import Exporter
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import layers
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.graph_kernel import GraphSpec
from kernelgen.spec.op_kernel import KernelSpec
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
    """Returns whether a kernel reads quantized weights: its products of BF16 are then by these."""
    kernels = [node.kernel for node in spec.nodes] if isinstance(spec, GraphSpec) else [spec]
    return any(TYPES[t.dtype].quantized for kernel in kernels for t in kernel.inputs if t is not None)


def in_f32(work: Work) -> Work:
    """Returns the work with its products of BF16 as ones of F32."""
    columns = Counter(work.columns)
    columns["float32"] += columns.pop("bfloat16", 0)
    return replace(work, columns=columns)


@dataclass(frozen=True)
class Row:
    """What a model takes on a target.

    Attributes:
        target: its name.
        token: one token, over each of `CORES`.
        prompt: a prompt of `N_PROMPT` tokens on one core.
        before: one token on one core with products by quantized weights in F32.
    """

    target: str
    token: tuple[CallForecast, ...]
    prompt: CallForecast
    before: CallForecast


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
        with contextlib.redirect_stdout(sys.stderr):  # what an emitter prints
            return emission.emit(catalog.emitters(catalog.kernel(spec)), spec).hlo

    for target in SHOWN:
        chip = chips.of(target)
        sbuf = sbuf_bytes(chip)

        def known(spec: Spec, sbuf: int = sbuf) -> Work:
            return of_hlo(hlo(spec), sbuf)

        def before(spec: Spec, sbuf: int = sbuf) -> Work:
            work = of_hlo(hlo(spec), sbuf)
            return in_f32(work) if quantized(spec) else work

        found = [
            forecast(graph, (), groups, chip, work_of, layers=header.layers, cores=cores)
            for graph, work_of, cores in [(prompt, known, 1), (token, before, 1), *((token, known, n) for n in CORES)]
        ]
        if found[0].missing + found[1].missing:
            raise SystemExit(f"{model}, {ftype}: {found[0].missing + found[1].missing} nodes have no kernel")
        yield Row(target, tuple(found[2:]), found[0], found[1])


def rows(model: str, ftype: str, exporter: Exporter, catalog: Catalog) -> Iterator[list[str]]:
    """Yields the fields of each line; targets of the same figures have one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in forecasts(model, ftype, exporter, catalog):
        one = row.token[0]
        held = (one.memory.weights + one.memory.cache) / (1 << 30)
        parts = sorted(one.parts_ms.items(), key=lambda part: -part[1])[:2]
        fields = (
            f"{held:.1f} of {one.memory.device >> 30}",
            *map(cell, row.token),
            ", ".join(f"{part} {ms:.1f}" for part, ms in parts),
            "" if row.before.ms == one.ms else cell(row.before),
            f"{row.prompt.ms:.0f} ms",
        )
        merged.setdefault(fields, []).append(row.target)
    for fields, targets in merged.items():
        yield [model, ftype, ", ".join(targets), *fields]


def cell(one: CallForecast) -> str:
    """Returns ms and tokens a second, in parentheses where the memory of the cores does not hold the model."""
    text = f"{one.ms:.1f} ms, {1e3 / one.ms:.0f}"
    return text if one.memory.fits else f"({text})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/forecast.md")
    parser.add_argument("--only", choices=list(dict.fromkeys(model for model, _ in ROWS)), help="this model alone")
    args = parser.parse_args(arguments)
    programs = Programs.find()
    exporter, catalog = Exporter(programs.exporter, programs.libraries), Catalog([builtin_library()])
    if args.markdown:
        print("| " + " | ".join(HEADS) + " |\n|---|---|---|--:|--:|--:|--:|---|--:|--:|")
    else:
        print("ms of a token and tokens a second, in parentheses what does not fit; modelled, not measured")
        print(f"one sequence, {N_KV:,} cells; more than 1 core is not built yet\n")
        print(LINE.format(*HEADS))
    for model, ftype in ROWS:
        if args.only in (None, model):
            for fields in rows(model, ftype, exporter, catalog):
                print("| " + " | ".join(fields) + " |" if args.markdown else LINE.format(*fields))
    return 0


HEADS = (
    "model",
    "weights",
    "target",
    "GiB",
    "1 core",
    "2 cores",
    "4 cores",
    "longest on 1",
    "1 core, in F32",
    "512 tokens",
)
LINE = "{:11}  {:7}  {:10}  {:>10}  {:>14}  {:>14}  {:>14}  {:29}  {:>14}  {:>10}"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
