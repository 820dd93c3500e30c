"""A model's layers are found by structure, and one kernel computes what their nodes compute."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import group_kernels as one_kernel
import headers
import pytest

from kernelgen import manifest
from kernelgen.dispatch.grouping import Groups, UngroupedReason
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.model import groups
from kernelgen.model.exporter import Exporter
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import crossing, layers, whole
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.plan import instructions
from kernelgen.spec.kernel import GraphSpec

from .conftest import run_model

SETTINGS = Settings((512,), 512, 1, (1, 5), (1,), (256,), "f16", "f16", (True,), False, False)


def graph(exporter: Exporter, file: Path, n_tokens: int = 5) -> Graph:
    """Returns the graph of one call."""
    ((_, _, found),) = exporter.graphs(file, SETTINGS, [DecodeCall(512, 1, n_tokens, 1, 256)])
    return found


@pytest.fixture(scope="module")
def qwen3(exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return graph(exporter, headers.write(headers.qwen3(n_layer=5), tmp_path_factory.mktemp("qwen3") / "tiny.gguf"))


def most(spec: GraphSpec) -> dict[int, int]:
    """Returns the number of rows from which each slot of row numbers selects."""
    found: dict[int, int] = {}
    for node in spec.nodes:
        if node.op in ("get_rows", "set_rows"):
            table, rows = node.inputs[2 if node.op == "set_rows" else 0], node.inputs[1]
            assert table is not None and rows is not None
            if rows.place.slot:
                found[rows.place.index] = min(found.get(rows.place.index, 1 << 30), table.tensor.ne[1])
    return found


def test_groups_of_causal_attention_are_found_beside_others(exporter: Exporter, tmp_path: Path) -> None:
    """Graph kernels are causal; kernels of nodes use ggml's own mask, which may hide less."""
    file = headers.write(headers.qwen3(), tmp_path / "tiny.gguf")
    options = ("--n-ctx", 512, "--n-kv", 256, "--n-tokens", 5, "--fuse", "layer")
    found = {}
    for name in ("causal", "plain"):
        path = tmp_path / f"{name}.yaml"
        assert run_model(exporter, file, path, *options, *(["--causal"] if name == "causal" else [])) == 0
        (request,) = manifest.load([path], Catalog([builtin_library()]))
        found[name] = {kernel.spec for kernel in request.kernels}
    assert "--causal" in (tmp_path / "causal.yaml").read_text()
    ops, groups_of = ({s for s in found["causal"] if isinstance(s, GraphSpec) == wanted} for wanted in (False, True))
    assert ops == {s for s in found["plain"] if not isinstance(s, GraphSpec)}
    attention = [dict(n.params) for s in groups_of for n in s.nodes if n.op == "flash_attn_ext"]
    assert attention and all(params["causal"] is True for params in attention)

    one = graph(exporter, file)
    for specs in (groups_of, groups_of | found["plain"]):
        chosen = Groups(s for s in specs if isinstance(s, GraphSpec)).find(one).groups
        assert any(n.op == "flash_attn_ext" for group in chosen for n in group.nodes)
        assert set(chosen) <= groups_of


def test_a_layer_is_a_segment_and_all_but_the_last_are_one_kernel(qwen3: Graph) -> None:
    segments = layers(qwen3)
    specs = [segment_spec(qwen3, segment) for segment in segments]
    assert len(segments) == 1 + 5 + 1 and len(set(specs)) == 4
    assert len(set(specs[1:5])) == 1
    assert [qwen3.names[segment.end - 1] for segment in segments[:3]] == ["embd", "l_out-0", "l_out-1"]
    # Each layer passes on only the hidden state.
    assert [crossing(qwen3)[segment.end] for segment in segments] == [1] * 6 + [0]
    assert [len(spec.escaping) for spec in specs] == [
        *[1] * 6,
        2,
    ]  # the head's other output is the embeddings
    assert [len(spec.written) for spec in specs] == [0, *[2] * 5, 0]
    embedding, step = whole(qwen3)  # llama.cpp computes the embedding on the CPU
    assert len(embedding) == 1
    assert len(segment_spec(qwen3, step).nodes) == len(qwen3.nodes) - 1


@pytest.mark.parametrize(("at_once", "lengths"), [(2, [2, 2, 1]), (3, [3, 1, 1]), (9, [4, 1])])
def test_several_layers_are_a_segment_and_the_last_has_what_is_left(
    qwen3: Graph, at_once: int, lengths: list[int]
) -> None:
    """The last layer stays a kernel of its own: it has other ops, because it computes only the rows of the outputs."""
    single = layers(qwen3)
    ends = {segment.end: number for number, segment in enumerate(single)}  # 0 is the embedding, 1 to 5 are layers
    segments = layers(qwen3, at_once=at_once)
    assert (segments[0], segments[-1]) == (single[0], single[-1])
    numbers = [ends[segment.end] for segment in segments[:-1]]
    assert [b - a for a, b in itertools.pairwise(numbers)] == lengths
    spec = segment_spec(qwen3, segments[1])
    assert len(spec.written) == 2 * lengths[0] and len(spec.escaping) == 1
    found = Groups([segment_spec(qwen3, segment) for segment in segments[1:]]).find(qwen3)
    assert len(found.groups) == len(segments) - 1


def test_a_step_of_too_many_instructions_is_cut_between_layers(qwen3: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    step = groups.cut_of("step")
    assert step is not None and step(qwen3) == whole(qwen3)
    counts = [instructions(segment_spec(qwen3, segment)) for segment in layers(qwen3)]
    assert counts[0] == 0 < counts[1] == counts[4]
    monkeypatch.setattr(groups, "MAX_INSTRUCTIONS", 2 * counts[1])
    edges = [segment.start for segment in layers(qwen3)]
    found = step(qwen3)
    assert [segment.start for segment in found[:4]] == [0, edges[1], edges[3], edges[5]]
    assert found[-1].end == len(qwen3.nodes)
    monkeypatch.setattr(groups, "MAX_INSTRUCTIONS", 1)
    assert step(qwen3) == layers(qwen3)


def test_names_and_numbers_of_layers_do_not_count(qwen3: Graph, exporter: Exporter, tmp_path: Path) -> None:
    renamed = replace(
        qwen3,
        names=tuple(f"node {i}" for i in range(len(qwen3.nodes))),
        roots={number: replace(root, name=f"tensor {number}") for number, root in qwen3.roots.items()},
    )
    own = {segment_spec(qwen3, segment) for segment in layers(qwen3)}
    assert {segment_spec(renamed, segment) for segment in layers(renamed)} == own
    fewer = graph(exporter, headers.write(headers.qwen3(n_layer=3), tmp_path / "fewer.gguf"))
    assert {segment_spec(fewer, segment) for segment in layers(fewer)} == own


def test_a_result_that_is_read_after_the_call_escapes(qwen3: Graph) -> None:
    segment = layers(qwen3)[2]
    middle = qwen3.wires[segment.start + 3].output.root
    roots = dict(qwen3.roots) | {middle: replace(qwen3.roots[middle], output=True)}
    spec = segment_spec(replace(qwen3, roots=roots), segment)
    assert spec.escaping == (3, len(segment) - 1)
    assert spec != segment_spec(qwen3, segment)


def test_a_weight_of_several_layers_is_a_slot_for_each(qwen3: Graph) -> None:
    """The kernel computes graphs that have the weight once, and graphs that have it once per layer."""
    segment = whole(qwen3)[1]
    (one, other) = (n for n, root in qwen3.roots.items() if re.fullmatch("blk.[01].attn_norm.weight", root.name))
    assert qwen3.roots[one].weight and not any(root.weight for root in qwen3.roots.values() if root.node is not None)
    wires = []
    for wire in qwen3.wires:
        inputs = (at if at is None or at.root != other else replace(at, root=one) for at in wire.inputs)
        wires.append(replace(wire, inputs=tuple(inputs)))
    tied = replace(qwen3, wires=tuple(wires))
    apart = segment_spec(tied, segment, apart=True)
    assert apart == segment_spec(qwen3, segment)
    assert len(segment_spec(tied, segment).slots) == len(apart.slots) - 1
    for graph, kernel in [(qwen3, apart), (tied, apart), (tied, segment_spec(tied, segment))]:
        assert Groups([kernel]).find(graph).groups == (kernel,)
    # two tensors are not one slot
    assert {why for _, why in Groups([segment_spec(tied, segment)]).find(qwen3).outside} == {
        UngroupedReason.OP,
        UngroupedReason.WIRING,
    }


def test_layers_compute_what_their_nodes_compute(qwen3: Graph) -> None:
    for segment in layers(qwen3)[4:6]:  # one of the equal layers, and the last
        spec = segment_spec(qwen3, segment)
        one_kernel.check(spec, 1, most(spec))


def test_the_manifest_of_a_model_has_its_layers_as_formulas(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(n_layer=5), tmp_path / "tiny.gguf")
    output = tmp_path / "tiny.yaml"
    options = (
        "--n-ctx",
        512,
        "--n-tokens",
        "1,5",
        "--n-outputs",
        1,
        "--n-kv",
        256,
        "--flash-attn",
        "on",
        "--fuse",
        "layer",
    )
    assert run_model(exporter, file, output, *options) == 0
    (request,) = manifest.load([output], Catalog([builtin_library()]))
    held = {kernel.spec for kernel in request.kernels}
    for n_tokens in (1, 5):
        one = graph(exporter, file, n_tokens)
        specs = [segment_spec(one, segment) for segment in layers(one)]
        assert {spec for spec in specs if len(spec.nodes) > 1} <= held  # the embedding is an op's kernel
        assert {node.kernel for spec in specs for node in spec.nodes} <= held
    settings = {config.model_type for config in request.special_for("trn1").values()}
    of_groups = {kernel.id for kernel in request.kernels if isinstance(kernel.spec, GraphSpec)}
    assert settings == {"transformer"} and request.special_for("trn1").keys() == of_groups
    text = output.read_text()
    assert len(re.findall("^  - name: ", text, re.MULTILINE)) == 3
    assert "blk." not in text.partition("\nkernels:")[0].partition("\ngraphs:")[2]


def test_the_manifest_of_a_model_has_several_layers_in_a_kernel(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(n_layer=5), tmp_path / "tiny.gguf")
    output = tmp_path / "tiny.yaml"
    options = ("--n-ctx", 512, "--n-tokens", 1, "--n-outputs", 1, "--n-kv", 256, "--flash-attn", "on")
    assert run_model(exporter, file, output, *options, "--fuse", "layers:2") == 0
    (request,) = manifest.load([output], Catalog([builtin_library()]))
    made = {kernel.spec for kernel in request.kernels if isinstance(kernel.spec, GraphSpec)}
    one = graph(exporter, file, 1)
    assert made == {spec for s in layers(one, at_once=2) if len((spec := segment_spec(one, s)).nodes) > 1}
    assert "--fuse layers:2" in output.read_text()
