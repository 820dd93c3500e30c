"""Messages about ops without a kernel when a graph is computed, without GGML_NEURON_LOG."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from programs import Run, build, edit_pack

SAID = re.compile(
    r"^ggml-neuron: no kernel for (?P<op>\w+) of (?P<inputs>.*): the CPU computes it, (?P<count>\d+) nodes? of this graph\n"
    r"ggml-neuron:     (?:kernels for other numbers of tokens can't: .*|(?P<none>no bundle has a kernel of this op)|"
    r"kernels of this op are for other shapes, types or parameters)\n",
    re.MULTILINE,
)


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_ops_without_a_kernel_are_reported_with_what_mends_them(
    run: Run, kernels: Path, tmp_path: Path, buffers: str
) -> None:
    """The messages name ops that the scheduler gave to the CPU, and an op in device memory that the CPU computes."""
    result = run("shared-out", "shared-out", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers)
    first, second = SAID.finditer(result.log)
    said = first["op"], first["inputs"], first["count"], first["none"]
    assert said == ("sigmoid", "(64,4,1,1)/f32", "2", "no bundle has a kernel of this op")
    assert (second["op"], second["inputs"], second["count"], second["none"]) == ("scale", "(64,4,1,1)/f32", "1", None)
    assert (
        result.log.count(
            "run the program again with GGML_NEURON_RECORD=FILE\nggml-neuron:     then: kernelgen model FILE"
        )
        == 1
    )
    recording = tmp_path / "mended.graphs"
    again = run("shared-out", GGML_NEURON_RECORD=recording, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers)
    assert not SAID.search(again.log)
    build(recording, tmp_path / "mended")
    both = f"{kernels}:{tmp_path / 'mended'}"
    result = run("shared-out", GGML_NEURON_KERNEL_DIR=both, GGML_NEURON_BUFFERS=buffers)
    assert result.said == {"shared-out": "6 of 6 nodes in 1 splits"}
    assert "ggml-neuron: " not in result.log


def test_ops_are_reported_by_their_numbers_of_nodes(run: Run, kernels: Path) -> None:
    """The order does not depend on where the graph's tensors are, though ggml keeps a set of them in the order of their
    addresses.
    """
    result = run("last-node-first", GGML_NEURON_KERNEL_DIR=kernels)
    assert result.said == {"last-node-first": "ok"}
    assert [(said["op"], said["count"]) for said in SAID.finditer(result.log)] == [("sigmoid", "2"), ("scale", "1")]


def test_ten_ops_are_reported_and_then_how_many_more(run: Run, kernels: Path, tmp_path: Path) -> None:
    """A process prints them once, however many graphs lack these ops."""

    def keep_add(index: dict[str, Any]) -> None:
        index["kernels"] = [kernel for kernel in index["kernels"] if kernel["spec"]["op"] == "add"]

    pack = edit_pack(kernels, tmp_path / "few.kernels.gguf", keep_add)
    result = run("far-off", "shared-out", "far-off", GGML_NEURON_KERNEL_DIR=pack)
    assert len(SAID.findall(result.log)) == 10
    (more,) = re.findall(
        r"^ggml-neuron: (\d+) other ops? of this graph, and ops of later graphs", result.log, re.MULTILINE
    )
    every = run("far-off", "shared-out", GGML_NEURON_KERNEL_DIR=pack, GGML_NEURON_LOG="2")
    assert len(set(SAID.findall(every.log))) == 10 + int(more) and "ops of later graphs" not in every.log


def test_nothing_is_reported_for_ops_that_are_queried_and_not_computed(run: Run, kernels: Path) -> None:
    """test-backend-ops calls supports_op with thousands of such ops."""
    result = run("threads", "add", GGML_NEURON_KERNEL_DIR=kernels)
    assert result.said == {"threads": "ok", "add": "ok"}
    assert "ggml-neuron: " not in result.log


SAMPLERS = """
  - {op: pad, inputs: ["(500,1,1,1)/f32"], output: "(500,2,1,1)/f32", params: {rp1: 1}}
  - {op: argmax, inputs: ["(500,1,1,1)/f32"], output: "(1,1,1,1)/i32"}
  - {op: top_k, inputs: ["(500,1,1,1)/f32"], output: "(5,1,1,1)/i32"}
  - {op: get_rows, inputs: ["(1,5,1,1)/i32", "(5,1,1,1)/i32"], output: "(1,5,1,1)/i32"}
  - {op: get_rows, inputs: ["(1,500,1,1)/i32", "(5,1,1,1)/i32"], output: "(1,5,1,1)/i32"}
  - {op: clamp, inputs: ["(1,1,1,1)/f32"], output: "(1,1,1,1)/f32", params: {min: 1.0, max: 5.0}}
  - {op: scale, inputs: ["(5,1,1,1)/f32"], output: "(5,1,1,1)/f32", params: {s: 2.0}}
"""


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_what_llama_cpp_asks_before_it_samples_is_answered_by_the_kernels_for_the_vocabulary(
    run: Run, neuron_target: str, tmp_path: Path, buffers: str
) -> None:
    """llama.cpp asks with another number of candidates, for which no kernels are built."""
    manifest = tmp_path / "samplers.yaml"
    manifest.write_text(f"format: 1\nname: samplers\ntargets: [{neuron_target}]\nkernels:{SAMPLERS}")
    build(manifest, tmp_path / "kernels")
    result = run("sampler-probe", GGML_NEURON_KERNEL_DIR=tmp_path / "kernels", GGML_NEURON_BUFFERS=buffers)
    assert result.said == {"sampler-probe": "ok"}, result.log
    # a bundle without a number of candidates refuses
    (argmax,) = [line for line in manifest.read_text().splitlines() if "argmax" in line]
    manifest.write_text(f"format: 1\nname: samplers\ntargets: [{neuron_target}]\nkernels:\n{argmax}\n")
    build(manifest, tmp_path / "fewer")
    result = run("sampler-probe", GGML_NEURON_KERNEL_DIR=tmp_path / "fewer", GGML_NEURON_BUFFERS=buffers)
    assert result.said == {"sampler-probe": "argmax is refused"}, result.log
