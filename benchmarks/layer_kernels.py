"""Compares layers of published models as one kernel each with one kernel per node: launches, kernels, bytes of HLO, CPU s.

    ./bazelw run //benchmarks:layer_kernels

It reads the models' headers. For a decode step and for a prompt of 512 tokens, it prints the launches of a graph whose
layers are one kernel each, against one launch per node, and the number of these kernels. It also prints the bytes of
the HLO of the largest layer, the CPU time of emitting it, and what the lint refuses for any target. Exit status 1 if a
limit is missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent))

import figures
from backend_programs import Programs
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.hlo.lint import errors, lint
from kernelgen.lowering import emission
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import layers
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.kernel import GraphSpec
from kernelgen.targets import TARGETS
from published import MODELS
from published.header import GgufHeader, Tensor, write

N_CTX = 4096
CALLS = {"decode": DecodeCall(N_CTX, 1, 1, 1, 1024), "512 tokens": DecodeCall(N_CTX, 1, 512, 1, 1024)}
"""The calls to examine, with one length of the cache."""

EMIT_SECONDS = 1.0
"""The limit of the CPU time of emitting a layer."""

LAUNCHES = {"Llama-3-8B": 34}
KERNELS = {"Llama-3-8B": 5}
"""Limits of a step's launches, and of its different kernels."""


def mamba() -> GgufHeader:
    """Returns the header of Mamba-2.8B: the values of state-spaces/mamba-2.8b's config.json, under llama.cpp's names."""
    n_embd, n_layer, n_vocab, d_conv, d_state, dt_rank = 2560, 64, 50280, 4, 16, 160
    d_inner = 2 * n_embd
    tensors = [Tensor("token_embd.weight", (n_embd, n_vocab), "f16"), Tensor("output_norm.weight", (n_embd,), "f32")]
    for i in range(n_layer):
        tensors += [
            Tensor(f"blk.{i}.{name}", ne, dtype)
            for name, ne, dtype in (
                ("attn_norm.weight", (n_embd,), "f32"),
                ("ssm_in.weight", (n_embd, 2 * d_inner), "f16"),
                ("ssm_conv1d.weight", (d_conv, d_inner), "f32"),
                ("ssm_conv1d.bias", (d_inner,), "f32"),
                ("ssm_x.weight", (d_inner, dt_rank + 2 * d_state), "f16"),
                ("ssm_dt.weight", (dt_rank, d_inner), "f16"),
                ("ssm_dt.bias", (d_inner,), "f32"),
                ("ssm_a", (d_state, d_inner), "f32"),
                ("ssm_d", (d_inner,), "f32"),
                ("ssm_out.weight", (d_inner, n_embd), "f16"),
            )
        ]
    fields = {
        "context_length": 1048576,
        "embedding_length": n_embd,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": n_layer,
        "ssm.conv_kernel": d_conv,
        "ssm.inner_size": d_inner,
        "ssm.state_size": d_state,
        "ssm.time_step_rank": dt_rank,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": n_vocab,
        ".tokenizer.ggml.model": "no_vocab",
    }
    return GgufHeader("mamba", fields, tensors)


HEADERS = {
    **{name: MODELS[name] for name in ("Llama-3-8B", "Qwen3-8B", "Gemma-2-2B", "Mixtral-8x7B", "Phi-3-mini-4k")},
    "Mamba-2.8B": mamba,
}
FTYPES = ("F16", "Q4_K_M")


def exported(file: Path, ftype: str, exporter: Exporter) -> dict[str, Graph]:
    """Returns the graph of each call of `CALLS`."""
    settings = Settings(
        n_ctx=(N_CTX,),
        n_ubatch=512,
        n_seq_max=1,
        n_tokens=(1, 512),
        n_outputs=(1,),
        n_kv=None,
        type_k="f16",
        type_v="f16",
        flash_attn=(True,),
        kv_unified=False,
        swa_full=False,
        ftype=ftype,
    )
    calls = list(CALLS.values())
    return dict(zip(CALLS, (graph for _, _, graph in exporter.graphs(file, settings, calls)), strict=True))


def groups(graph: Graph) -> list[GraphSpec]:
    """Returns the graph kernel of each launch, in order."""
    return [segment_spec(graph, segment) for segment in layers(graph)]


def steps(name: str, ftype: str, graphs: dict[str, Graph]) -> Iterator[figures.Figure]:
    """Yields the launches and kernels of a model's steps, against one launch per node."""
    for call, graph in graphs.items():
        specs = groups(graph)
        most = LAUNCHES.get(name)
        yield figures.Figure(
            f"{name}, {ftype}, {call}: launches",
            len(specs),
            "launches",
            peer=figures.Peer("nodes", len(graph.nodes)),
            limit=None if most is None else figures.Limit("value", at_most=most),
        )
        most = KERNELS.get(name)
        yield figures.Figure(
            f"{name}, {ftype}, {call}: kernels",
            len(set(specs)),
            "kernels",
            peer=figures.Peer("kernels of nodes", len({node.kernel for spec in specs for node in spec.nodes})),
            limit=None if most is None else figures.Limit("value", at_most=most),
        )


def kernels(name: str, ftype: str, graphs: dict[str, Graph], catalog: Catalog) -> Iterator[figures.Figure]:
    """Yields the HLO of a model's largest layer: its bytes and its CPU time, against the kernels of its nodes, and the lint."""
    for call, graph in graphs.items():
        spec = max(groups(graph), key=lambda s: (len(s.nodes), s.id))
        members = sorted({node.kernel for node in spec.nodes}, key=lambda s: s.id)
        sizes, seconds = [], []
        # The first emission is not timed, because it includes imports.
        for one in (spec, spec, *members):
            kernel = catalog.kernel(one)
            before = time.process_time()
            hlo = emission.emit(catalog.emitters(kernel), one).hlo
            seconds.append(time.process_time() - before)
            sizes.append(len(hlo))
            if one is spec:
                layer = hlo
        what = f"{name}, {ftype}, {call}: layer of {len(spec.nodes)} nodes"
        yield figures.Figure(
            f"{what}, HLO", sizes[1] / 1024, "KiB", peer=figures.Peer("kernels of nodes", sum(sizes[2:]) / 1024)
        )
        yield figures.Figure(
            f"{what}, emitting, CPU time",
            seconds[1],
            "s",
            peer=figures.Peer("kernels of nodes", sum(seconds[2:])),
            limit=figures.Limit("value", at_most=EMIT_SECONDS),
        )
        refused = sum(len(errors(lint(layer, target))) for target in TARGETS.values())
        yield figures.Figure(
            f"{what}, refused by the lint of any target", refused, "errors", limit=figures.Limit("value", at_most=0)
        )


def measure(quick: bool) -> Iterator[figures.Figure]:
    """Yields the figures of each model."""
    programs = Programs.find()
    exporter = Exporter(programs.exporter, programs.libraries)
    catalog = Catalog([builtin_library()])
    with tempfile.TemporaryDirectory() as folder:
        for name in list(HEADERS)[: 1 if quick else None]:
            file = write(HEADERS[name](), Path(folder) / f"{name}.gguf")
            for ftype in FTYPES:
                graphs = exported(file, ftype, exporter)
                yield from steps(name, ftype, graphs)
                yield from kernels(name, ftype, graphs, catalog)


if __name__ == "__main__":
    sys.exit(figures.main(__doc__, measure))
