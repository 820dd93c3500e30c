"""Graphs of devices over which llama.cpp splits a model's tensors: export-graphs --split-mode tensor."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import headers
import pytest

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.hlo import proto
from kernelgen.lowering import emission
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import GraphReader
from kernelgen.spec.kernel import GraphSpec

SIZES = ("--graph", "n_tokens=1,n_kv=512", "--graph", "n_tokens=45,n_outputs=1")


def run(exporter: Exporter, model: Path, *options: object) -> subprocess.CompletedProcess[str]:
    command = [exporter.program, model, "--ctx-size", 512, *SIZES, *options]
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)


def split(exporter: Exporter, model: Path, n_devices: int) -> list[dict[str, Any]]:
    done = run(exporter, model, "--split-mode", "tensor", "--devices", n_devices)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


def weights(graph: dict[str, Any]) -> dict[str, list[int]]:
    return {t["name"]: t["ne"] for t in graph["tensors"] if t.get("role") == "weight"}


@pytest.mark.parametrize("n_devices", [2, 4])
def test_equal_devices_have_one_graph_with_slices_and_sums(exporter: Exporter, n_devices: int, tmp_path: Path) -> None:
    header = headers.qwen3(n_head=8, n_head_kv=4)
    graphs = split(exporter, headers.write(header, tmp_path / "model.gguf"), n_devices)
    assert [g["split"] for g in graphs] == [{"mode": "tensor", "devices": n_devices, "of": list(range(n_devices))}] * 2
    assert [(g["sizes"]["n_tokens"], g["sizes"]["n_kv"]) for g in graphs] == [(1, 512), (45, 256)]
    whole = {t.name: list(t.ne) for t in header.tensors}
    for graph in graphs:
        for name, ne in weights(graph).items():
            axis = 0 if "attn_output" in name or "ffn_down" in name else 1
            wanted = whole[name] + [1] * (4 - len(whole[name]))
            if "norm" not in name and name != "output.weight":
                wanted[axis] //= n_devices
            if name != "output.weight":  # llama.cpp decides by its size
                assert ne == wanted, name
        # Attention and the feed-forward network of each layer end with a sum, and no node reads the summand after it.
        tensors = graph["tensors"]
        sums = [i for i, t in enumerate(tensors) if t["op"] == "all_reduce"]
        n_layers = len({name for name in whole if name.endswith(".ffn_down.weight")})
        assert [tensors[i]["params"] for i in sums] == [[n_devices]] * (2 * n_layers)
        for i in sums:
            (source,) = tensors[i]["src"]
            assert tensors[source]["op"] == "mul_mat"
            assert tensors[i]["view"] == [source, 0]
            assert (tensors[i]["type"], tensors[i]["ne"]) == (tensors[source]["type"], tensors[source]["ne"])
            assert not any(source in t.get("src", ()) for t in tensors[i + 1 :])
            assert any(i in t.get("src", ()) for t in tensors[i + 1 :])
        assert {t["name"].split("#")[1] for t in tensors if t.get("role") == "input"} >= {"inp_pos"}
        assert {t["ne"][0] for t in tensors if t.get("role") == "cache"} == {128 * 4 // n_devices}


def test_a_graph_of_a_device_is_read_with_its_sums(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    done = run(exporter, file, "--split-mode", "tensor", "--devices", 2)
    reader = GraphReader(done.stdout.encode().splitlines(), "export")
    reader.model()
    for graph in reader.graphs():
        sums = [i for i, node in enumerate(graph.nodes) if node.op == "all_reduce"]
        assert len(sums) == 4
        for i in sums:
            spec = graph.nodes[i].spec()
            assert (spec.alias, dict(spec.params)) == (0, {"n_devices": 2})
            # The sum is in place: its summand is the result of the node before.
            assert graph.wires[i].output == graph.wires[i - 1].output == graph.wires[i].inputs[0]


def test_a_step_is_one_kernel_with_its_sums(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    export = tmp_path / "export.jsonl"
    export.write_text(run(exporter, file, "--split-mode", "tensor", "--devices", 2).stdout)
    assert cli.run(["model", str(export), "-o", str(tmp_path / "m.yaml"), "--fuse", "step"]) == 0
    catalog = Catalog([builtin_library()])
    (request,) = manifest.load([tmp_path / "m.yaml"], catalog)
    steps = [kernel.spec for kernel in request.kernels if isinstance(kernel.spec, GraphSpec)]
    assert [sum(node.op == "all_reduce" for node in step.nodes) for step in steps] == [4, 4]
    for step in steps:
        hlo = emission.emit_functions(step, {op: load_function(*catalog.find(op)) for op in step.ops}).hlo
        instructions = proto.entry(proto.parse(hlo)).instructions
        assert [i.channel_id for i in instructions if i.opcode == "all-reduce"] == [1, 2, 3, 4]


def test_a_step_without_outputs_ends_with_its_last_attention(exporter: Exporter, tmp_path: Path) -> None:
    """Without rows of outputs, llama.cpp's last nodes have no elements and are not computed; the last sum has no reader
    and is omitted.
    """
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    export = tmp_path / "export.jsonl"
    command = [exporter.program, file, "--ctx-size", 512, "--split-mode", "tensor", "--devices", 2]
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
    sizes = [f"n_tokens=64,n_kv=512,n_outputs={n}" for n in (1, 0)]
    command += [word for one in sizes for word in ("--graph", one)]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, check=True)
    export.write_bytes(done.stdout)
    reader = GraphReader(done.stdout.splitlines(), "export")
    reader.model()
    last, before = reader.graphs()
    n = len(before.nodes)
    assert last.nodes[:n] == before.nodes
    assert before.nodes[-1].op == "mul_mat"
    assert last.nodes[n].op == "all_reduce"
    assert cli.run(["model", str(export), "-o", str(tmp_path / "m.yaml"), "--fuse", "step"]) == 0
    (request,) = manifest.load([tmp_path / "m.yaml"], Catalog([builtin_library()]))
    whole, part = sorted(
        (kernel.spec for kernel in request.kernels if isinstance(kernel.spec, GraphSpec)), key=lambda s: -len(s.nodes)
    )
    assert len(part.nodes) < len(whole.nodes)
    # ggml counts nodes without elements as readers, so the backend finds that their inputs are used outside of the
    # group
    assert [node.op for node in part.nodes if node.escapes] == ["add", "mul_mat"]
    assert set(before.unread.values()) == {n}


def test_devices_that_differ_have_a_graph_each(exporter: Exporter, tmp_path: Path) -> None:
    # three heads of the cache over two devices: one and two
    file = headers.write(headers.qwen3(n_head=6, n_head_kv=3), tmp_path / "model.gguf")
    graphs = split(exporter, file, 2)
    assert [g["split"]["of"] for g in graphs] == [[0], [1], [0], [1]]
    heads = [weights(g)["blk.0.attn_k.weight"][1] // 128 for g in graphs[:2]]
    assert sorted(heads) == [1, 2]


def test_experts_are_added_before_the_sum(exporter: Exporter, tmp_path: Path) -> None:
    (graph, _) = split(exporter, headers.write(headers.mixtral(), tmp_path / "model.gguf"), 2)
    tensors = graph["tensors"]
    sources = [tensors[t["src"][0]]["op"] for t in tensors if t["op"] == "all_reduce"]
    assert sources[:2] == ["mul_mat", "add"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", 2), "--devices is 2 to 16 with --split-mode tensor, and not given without"),
        (("--split-mode", "tensor"), "--devices is 2 to 16"),
        (("--split-mode", "tensor", "--devices", 17), "--devices is 2 to 16"),
        (("--split-mode", "row"), "--split-mode: expected tensor or none, not 'row'"),
        (("--split-mode", "tensor", "--devices", 2, "--flash-attn", "off"), "SPLIT_MODE_TENSOR requires flash_attn"),
    ],
)
def test_what_cannot_be_split(exporter: Exporter, tmp_path: Path, options: tuple[object, ...], said: str) -> None:
    done = run(exporter, headers.write(headers.qwen3(), tmp_path / "model.gguf"), *options)
    assert (done.returncode, done.stderr[:7]) == (2, "error: ")
    assert said in done.stderr
