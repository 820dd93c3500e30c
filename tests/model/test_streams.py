"""Attention of several sequences with a cache each becomes a node per sequence, and each cache a slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import group_kernels as one_kernel
import headers
import pytest

from kernelgen.model.exporter import Exporter
from kernelgen.model.first_cells import with_first_cells
from kernelgen.model.graphs import Graph
from kernelgen.model.groups import segment_spec
from kernelgen.model.repeats import whole
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.model.streams import with_streams

SETTINGS = Settings((1024, 2048, 4096), 64, 4, (3,), None, None, "f16", "f16", (True,), False, False)


def graph(exporter: Exporter, file: Path, n_seqs: int = 3, n_ctx: int = 1024, n_tokens: int = 6) -> Graph:
    ((_, _, found),) = exporter.graphs(file, SETTINGS, [DecodeCall(n_ctx, n_seqs, n_tokens, n_tokens, 256)])
    return found


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return headers.write(headers.qwen3(), tmp_path_factory.mktemp("qwen3") / "tiny.gguf")


def test_each_sequence_has_nodes_and_slots_of_its_own(exporter: Exporter, qwen3: Path) -> None:
    before = graph(exporter, qwen3)
    split = with_streams(before)
    ops, ops_before = (Counter(node.op for node in g.nodes) for g in (split, before))
    layers = ops_before["flash_attn_ext"]
    assert layers > 0 and ops - ops_before == {
        "set_rows": 4 * layers,
        "flash_attn_ext": 2 * layers,
        "concat": 2 * layers,
    }
    for node, wires in zip(split.nodes, split.wires, strict=True):
        if node.op == "flash_attn_ext":
            assert all(t.ne[3] == 1 for t in node.inputs if t)
            q, *own = (wire and split.roots[wire.root] for wire in wires.inputs)
            assert q and q.node is not None and all(root and root.node is None for root in own)
    assert all(split.roots[wires.output.root].node in (i, None) for i, wires in enumerate(split.wires))


def test_the_length_of_the_caches_is_in_no_kernel(exporter: Exporter, qwen3: Path) -> None:
    groups = []
    for n_ctx in (2048, 4096):
        one = with_first_cells(with_streams(graph(exporter, qwen3, n_ctx=n_ctx)))
        groups.append(segment_spec(one, whole(one)[0]))
    assert groups[0] == groups[1]


def test_they_compute_what_their_nodes_compute(exporter: Exporter, qwen3: Path) -> None:
    one = with_first_cells(with_streams(graph(exporter, qwen3, n_ctx=2048, n_seqs=2, n_tokens=2)))
    one_kernel.check(segment_spec(one, whole(one)[0]), most=dict.fromkeys(range(100), 128))


def test_one_of_several_sequences_has_its_cache_alone(exporter: Exporter, qwen3: Path) -> None:
    """A kernel for one sequence computes each of them, wherever its cache is."""
    before = graph(exporter, qwen3, n_seqs=1)
    alone = with_streams(before)
    written = [[node.output.ne for node in g.nodes if node.op == "set_rows"] for g in (alone, before)]
    assert [node.op for node in alone.nodes] == [node.op for node in before.nodes]
    cells = [{ne[1] for ne in outputs} for outputs in written]
    assert cells == [{1024 // SETTINGS.n_seq_max}, {1024}]


def test_other_graphs_stay_as_they_are(exporter: Exporter, qwen3: Path) -> None:
    settings = replace(SETTINGS, n_seq_max=1)
    ((_, _, one),) = exporter.graphs(qwen3, settings, [DecodeCall(1024, 1, 6, 6, 256)])
    assert with_streams(one) is one
    several = graph(exporter, qwen3)
    changed = replace(several, roots={k: replace(root, node=0) for k, root in several.roots.items()})
    assert with_streams(changed) is changed  # the graph computes a mask
