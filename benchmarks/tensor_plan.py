"""Plans Llama-3-8B over several cores from its header: launches and bytes of weights per token and core, and a token's forecast.

llama.cpp exports each device's graph; kernels are cut from it as `kernelgen model --fuse` cuts them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import figures
from backend_programs import Programs
from kernelgen.dispatch import chips
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.forecast.kernels import Kernels
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import cut_of, segment_spec
from kernelgen.model.repeats import Segment
from kernelgen.model.sizes import DecodeCall, Settings
from published import MODELS
from published.header import write

MODEL, LAYERS, N_CTX, N_KV = "Llama-3-8B", 32, 4096, 1024
CORES = (1, 2, 4, 8)
CHIPS = (("trn1", None), ("inf2", None), ("trn2", None), ("trn2", 1), ("trn3", None), ("trn3", 1))
"""Targets, and the physical cores per logical core if they differ from the target's default."""
WAYS = {"step": 4, "layers:2": LAYERS // 2 + 2, "layer": LAYERS + 2, "parts+sums": 2 * LAYERS + 2, "parts": None}
"""Ways to cut a step, by the names of --fuse, and the limit of launches per token of each."""
MORE_BYTES = 0.02
"""The share of one core's bytes that each of several cores may read in addition to its part."""


def graphs(programs: Programs, cores: Sequence[int]) -> dict[int, list[Graph]]:
    """Returns the graph of each device for a token of Llama-3-8B; devices with the same graph share it."""
    settings = Settings(
        n_ctx=(N_CTX,),
        n_ubatch=512,
        n_seq_max=1,
        n_tokens=(1,),
        n_outputs=(1,),
        n_kv=None,
        type_k="f16",
        type_v="f16",
        flash_attn=(True,),
        kv_unified=False,
        swa_full=False,
        ftype="F16",
        devices=tuple(cores),
    )
    exporter = Exporter(programs.exporter, programs.libraries)
    with tempfile.TemporaryDirectory() as folder:
        file = write(MODELS[MODEL](), Path(folder) / "model.gguf")
        found: dict[int, list[Graph]] = {n: [] for n in cores}
        for _, _, graph in exporter.graphs(file, settings, [DecodeCall(N_CTX, 1, 1, 1, N_KV)]):
            found[graph.devices].append(graph)
    return found


def segments_of(graph: Graph, way: str) -> list[Segment]:
    """Returns the launches of a graph."""
    cut = cut_of(way)
    assert cut is not None
    return cut(graph)


def weights_read(graph: Graph, segments: Sequence[Segment]) -> int:
    """Returns the bytes of weights that a graph's launches read; each launch counts a weight once."""
    count = 0
    for segment in segments:
        nodes = range(segment.start, segment.end)
        read = {at.root for n in nodes for at in graph.wires[n].inputs if at and graph.roots[at.root].weight}
        rows = {graph.wires[n].inputs[0] for n in nodes if graph.nodes[n].op == "get_rows"}  # on the CPU
        read -= {at.root for at in rows if at}
        count += sum(graph.roots[root].shape.storage_bytes for root in read)
    return count


def planned(found: dict[int, list[Graph]]) -> Iterator[figures.Figure]:
    """Yields the launches and the weights per token and core."""
    for way, most in WAYS.items():
        one = found[1][0]
        whole = weights_read(one, segments_of(one, "step"))
        for cores, devices in found.items():
            if cores == 1:
                continue
            cuts = [segments_of(graph, way) for graph in devices]
            sums = sum(node.op == "all_reduce" for node in devices[0].nodes)
            launches = max(map(len, cuts)) - (sums if way == "parts" else 0)
            yield figures.Figure(
                f"{MODEL}, {way}, {cores} cores: launches of a token and core",
                launches,
                "launches",
                limit=None if most is None else figures.Limit("value", at_most=most),
            )
            yield figures.Figure(
                f"{MODEL}, {way}, {cores} cores: weights that a core reads",
                max(weights_read(graph, cut) for graph, cut in zip(devices, cuts, strict=True)) / 2**20,
                "MiB",
                peer=figures.Peer("one core", whole / 2**20),
                limit=figures.Limit("ratio", at_most=1 / cores + MORE_BYTES),
            )


@dataclass(frozen=True)
class Token:
    """The forecast of a token in ms: with queued launches, and with launches that the host waits for."""

    queued: float
    waited: float


def forecasts(found: dict[int, list[Graph]], way: str) -> dict[tuple[str, int], Token]:
    """Returns the forecast by target and cores, of the slowest device; a sum between parts goes through the host."""
    catalog = Catalog([builtin_library()])
    tokens = {}
    for cores, devices in found.items():
        specs = [segment_spec(g, s) for g in devices for s in segments_of(g, way) if len(s) > 1]
        specs += [node.spec() for g in devices for node in g.nodes if not node.empty and node.op != "all_reduce"]
        kernels = Kernels(specs, catalog)
        for target, lnc in CHIPS:
            chip = chips.of(target, lnc)
            queued, waited = (slowest(kernels, devices, chip, queued=queued) for queued in (True, False))
            tokens[name_of(target, lnc), cores] = Token(queued, waited)
    return tokens


def name_of(target: str, lnc: int | None) -> str:
    return target if lnc is None else f"{target} with LNC {lnc}"


def slowest(kernels: Kernels, devices: Sequence[Graph], chip: chips.Chip, *, queued: bool) -> float:
    """Returns the milliseconds of the slowest device."""
    calls = [kernels.forecast(graph, chip, queued=queued, layers=LAYERS) for graph in devices]
    if missing := sum(call.missing for call in calls):
        raise SystemExit(f"{MODEL}, {chip.target}: {missing} nodes have no kernel")
    return max(call.ms for call in calls)


def forecast_figures(found: dict[int, list[Graph]], way: str) -> Iterator[figures.Figure]:
    tokens = forecasts(found, way)
    for (target, cores), token in tokens.items():
        yield figures.Figure(
            f"{MODEL}, {way}, {cores} core{'s' if cores > 1 else ''} of {target}: forecast",
            token.queued,
            "ms",
            peer=figures.Peer("one core", tokens[target, 1].queued),
            direction="peer / value",
        )


def print_table(found: dict[int, list[Graph]]) -> None:
    """Prints the table of docs/results/tensor-parallel-forecast.md."""
    print(f"| | {' | '.join(f'{n} core' + 's' * (n > 1) for n in found)} |")
    print("|---|" + "--:|" * len(found))
    for way in ("step", "layer", "parts+sums", "parts"):
        tokens = forecasts(found, way)
        rows: dict[str, list[str]] = {}
        for target in [name_of(*chip) for chip in CHIPS]:
            cells = " | ".join(f"{tokens[target, n].queued:.1f} ({tokens[target, n].waited:.1f})" for n in found)
            rows.setdefault(cells, []).append(target)
        for cells, names in rows.items():
            print(f"| `{way}`, {', '.join(names)} | {cells} |", flush=True)
