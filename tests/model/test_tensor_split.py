"""`kernelgen model --split-mode tensor`, the exports that it reads, and other commands on kernels of slices."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import headers
import pytest
from headers import GgufHeader

from kernelgen import cli, manifest
from kernelgen.dispatch import chips
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.forecast import memory
from kernelgen.hlo import proto
from kernelgen.lowering.emission import emit_functions
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import GraphReader
from kernelgen.model.groups import cut_of
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.kernel import GraphSpec, KernelSpec
from published import MODELS

OPTIONS = ("--n-ctx", "512", "--n-tokens", "1,45")
Said = pytest.CaptureFixture[str]


def where(exporter: Exporter) -> list[str]:
    return ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries)]


def derive(exporter: Exporter, model: Path, devices: str, *options: str) -> Path:
    output = model.with_name("derived.yaml")
    split = ("--split-mode", "tensor", "--devices", devices, "--target", "trn2")
    assert cli.run(["model", str(model), "-o", str(output), *where(exporter), *OPTIONS, *split, *options]) == 0
    return output


def loaded(path: Path) -> tuple[set[KernelSpec], list[GraphSpec]]:
    (request,) = manifest.load([path], Catalog([builtin_library()]))
    specs = [kernel.spec for kernel in request.kernels]
    return {s for s in specs if isinstance(s, KernelSpec)}, [s for s in specs if isinstance(s, GraphSpec)]


def sums(spec: GraphSpec) -> list[int]:
    return [i for i, node in enumerate(spec.nodes) if node.op == "all_reduce"]


def exported(exporter: Exporter, model: Path, *sizes: str) -> Path:
    """Writes the graphs of calls over two devices, and returns the file."""
    command = [exporter.program, model, "--ctx-size", 512, "--split-mode", "tensor", "--devices", 2]
    command += [word for size in sizes for word in ("--graph", size)]
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, check=True)
    export = model.with_name("export.jsonl")
    export.write_bytes(done.stdout)
    return export


def steps(export: Path) -> list[GraphSpec]:
    """Returns the kernels of whole steps of an export, the longest first."""
    assert cli.run(["model", str(export), "-o", str(export.with_name("m.yaml")), "--fuse", "step"]) == 0
    return sorted(loaded(export.with_name("m.yaml"))[1], key=lambda step: -len(step.nodes))


@pytest.mark.parametrize(("header", "summands"), [(headers.qwen3(), "mul_mat"), (headers.mixtral(), "add")])
def test_a_device_has_slices_and_a_sum_after_attention_and_the_network(
    header: GgufHeader, summands: str, exporter: Exporter, tmp_path: Path
) -> None:
    """Experts are added before the sum. No node reads a summand after the sum, which is in place."""
    export = exported(exporter, headers.write(header, tmp_path / "model.gguf"), "n_tokens=1,n_kv=512")
    graph = json.loads(export.read_text().splitlines()[1])
    assert graph["split"] == {"mode": "tensor", "devices": 2, "of": [0, 1]}
    whole = {t.name: list(t.ne) for t in header.tensors}
    tensors = graph["tensors"]
    for name, ne in ((t["name"], t["ne"]) for t in tensors if t.get("role") == "weight"):
        if name.endswith(("attn_q.weight", "ffn_up.weight", "attn_output.weight", "ffn_down.weight")):
            axis = 0 if "attn_output" in name or "ffn_down" in name else 1
            assert [n * (1 + (i == axis)) for i, n in enumerate(ne)][: len(whole[name])] == whole[name], name
    places = [i for i, t in enumerate(tensors) if t["op"] == "all_reduce"]
    assert [tensors[tensors[i]["src"][0]]["op"] for i in places] == ["mul_mat", summands] * 2
    for i in places:
        (source,) = tensors[i]["src"]
        assert tensors[i]["view"] == [source, 0] and tensors[i]["params"] == [2]
        assert not any(source in t.get("src", ()) for t in tensors[i + 1 :])


def test_a_step_is_one_kernel_with_its_sums(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    (step,) = steps(exported(exporter, file, "n_tokens=1,n_kv=512"))
    catalog = Catalog([builtin_library()])
    hlo = emit_functions(step, {op: load_function(*catalog.find(op)) for op in step.ops}).hlo
    instructions = proto.entry(proto.parse(hlo)).instructions
    assert [i.channel_id for i in instructions if i.opcode == "all-reduce"] == [1, 2, 3, 4]


def test_a_step_without_outputs_ends_with_its_last_attention(exporter: Exporter, tmp_path: Path) -> None:
    """Without rows of outputs, llama.cpp's last nodes have no elements and are not computed; the last sum has no reader
    and is omitted.
    """
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    export = exported(exporter, file, *(f"n_tokens=64,n_kv=512,n_outputs={n}" for n in (1, 0)))
    reader = GraphReader(export.read_bytes().splitlines(), "export")
    reader.model()
    last, before = reader.graphs()
    n = len(before.nodes)
    assert last.nodes[:n] == before.nodes
    assert (before.nodes[-1].op, last.nodes[n].op) == ("mul_mat", "all_reduce")
    whole, part = steps(export)
    assert len(part.nodes) < len(whole.nodes)
    # ggml counts nodes without elements as readers, so the backend finds that their inputs are used outside of the
    # group
    assert [node.op for node in part.nodes if node.escapes] == ["add", "mul_mat"]
    assert set(before.unread.values()) == {n}


def test_a_model_has_the_kernels_of_its_slices_as_formulas(exporter: Exporter, tmp_path: Path, capsys: Said) -> None:
    model = headers.write(headers.qwen3(n_head=8, n_head_kv=4, n_layer=4), tmp_path / "model.gguf")
    output = derive(exporter, model, "1,2,4")
    said = capsys.readouterr().out
    assert "flash attention on, devices 0, 1 of 2: " in said and "devices 0, 1, 2, 3 of 4: " in said
    assert "weights as ggml has them: llama.cpp asks no device for other layouts when it splits tensors" in said
    assert "no formula" not in said and "no kernel" not in said
    text = output.read_text()
    assert "--split-mode tensor --devices 1,2,4" in text.replace(" \\\n#     ", "").partition("\nformat")[0]
    assert "its tensors split over 1 and 2 and 4 devices" in text
    kernels, graphs = loaded(output)
    # a cell's keys: four heads of 128, and slices of them
    assert {s.inputs[2].ne[0] for s in kernels if s.op == "set_rows" and s.inputs[2]} == {512, 256, 128}
    assert {dict(s.params)["n_devices"] for s in kernels if s.op == "all_reduce"} == {2, 4}
    assert {len(sums(graph)) for graph in graphs} >= {0, 2}


def test_equal_devices_share_kernels_and_others_have_their_own(
    exporter: Exporter, tmp_path: Path, capsys: Said
) -> None:
    model = headers.write(headers.qwen3(n_head=6, n_head_kv=3), tmp_path / "model.gguf")
    kernels, _ = loaded(derive(exporter, model, "2"))
    assert {s.inputs[2].ne[0] for s in kernels if s.op == "set_rows" and s.inputs[2]} == {128, 256}
    assert "device 0 of 2: " in capsys.readouterr().out


@pytest.mark.parametrize("fuse", ["parts", "parts+sums", "layer", "step"])
def test_kernels_are_parts_between_sums(exporter: Exporter, tmp_path: Path, fuse: str) -> None:
    model = headers.write(headers.qwen3(n_layer=4), tmp_path / "model.gguf")
    _, graphs = loaded(derive(exporter, model, "2", "--fuse", fuse, "--n-kv", "256", "--n-outputs", "1"))
    found = [sums(graph) for graph in graphs]
    if fuse == "parts":
        assert len(found) >= 2 and all(not places for places in found)
    elif fuse == "parts+sums":
        assert {tuple(places) for places in found} == {(), (0,)}  # no sum comes before the first part
    else:
        assert max(map(len, found)) == {"layer": 2, "step": 8}[fuse]


@pytest.mark.parametrize("fuse", ["parts+sums", "layer", "step"])
def test_a_sum_has_beside_it_what_all_devices_compute(exporter: Exporter, tmp_path: Path, fuse: str) -> None:
    """llama.cpp splits a feed-forward network of 384 columns into 256 and 128; attention is the same on both devices."""
    model = headers.write(headers.qwen3(n_ff=384, n_layer=4), tmp_path / "model.gguf")
    _, groups = loaded(derive(exporter, model, "2", "--fuse", fuse, "--n-kv", "256", "--n-outputs", "1"))
    with_sums = [group for group in groups if sums(group)]
    assert max(len(sums(group)) for group in with_sums) == (2 if fuse == "step" else 1)
    widths = {node.output.ne[0] for group in groups if not sums(group) for node in group.nodes}
    assert widths >= {128, 256}
    for group in with_sums:
        assert not any(node.op in ("silu", "swiglu") for node in group.nodes)  # ops of the feed-forward network
    # A sum is alone only if all nodes beside it differ.
    settings = Settings((512,), 512, 1, (1,), None, (256,), "f16", "f16", (True,), False, False, devices=(2,))
    one, other = (g for _, _, g in exporter.graphs(model, settings, [DecodeCall(512, 1, 1, 1, 256)]))
    assert one.differing == other.differing
    for i, (a, b) in enumerate(zip(one.nodes, other.nodes, strict=True)):
        assert i in one.differing or a == b
    assert not any(one.nodes[i].op == "all_reduce" for i in one.differing)
    assert {one.nodes[i].op for i in one.differing} >= {"mul_mat"}


def test_no_group_has_a_sum_of_devices_without_a_summand(exporter: Exporter, tmp_path: Path) -> None:
    # Two heads of the cache over four devices: in each layer two devices compute no attention and add 0.
    model = headers.write(headers.qwen3(n_head=4, n_head_kv=2, n_layer=4), tmp_path / "model.gguf")
    settings = Settings((512,), 512, 1, (1,), None, (256,), "f16", "f16", (True,), False, False, devices=(4,))
    graphs = [g for _, _, g in exporter.graphs(model, settings, [DecodeCall(512, 1, 1, 1, 256)])]
    assert len(graphs) == 2 and all(graph.zeroed for graph in graphs)
    for graph in graphs:
        for place in graph.zeroed:
            at = graph.wires[place].inputs[0]
            assert at is not None and graph.roots[at.root].node is None  # no node computes it
    for fuse in ("step", "layer", "layers:2", "parts", "parts+sums"):
        kernels, groups = loaded(derive(exporter, model, "4", "--fuse", fuse, "--n-kv", "256", "--n-outputs", "1"))
        assert groups and not any(map(sums, groups))
        assert any(kernel.op == "all_reduce" for kernel in kernels)
        # Also for a single device's graph, which does not record this: sums without a summand stay outside of groups.
        for graph in graphs:
            cut = cut_of(fuse)
            assert cut is not None
            segments = cut(replace(graph, differing=frozenset()))
            assert all(len(s) == 1 for s in segments for place in graph.zeroed if s.start <= place < s.end)
            assert (segments[0].start, segments[-1].end) == (0, len(graph.nodes))


@pytest.mark.parametrize("n_devices", [2, 4])
def test_a_core_has_its_part_of_the_weights(exporter: Exporter, tmp_path: Path, n_devices: int) -> None:
    model = headers.write(MODELS["Llama-3-8B"](), tmp_path / "model.gguf")
    settings = Settings(
        (4096,), 512, 1, (1,), None, (1024,), "f16", "f16", (True,), False, False, devices=(1, n_devices)
    )
    chip = chips.of("trn2")
    whole, *slices = (
        memory.of_graph(graph, chip, 1)
        for _, _, graph in exporter.graphs(model, settings, [DecodeCall(4096, 1, 1, 1, 1024)])
    )
    assert slices
    for one in slices:
        assert one.weights <= whole.weights * (1 / n_devices + 0.02)
        assert one.cache == whole.cache / n_devices


def test_a_forecast_counts_real_slices_and_sums(exporter: Exporter, tmp_path: Path, capsys: Said) -> None:
    model = headers.write(headers.qwen3(n_head=8, n_head_kv=4, n_layer=4), tmp_path / "model.gguf")
    sizes = ("--n-ctx", "512", "--n-tokens", "1", "--n-kv", "256")
    found = {}
    for fuse in ("parts", "parts+sums", "layer", "step"):
        kernels = derive(exporter, model, "2", "--fuse", fuse)
        command = ["forecast", str(kernels), "--model", str(model), *where(exporter), *sizes, "--target", "trn2"]
        capsys.readouterr()
        for waited in ("", "--waited"):
            options = ["--split-mode", "tensor", "--cores", "2", "--json", *([waited] if waited else [])]
            assert cli.run([*command, *options]) == 0
            (found[fuse, waited],) = json.loads(capsys.readouterr().out)
        one = found[fuse, ""]
        assert (one["cores"], one["built"], one["nodes_without_kernel"]) == (2, True, 0)
    launches = {fuse: one["launches"] for (fuse, waited), one in found.items() if not waited}
    assert launches["step"] < launches["layer"] < launches["parts+sums"]
    # each execution with a sum is a barrier when it is waited for
    barrier = chips.of("trn2").at("collectives_us", 2) / 1e3
    sums_ms = {fuse: found[fuse, "--waited"]["parts_ms"]["reductions"] for fuse in ("step", "layer", "parts+sums")}
    assert sums_ms["step"] >= barrier
    assert sums_ms["parts+sums"] - sums_ms["layer"] >= barrier
    ms = {fuse: found[fuse, "--waited"]["ms"] for fuse in ("step", "layer", "parts+sums")}
    assert ms["step"] < ms["layer"] < ms["parts+sums"]


def test_other_commands_take_kernels_and_exports_of_slices(exporter: Exporter, tmp_path: Path, capsys: Said) -> None:
    model = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    kernels = derive(exporter, model, "2", "--n-kv", "256", "--n-outputs", "1")
    split = ("--split-mode", "tensor", "--devices", "2")
    sizes = (*OPTIONS, "--n-kv", "256", "--n-outputs", "1")
    capsys.readouterr()
    assert cli.run(["coverage", str(kernels), "--model", str(model), *where(exporter), *sizes, *split]) == 0
    assert re.search(r": (\d+) of \1 ops covered, 0 missing$", capsys.readouterr().out, re.MULTILINE)
    # without the split, other kernels are needed
    assert cli.run(["coverage", str(kernels), "--model", str(model), *where(exporter), *sizes]) == 1
    capsys.readouterr()
    assert cli.run(["plan", str(kernels)]) == 0
    assert "all_reduce" in capsys.readouterr().out
    export = exported(exporter, model, str(DecodeCall(512, 1, 1, 1, 256)))
    assert cli.run(["coverage", str(kernels), "--graph-ops", str(export)]) == 0
    capsys.readouterr()
    assert cli.run(["forecast", str(kernels), "--model", str(export), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["cores"] == 2


def test_slices_for_cores_of_another_lnc(exporter: Exporter, tmp_path: Path, capsys: Said) -> None:
    model = headers.write(headers.qwen3(n_head=8, n_head_kv=8), tmp_path / "model.gguf")
    output = derive(exporter, model, "8", "--target", "trn2", "--lnc", "1")
    (request,) = manifest.load([output], Catalog([builtin_library()]))
    assert [config.lnc for config in request.configs] == [1]
    assert "--lnc 1" in output.read_text().partition("\nformat")[0]
