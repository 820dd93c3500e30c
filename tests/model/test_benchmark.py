"""The benchmark of deriving counts correctly on a tiny model; times are not checked."""

from __future__ import annotations

from pathlib import Path

import headers
import pytest

import derive_manifests as benchmark
import served_lengths
import tensor_plan
from backend_programs import Programs
from kernelgen.model.exporter import Exporter

from .conftest import ROOT, specs

DATA = ROOT / "tests" / "data" / "graph-ops"


def programs(exporter: Exporter) -> Programs:
    assert exporter.libraries is not None
    return Programs(exporter.program, exporter.libraries)


def test_a_model_is_derived_and_its_graphs_are_covered(exporter: Exporter, tmp_path: Path) -> None:
    file, manifest = headers.write(headers.qwen3(), tmp_path / "tiny.gguf"), tmp_path / "tiny.yaml"
    found = {figure.what: figure for figure in benchmark.model(file, manifest, programs(exporter), runs=1)}
    assert list(found) == [
        "tiny: deriving, CPU time",
        "tiny: deriving",
        "tiny: peak memory",
        "tiny: kernels",
    ]
    assert found["tiny: kernels"].value == len(specs(manifest))
    assert all(figure.peer is not None and figure.peer.value > 0 for figure in found.values())
    whole = benchmark.graphs(file, manifest, programs(exporter))
    assert (whole.what, whole.value, whole.met) == ("tiny: nodes without a kernel, of 52 graphs", 0, True)
    manifest.write_text(manifest.read_text().replace("op: swiglu", "op: geglu"))
    less = benchmark.graphs(file, manifest, programs(exporter))
    assert (less.value, less.met) == (2 * 52, False)  # two layers


def test_exports_are_held_against_the_manifest_of_their_model() -> None:
    own = list(benchmark.exports({"llama-3.2-1b": DATA / "llama-3.2-1b.yaml"}, DATA))
    assert [(f.what, f.value, f.met) for f in own] == [
        ("llama-3.2-1b, with flash attention: ops without a kernel", 0, True),
        ("llama-3.2-1b, without flash attention: ops without a kernel", 0, True),
    ]
    assert [f.peer and f.peer.value for f in own] == [30, 38]
    others = list(benchmark.exports({"llama-3.2-1b": ROOT / "manifests" / "basic.yaml"}, DATA))
    assert [(f.value, f.met) for f in others] == [(30, False), (38, False)]


def test_lengths_are_counted_on_a_model_of_toy_size(
    exporter: Exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_lengths, "N_CTX", 1024)
    file = headers.write(headers.qwen3(), tmp_path / "tiny.gguf")
    found = {figure.what: figure for figure in served_lengths.measure(file, programs(exporter), (1, 7, 300))}
    assert found["nodes that no kernels compute"].value == 0
    exact = found["kernels for every number of tokens and every length"]
    assert exact.peer is not None
    assert 60 < exact.value < 150
    assert [what for what in found if what.startswith(("1 tokens", "7 tokens"))] == [
        "1 tokens: 52 launches, 0 rows of padding",
        "7 tokens: 52 launches, 39 rows of padding",
    ]
    prompts = next(figure for what, figure in found.items() if what.startswith("modelled time"))
    assert 1 < prompts.value < 2
    cells = next(figure for what, figure in found.items() if what.startswith("bytes of the cache"))
    assert cells.value == pytest.approx((1 + 1 + 4 / 3 + 1) / 4)


def test_a_step_over_cores_is_counted(exporter: Exporter) -> None:
    found = tensor_plan.graphs(programs(exporter), (1, 2))
    figures = {figure.what.removeprefix("Llama-3-8B, "): figure for figure in tensor_plan.planned(found)}
    launches = {way: figures[f"{way}, 2 cores: launches of a token and core"] for way in tensor_plan.WAYS}
    assert {way: figure.value for way, figure in launches.items()} == dict(
        zip(tensor_plan.WAYS, (1, 18, 33, 65, 65), strict=True)
    )
    weights = [figures[f"{way}, 2 cores: weights that a core reads"] for way in tensor_plan.WAYS]
    # both cores read the norms
    assert all(figure.ratio is not None and 0.5 < figure.ratio < 0.501 and figure.met for figure in weights)
    # all but the embedding, whose rows the CPU reads: matrices in F16, and norms in F32
    layer = 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 2 * 4096
    assert weights[0].peer and weights[0].peer.value * 2**20 == 32 * layer + 2 * 4096 * 128256 + 4 * 4096
