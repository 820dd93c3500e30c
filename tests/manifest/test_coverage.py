"""`kernelgen coverage`: kernels of manifests and bundles compared with graphs that llama.cpp exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelgen import cli, manifest
from kernelgen.dispatch import coverage, report
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.ggml.ops import f32_bits
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.model import graph_ops
from kernelgen.spec.kernel import KernelSpec

from .conftest import make_library

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "graph-ops"
FLASH = DATA / "llama3-8b-f16.flash-attn.txt"
PLAIN = DATA / "llama3-8b-f16.no-flash-attn.txt"
LLAMA3 = ROOT / "manifests" / "llama3.yaml"
BASIC = ROOT / "manifests" / "basic.yaml"


def run(capsys: pytest.CaptureFixture[str], library: Library, *args: object) -> tuple[int, str, str]:
    status = cli.run(["coverage", *map(str, args), "--kernels", str(library.root)])
    out, err = capsys.readouterr()
    return status, out, err


def test_llama3_covers_both_exports(capsys: pytest.CaptureFixture[str], library: Library) -> None:
    status, out, _ = run(capsys, library, LLAMA3, "--graph-ops", FLASH, "--graph-ops", PLAIN)
    assert status == 0
    assert f"{FLASH}: 30 of 30 ops covered, 0 missing\n" in out
    assert f"{PLAIN}: 38 of 38 ops covered, 0 missing\n" in out
    assert "146 kernels beyond: 29 flash_attn_ext, 1 get_rows, 58 mul_mat, 29 set_rows, 29 soft_max\n" in out


def test_a_miss_is_named_with_the_nearest_kernel_and_exits_1(
    capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    status, out, _ = run(capsys, library, BASIC, "--graph-ops", FLASH)
    assert status == 1
    assert f"{FLASH}: 0 of 30 ops covered, 30 missing\n" in out
    assert f"missing  {FLASH}:28: node_21: flash_attn_ext: " in out
    assert "there is no kernel for flash_attn_ext" in out
    assert "nearest is mul_mat-" in out


GOOD = FLASH.read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.parametrize(
    ("line", "column", "message"),
    [
        ("2 0 4096 1", 11, "the line ends where ne2 of the result is expected"),
        (GOOD.replace("2 0 4096", "x 0 4096", 1), 1, "expected an op number, not 'x'"),
        (GOOD.replace("2 0 4096", "999 0 4096", 1), 1, "unknown ggml op number 999 with op_params[0] = 0"),
        (GOOD.replace("2 0 4096", "2 77 4096", 1), 1, "unknown ggml type number 77"),
        (GOOD.replace("2 0 4096", "2 0 0", 1), 5, "expected ne0 of the result, not '0'"),
        (GOOD.replace(" 16 0", " 15 0", 1), 16, "expected the count of parameters (16), not '15'"),
        (GOOD.replace(" 0 2 0 4096", " 0 99 0 4096", 1), 51, "expected the count of inputs (at most 10), not '99'"),
        ("2 0 " + "9" * 5000, 5, "expected ne0 of the result, not '" + "9" * 39 + "…'"),
        ("\x00\x01", 1, "expected an op number, not '\\x00\\x01'"),
    ],
)
def test_a_broken_line_is_named(line: str, column: int, message: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(f"{GOOD}\n{line}\n", encoding="utf-8")
    with pytest.raises(KernelgenError) as caught:
        graph_ops.read(file)
    (diagnostic,) = caught.value.diagnostics
    assert (diagnostic.message, str(diagnostic.location)) == (message, f"{file}:2:{column}")


def test_an_export_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelgenError, match="can't read"):
        graph_ops.read(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_bytes(b"\n")
    with pytest.raises(KernelgenError, match="no op in the graph export"):
        graph_ops.read(tmp_path / "empty.txt")


# --- graphs of several sizes
# ----------------------------------------------------------------------------------------------------------

HEAD = {
    "format": "neuron-kernelgen graphs",
    "version": 1,
    "model": {
        "architecture": "tiny",
        "name": "",
        "parameters": 1,
        "bytes": 1,
        "layers": 1,
        "encoder": False,
        "decoder": True,
        "recurrent": False,
    },
}
SMALL = """\
format: 1
name: small
targets: [trn1, trn2]
kernels:
  - {op: silu, inputs: ["(${n},4,1,1)/f32"], output: "(${n},4,1,1)/f32", batch: {n: [1, 2]}}
  - {op: relu, inputs: ["(1,4,1,1)/f32"], output: "(1,4,1,1)/f32"}
"""


def graph(ops: list[str], n_tokens: int, n_kv: int, flash_attn: bool = True) -> dict[str, object]:
    """A graph of unary ops, one after another, on rows of `n_tokens` elements, which kernels for other numbers of
    tokens don't compute.
    """
    t = {"type": "f32", "ne": [n_tokens, 4, 1, 1], "nb": [4, 4 * n_tokens, 16 * n_tokens, 16 * n_tokens]}
    tensors = [{"name": "x", "op": "none", **t}]
    tensors += [{"name": f"y|{i}", "op": op, "src": [i], **t} for i, op in enumerate(ops)]
    sizes = {"n_tokens": n_tokens, "n_outputs": 1, "n_seqs": 1, "n_kv": n_kv}
    return {"sizes": sizes, "context": {"n_ctx": 512, "flash_attn": flash_attn}, "tensors": tensors}


def exported(folder: Path, *graphs: dict[str, object]) -> Path:
    file = folder / "graphs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in (HEAD, *graphs)), encoding="utf-8")
    return file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL, encoding="utf-8")
    return file


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    layer = ["silu", "silu", "relu"]
    return exported(
        tmp_path, *(graph(layer, n, n_kv) for n in (1, 2) for n_kv in (256, 512)), graph(layer[:2], 3, 512, False)
    )


def test_nodes_are_counted_in_each_graph(
    small: Path, graphs: Path, capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    status, out, _ = run(capsys, library, small, "--graph-ops", graphs)
    assert status == 1
    assert [line.removeprefix(f"{graphs}") for line in out.splitlines() if not line.startswith("covered")] == [
        f"missing  {graphs}:4: y|2: relu: (2,4,1,1)/f32 -> (2,4,1,1)/f32 (2 nodes)",
        f"             nearest is {relu(1)}: input 0 is (1,4,1,1)/f32, not (2,4,1,1)/f32; output is (1,4,1,1)/f32, not (2,4,1,1)/f32",
        f"missing  {graphs}:6: y|0: silu: (3,4,1,1)/f32 -> (3,4,1,1)/f32 (2 nodes)",
        f"             nearest is {unary('silu', 1)}: input 0 is (1,4,1,1)/f32, not (3,4,1,1)/f32; output is (1,4,1,1)/f32, not (3,4,1,1)/f32",
        ": n_tokens 1, n_outputs 1, n_ctx 512, flash_attn on, n_kv 256 to 512: 2 graphs of 3 nodes, none without a kernel",
        ": n_tokens 2, n_outputs 1, n_ctx 512, flash_attn on, n_kv 256 to 512: 2 graphs of 3 nodes, 1 without a kernel",
        ": n_tokens 3, n_outputs 1, n_ctx 512, flash_attn off, n_kv 512: 1 graph of 2 nodes, 2 without a kernel",
        ": 3 of 5 ops covered, 2 missing",
        "0 kernels beyond",
    ]


def unary(op: str, n: int) -> str:
    t = TensorDesc.make((n, 4, 1, 1), "f32")
    return KernelSpec.make(op, [t], t).id


def relu(n: int) -> str:
    return unary("relu", n)


def test_kernels_for_other_numbers_of_tokens_cover_what_they_compute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    listed = tmp_path / "rows.yaml"
    entry = '  - {op: silu, inputs: ["(4,${n},1,1)/f32"], output: "(4,${n},1,1)/f32", batch: {n: [2, 16, 64]}}'
    listed.write_text(f"format: 1\nname: rows\ntargets: [trn1]\nkernels:\n{entry}\n", encoding="utf-8")
    graphs = []
    for n in (2, 5, 70):
        t = {"type": "f32", "ne": [4, n, 1, 1], "nb": [4, 16, 16 * n, 16 * n]}
        tensors = [{"name": "x", "op": "none", **t}, {"name": "y", "op": "silu", "src": [0], **t}]
        graphs.append({"sizes": {"n_tokens": n}, "context": {}, "tensors": tensors})
    file = exported(tmp_path, *graphs)
    status, out, _ = run(capsys, library, listed, "--graph-ops", file)
    assert status == 0
    covered = [line.partition(" -> ")[2] for line in out.splitlines() if line.startswith("covered")]
    assert covered == [
        "(4,2,1,1)/f32",
        "(4,5,1,1)/f32, by kernels for 16 tokens",
        "(4,70,1,1)/f32, by kernels for 64 + 16 tokens",
    ]
    assert f"{file}: n_tokens 70: 1 graph of 1 node, none without a kernel, 2 launches, 10 rows of padding" in out
    assert f"{file}: n_tokens 2: 1 graph of 1 node, none without a kernel\n" in out


def test_kernels_for_any_numbers_cover_those_of_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    listed = tmp_path / "scales.yaml"
    entry = '  - {op: scale, inputs: ["(4,16,1,1)/f32"], output: "(4,16,1,1)/f32", params: {s: '
    text = f"format: 1\nname: scales\ntargets: [trn1]\nkernels:\n{entry}2.0}}}}\n"
    graphs = []
    for n, s in ((16, 2.0), (16, 0.5), (5, 0.5)):
        t = {"type": "f32", "ne": [4, n, 1, 1], "nb": [4, 16, 16 * n, 16 * n]}
        node = {"name": "y", "op": "scale", "src": [0], "params": [f32_bits(s)], **t}
        graphs.append({"sizes": {"n_tokens": n}, "context": {}, "tensors": [{"name": "x", "op": "none", **t}, node]})
    file = exported(tmp_path, *graphs)
    for more, missing in (("", 2), (f"{entry}any, b: any}}}}\n", 0)):
        listed.write_text(text + more, encoding="utf-8")
        status, out, _ = run(capsys, library, listed, "--graph-ops", file)
        assert status == (missing > 0)
        assert f"{3 - missing} of 3 ops covered, {missing} missing" in out
        assert "beyond" not in out.replace("0 kernels beyond", "")  # the kernel with the node's own number is used


def test_ops_without_an_emitter_are_distinguished_from_ops_that_were_not_requested(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = make_library(tmp_path / "few", ["silu", "relu", "gelu"])
    # Without kernelgen's own emitters, which compute all of these.
    catalog = Catalog([few])
    file = exported(tmp_path, graph(["gelu", "tanh"], 1, 256))
    listed = frozenset(kernel.spec for request in manifest.load([small], catalog) for kernel in request.kernels)
    export = graph_ops.read_export(file)
    missing = coverage.compare(listed, export.ops).missing
    why = report.ReasonFinder(
        catalog, listed, report.Refusals(catalog, report.AvailableKernels(listed, frozenset(), None))
    )
    assert [(r.kind, r.text) for r in why.of(missing).values()] == [
        ("none of this op", "there is no kernel for gelu"),
        ("no emitter", "tanh: no emitter for this op"),
    ]


SORTS = """
import jax.numpy as jnp

from kernelgen.emitters import emitter


@emitter("silu")
def silu(x):
    return jnp.sort(x)
"""


def test_what_neuronx_cc_refuses_for_the_target_is_not_covered(
    small: Path, graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sorts.py").write_text(SORTS, encoding="utf-8")
    arguments = ["coverage", str(small), "--graph-ops", str(graphs), "--kernels", str(mine), "--format", "json"]
    assert cli.run(arguments) == 1
    (whole,) = json.loads(capsys.readouterr().out)["graphs"]
    assert cli.run([*arguments, "--target", "trn2"]) == 1
    (for_trn2,) = json.loads(capsys.readouterr().out)["graphs"]
    assert len(whole["missing"]) == 2
    refused = [m for m in for_trn2["missing"] if m["kind"] == "refused"]
    assert {m["id"] for m in refused} == {unary("silu", n) for n in (1, 2, 3)}
    assert all(
        m["why"].startswith("silu: refused for trn2: [") and "sort is not supported" in m["why"] for m in refused
    )


# --- bundles ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles of SMALL for its two targets, as packs and trees."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "small.yaml").write_text(SMALL, encoding="utf-8")
    out = folder / "out"
    command = ["build", str(folder / "small.yaml"), "-o", str(out), "--compiler", "simulator", "--cache", "off"]
    assert cli.run(command) == 0
    return out


def test_a_bundle_is_compared_in_each_of_its_forms(
    built: Path, graphs: Path, capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    outputs = set()
    for listed in (
        [built / "small_trn1.kernels.gguf"],
        [built / "small_trn1"],
        [built / "small_trn1" / "index.json"],
        [built, "--target", "trn1"],
        [built, "--target", "trn2"],
    ):
        status, out, err = run(capsys, library, *listed, "--graph-ops", graphs, "--format", "markdown")
        assert (status, err) == (1, "")
        outputs.add("\n".join(out.splitlines()[:5]))
    assert len(outputs) == 1
    assert f"| {graphs} | 2 | 1 | 1 | 512 | on | 256 to 512 | 2 | 3 | 2 | 1 |" in outputs.pop()


def test_bundles_that_cannot_be_compared(
    built: Path, graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    (tmp_path / "empty").mkdir()
    whole = (built / "small_trn1.kernels.gguf").read_bytes()
    (tmp_path / "cut.kernels.gguf").write_bytes(whole[:300])
    for listed, message in (
        ([built], "the bundles are for trn1, trn2: choose one with --target"),
        ([built, "--target", "inf2"], "--target inf2: the bundles are for trn1, trn2"),
        ([tmp_path / "empty"], "a folder without a bundle: no *.kernels.gguf, and no folder with index.json"),
        ([tmp_path / "cut.kernels.gguf"], "damaged kernel pack"),
        ([tmp_path / "none.kernels.gguf"], "No such file or directory"),
        ([graphs], "error: "),
    ):
        status, out, err = run(capsys, library, *listed, "--graph-ops", graphs)
        assert (status, out) == (2, ""), listed
        assert message in err


def test_what_is_compared_with_is_named(capsys: pytest.CaptureFixture[str], library: Library) -> None:
    for arguments, message in (
        ([], "give --graph-ops or --model"),
        (["--graph-ops", FLASH, "--n-tokens", "1"], "--n-tokens is for --model; an export names its own sizes"),
        (["--graph-ops", FLASH, "--exporter", "x"], "--exporter is for --model"),
    ):
        status, out, err = run(capsys, library, LLAMA3, *arguments)
        assert (status, out) == (2, "")
        assert message in err


# --- groups --------------------------------------------------------------------------------------------------------------------

GROUPED = """\
format: 1
name: grouped
targets: [trn1]
graphs:
  - inputs: {x: "(2,4,1,1)/f32"}
    nodes:
      - {name: a, op: relu, inputs: [x], output: "(2,4,1,1)/f32"}
      - {name: b, op: silu, inputs: [a], output: "(2,4,1,1)/f32"}
      - {name: c, op: add, inputs: [b, x], output: "(2,4,1,1)/f32"}
    outputs: [c]
    fallback: false
"""


def layers(*layers: str, output: tuple[int, ...] = (), read: int | None = None) -> dict[str, object]:
    """Returns a graph of rows of ops, each on the result of the one before; an `add` also reads the row's input.

    Args:
        *layers: ops of each row.
        output: numbers of nodes that are read after the call.
        read: a node that an `add` reads instead of the row's input.
    """
    shape = {"type": "f32", "ne": [2, 4, 1, 1], "nb": [4, 8, 32, 32]}
    tensors: list[dict[str, object]] = [{"name": "x", "op": "none", **shape}]
    for row in layers:
        first = len(tensors) - 1
        for op in row.split():
            sources = [len(tensors) - 1] if op != "add" else [len(tensors) - 1, first if read is None else read]
            role = {"role": "output"} if len(tensors) in output else {}
            tensors.append({"name": f"{op}-{len(tensors)}", "op": op, "src": sources, **shape, **role})
    return {"sizes": {}, "context": {}, "tensors": tensors}


def test_nodes_in_groups_are_counted_and_the_others_have_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    listed = tmp_path / "grouped.yaml"
    listed.write_text(GROUPED, encoding="utf-8")
    row = "relu silu add"
    for graph, status, launches, nodes, outside in (
        (layers(row, row), 0, 2, 6, {}),
        (
            layers(row, "relu sqr add"),
            1,
            1,
            3,
            {"no group has such a node": 1, "their groups have other nodes beside them": 2},
        ),
        (layers(row, "relu silu"), 1, 1, 3, {"their part of the graph ends before the group does": 2}),
        (layers(row, output=(2,)), 1, 0, 0, {"another result of their group is used outside of it": 3}),
        (layers(row, read=1), 1, 0, 0, {"their group is wired in another way": 3}),
    ):
        export = exported(tmp_path, graph)
        code, out, _ = run(capsys, library, listed, "--graph-ops", export, "--format", "json")
        (step,) = json.loads(out)["graphs"][0]["steps"]
        found = {one["why"]: sum(one["nodes"].values()) for one in step["groups"]["outside"]}
        assert (code, step["groups"]["launches"], step["groups"]["nodes"], found) == (status, launches, nodes, outside)
        assert (step["launches"], step["covered"]) == (launches, nodes)  # the others have no kernel
    code, out, _ = run(capsys, library, listed, "--graph-ops", export)
    assert f"{export}: 1 graph of 3 nodes, 3 without a kernel, 0 nodes in 0 groups\n" in out
    assert "             in no group: 1 add, 1 relu, 1 silu: their group is wired in another way\n" in out
    code, out, _ = run(
        capsys, library, listed, "--graph-ops", exported(tmp_path, layers(row, row)), "--format", "markdown"
    )
    assert code == 0 and "| nodes in groups | groups |" in out and out.count("| 6 | 6 | 0 | 2 | 0 | 6 | 2 |") == 1
