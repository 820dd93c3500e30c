"""Compares few kernels that serve any number of tokens and any cache length with exact kernels: modelled time, bytes, launches.

    ./bazelw run //benchmarks:served_lengths

It derives the manifest of Llama-3-8B as the ready manifests are derived, for a cache of 8,192 cells and calls of up to
512 tokens. For each number of tokens and each length, it takes llama.cpp's graph, serves each node as the backend does
(kernelgen.dispatch.lengths), and compares it with a kernel of its own. Times are modelled for trn1
(tools/kernelgen/dispatch/chips.json), not measured. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import figures
from backend_programs import Programs
from kernelgen import cli, manifest
from kernelgen.dispatch.lengths import LengthIndex, Selection
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.model.exporter import find
from kernelgen.model.sizes import DecodeCall, Settings, pad
from kernelgen.spec.op_kernel import KernelSpec
from published import MODELS, OPTIONS
from published.header import write

MODEL = "Llama-3-8B"
N_CTX = 8192
N_UBATCH = 512

SHOWN = (1, 2, 7, 20, 64, 100, 128, 129, 200, 256, 300, 400, 511, 512)
"""The numbers of tokens with a row of their own."""


@dataclass(frozen=True)
class Graph:
    """A graph: the number of equal nodes, and how each node is served; None if no kernels compute it."""

    call: DecodeCall
    nodes: Mapping[KernelSpec, int]
    selections: Mapping[KernelSpec, Selection | None]

    def total(self, value: str) -> float:
        """Returns the sum over all nodes of an attribute of `Selection`."""
        return sum(
            count * getattr(self.selections[spec], value) for spec, count in self.nodes.items() if self.selections[spec]
        )

    @property
    def lacking(self) -> int:
        return sum(count for spec, count in self.nodes.items() if not self.selections[spec])

    @property
    def launches(self) -> int:
        return sum(count * len(s.kernels) for spec, count in self.nodes.items() if (s := self.selections[spec]))


def graphs(
    file: Path, kernels: Iterable[KernelSpec], calls: Sequence[DecodeCall], programs: Programs
) -> Iterator[Graph]:
    """Yields the graph of each call, served by `kernels`."""
    settings = Settings((N_CTX,), N_UBATCH, 1, (1,), None, None, "f16", "f16", (True,), False, False)
    graph_exporter = find(programs.exporter, programs.libraries)
    index = LengthIndex.of(kernels)
    known: dict[KernelSpec, Selection | None] = {}
    for _, call, graph in graph_exporter.graphs(file, settings, calls):
        nodes = Counter(node.spec() for node in graph.nodes if not node.empty)
        for spec in nodes.keys() - known.keys():
            known[spec] = index.select(spec, N_CTX)
        yield Graph(call, nodes, known)


def kernels_of(file: Path, output: Path, programs: Programs) -> list[KernelSpec]:
    """Derives a model's manifest and returns its kernels.

    Raises:
        SystemExit: it can't be derived.
    """
    options = [str(N_CTX) if option == "4096" else option for option in OPTIONS]
    with contextlib.redirect_stdout(sys.stderr):
        status = cli.run(
            [
                "model",
                str(file),
                "-o",
                str(output),
                "--fuse",
                "none",
                "--weights",
                "none",
                *options,
                *programs.options(),
            ]
        )
    if status:
        raise SystemExit(f"{file}: no manifest")
    (request,) = manifest.load([output], Catalog([builtin_library()]))
    return [kernel.spec for kernel in request.kernels]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def measure(file: Path, programs: Programs, counts: Sequence[int]) -> Iterator[figures.Figure]:
    """Yields the figures of a model's file, for calls of these numbers of tokens and for every length of the cache."""
    kernels = kernels_of(file, file.with_suffix(".yaml"), programs)
    lengths = range(pad(1), N_CTX + 1, pad(1))
    prompts = list(graphs(file, kernels, [DecodeCall(N_CTX, 1, n, 1, pad(n)) for n in counts], programs))
    depths = list(graphs(file, kernels, [DecodeCall(N_CTX, 1, 1, 1, n_kv) for n_kv in lengths], programs))
    exact = {spec for graph in (*prompts, *depths) for spec in graph.nodes}
    yield figures.Figure(
        "kernels for every number of tokens and every length",
        len(kernels),
        "kernels",
        peer=figures.Peer(f"exact kernels for the {len(prompts) + len(depths)} graphs", len(exact)),
        limit=figures.Limit("value", at_most=200),
    )
    lacking = sum(graph.lacking for graph in (*prompts, *depths))
    total = sum(sum(graph.nodes.values()) for graph in (*prompts, *depths))
    yield figures.Figure(
        "nodes that no kernels compute",
        lacking,
        "nodes",
        peer=figures.Peer("nodes", total),
        limit=figures.Limit("value", at_most=0),
    )
    for graph in prompts:
        if graph.call.n_tokens in SHOWN:
            yield figures.Figure(
                f"{graph.call.n_tokens} tokens: {graph.launches} launches, {graph.total('padding'):.0f} rows of padding",
                graph.total("us") / 1e3,
                "ms",
                peer=figures.Peer("exact kernels", graph.total("exact_us") / 1e3),
            )
    yield figures.Figure(
        f"modelled time of a prompt, averaged over 1 to {max(counts)} tokens",
        mean([graph.total("us") / graph.total("exact_us") for graph in prompts]),
        "times",
        peer=figures.Peer("exact kernels", 1),
        limit=figures.Limit("ratio", at_most=1.15),
    )
    attention = [
        sum(
            count * how(s)
            for spec, count in graph.nodes.items()
            if spec.op == "flash_attn_ext" and (s := graph.selections[spec])
        )
        for how in (lambda s: s.bytes, lambda s: s.exact_bytes)
        for graph in depths
    ]
    read, needed = attention[: len(depths)], attention[len(depths) :]
    yield figures.Figure(
        f"bytes of the cache that attention reads, averaged over 0 to {N_CTX} cells",
        mean([a / b for a, b in zip(read, needed, strict=True)]),
        "times",
        peer=figures.Peer("bytes in use", 1),
        limit=figures.Limit("ratio", at_most=1.5),
    )
    yield figures.Figure(
        "launches per node, averaged over all prompts",
        mean([graph.launches / sum(graph.nodes.values()) for graph in prompts]),
        "launches",
        peer=figures.Peer(
            "the most for a prompt", max(graph.launches / sum(graph.nodes.values()) for graph in prompts)
        ),
        limit=figures.Limit("value", at_most=3),
    )


def main() -> int:
    args = figures.arguments(__doc__).parse_args()
    programs = Programs.find()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{MODEL}.gguf"
        write(MODELS[MODEL](), file)
        counts = SHOWN if args.quick else range(1, N_UBATCH + 1)
        return figures.report(args, lambda: measure(file, programs, counts))


if __name__ == "__main__":
    sys.exit(main())
