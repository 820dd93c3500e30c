"""Messages about ops without a kernel when a graph is computed, without GGML_NEURON_LOG."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Run, build

from kernelgen.bundle import reader
from kernelgen.dispatch import coverage
from kernelgen.dispatch.coverage import GraphOp
from kernelgen.ggml import tokens

SAID = re.compile(
    r"^ggml-neuron: no kernel for (?P<op>\w+) of (?P<inputs>.*): the CPU computes it, (?P<count>\d+) nodes? of this graph\n"
    r"ggml-neuron:     (?:kernels for other numbers of tokens can't: (?P<whole>.*)|(?P<none>no bundle has a kernel of this op)|"
    r"kernels of this op are for other shapes, types or parameters; GGML_NEURON_LOG=2 names the nearest)\n"
    r"(?:ggml-neuron:     to build one, add this line to a manifest's kernels: (?P<line>- .*)\n)?"
    r"(?:ggml-neuron:     nearest is (?P<nearest>\S+): (?P<how>.*)\n)?",
    re.MULTILINE,
)


def mended(log: str, folder: Path, target: str) -> Path:
    """Builds the manifest lines of a log; returns the folder with the kernels."""
    lines = [match["line"] for match in SAID.finditer(log) if match["line"]]
    manifest = folder / "mended.yaml"
    manifest.write_text(
        f"format: 1\nname: mended\ntargets: [{target}]\nkernels:\n" + "".join(f"  {x}\n" for x in lines)
    )
    build(manifest, folder / "mended")
    return folder / "mended"


def detailed(run: Run, kernels: Path, *scenarios: str) -> str:
    return run(*scenarios, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="2").log


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_ops_without_a_kernel_are_reported_with_what_mends_them(
    run: Run, kernels: Path, neuron_target: str, tmp_path: Path, buffers: str
) -> None:
    """The messages name ops that the scheduler gave to the CPU, and an op in device memory that the CPU computes."""
    result = run("shared-out", "shared-out", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers)
    first, second = SAID.finditer(result.log)
    said = first["op"], first["inputs"], first["count"], first["none"]
    assert said == ("sigmoid", "(64,4,1,1)/f32", "2", "no bundle has a kernel of this op")
    assert (second["op"], second["inputs"], second["count"], second["none"]) == ("scale", "(64,4,1,1)/f32", "1", None)
    assert "nearest is" not in result.log
    (how,) = (m["how"] for m in SAID.finditer(detailed(run, kernels, "shared-out")) if m["op"] == "scale")
    assert how == "s is 0.5, not 0.375"
    both = f"{kernels}:{mended(result.log, tmp_path, neuron_target)}"
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


def test_the_nearest_kernel_is_what_coverage_says(run: Run, kernels: Path, neuron_target: str, tmp_path: Path) -> None:
    """The ops differ from the kernels in every property."""
    result = run("far-off", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="2")
    assert result.said == {"far-off": "ok"}, result.log
    built = reader.read(mended(result.log, tmp_path, neuron_target))
    asked = [GraphOp(spec, 0, "") for bundle in built for spec in bundle.ops()]
    have = {spec for bundle in reader.read(kernels) for spec in bundle.ops()}
    expected = sorted(
        (op.spec.op, near[0].id, "; ".join(near[1])) if (near := nearest.get(op.spec)) else (op.spec.op, "", "")
        for nearest in [coverage.nearest(asked, have)]
        for op in asked
    )
    said = sorted((m["op"], m["nearest"] or "", m["how"] or "") for m in SAID.finditer(result.log))
    assert said == expected
    assert len(said) == 9
    reasons = sorted((op.spec.op, tokens.why_not(op.spec.op, op.spec.inputs, op.spec.output) or "") for op in asked)
    assert sorted((m["op"], m["whole"] or "") for m in SAID.finditer(result.log)) == reasons
    assert ("mul_mat", "its tokens are not in its outermost dimension") in reasons


def test_ten_ops_are_reported_and_then_how_many_more(run: Run, kernels: Path) -> None:
    """A process prints them once, however many graphs lack these ops."""
    result = run("far-off", "shared-out", "far-off", GGML_NEURON_KERNEL_DIR=kernels)
    assert len(SAID.findall(result.log)) == 10
    (more,) = re.findall(
        r"^ggml-neuron: (.*) of this graph, and ops of later graphs: no kernel", result.log, re.MULTILINE
    )
    assert more == "1 other op"
    every = run("far-off", "shared-out", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="2")
    assert len(SAID.findall(every.log)) == 11 and "ops of later graphs" not in every.log


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
