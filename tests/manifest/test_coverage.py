"""`kernelgen coverage`: what a manifest does for a graph that llama.cpp exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernelgen import cli
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.ggml.ops import ENUM
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.kernel import KernelSpec
from kernelgen.manifest import coverage, graph_ops

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
    assert "117 kernels beyond: 29 flash_attn_ext, 1 get_rows, 58 mul_mat, 29 soft_max\n" in out


def test_a_miss_is_named_with_the_nearest_kernel_and_exits_1(
    capsys: pytest.CaptureFixture[str], library: Library
) -> None:
    status, out, _ = run(capsys, library, BASIC, "--graph-ops", FLASH)
    assert status == 1
    assert f"{FLASH}: 0 of 30 ops covered, 30 missing\n" in out
    assert f"missing  {FLASH}:28: node_21: flash_attn_ext: " in out
    assert "there is no kernel for flash_attn_ext" in out
    assert "nearest is mul_mat-" in out


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str], library: Library) -> None:
    status, out, _ = run(capsys, library, LLAMA3, "--graph-ops", FLASH, "--format", "json")
    value = json.loads(out)
    assert status == 0
    (graph,) = value["graphs"]
    assert [op["line"] for op in graph["covered"]] == list(range(1, 31))
    assert graph["missing"] == []
    assert len(value["beyond"]) == 157 - 30


def test_verbose_lists_what_is_beyond(capsys: pytest.CaptureFixture[str], library: Library) -> None:
    _, out, _ = run(capsys, library, LLAMA3, "--graph-ops", FLASH, "-v")
    assert out.count("\nbeyond   ") == 157 - 30


def test_ops_that_no_library_computes_are_missing_not_errors(
    capsys: pytest.CaptureFixture[str], library: Library, tmp_path: Path
) -> None:
    file = tmp_path / "graph.txt"  # ARGSORT of (8,1,1,1)/f32
    file.write_text(
        f"{ENUM.index('argsort')} 26 8 1 1 1 16 1" + " 0" * 15 + " 1 0 8 1 1 1 4 32 32 32 top k (sorted)\n",
        encoding="utf-8",
    )
    status, out, err = run(capsys, library, BASIC, "--graph-ops", file)
    assert (status, err) == (1, "")
    assert "top k (sorted): argsort: (8,1,1,1)/f32 -> (8,1,1,1)/i32" in out


def test_strides_of_single_elements_do_not_count() -> None:
    a = TensorDesc.make((128, 1, 8, 1), "f16", (2, 2048, 256, 8388608))
    b = TensorDesc.make((128, 1, 8, 1), "f16", (2, 256, 256, 2048))
    out = TensorDesc.make((128, 1, 8, 1), "f16")
    kernels = [KernelSpec.make("cont", [a], out)]
    result = coverage.compare(kernels, [(KernelSpec.make("cont", [b], out), 1, "x")])
    assert (len(result.covered), len(result.missing), len(result.beyond)) == (1, 0, 0)


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


def test_a_line_cut_anywhere_is_an_error_or_an_op(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    for end in range(len(GOOD)):
        file.write_bytes(GOOD[:end].encode())
        try:
            graph_ops.read(file)
        except KernelgenError as error:
            assert error.diagnostics[0].location


def test_an_export_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelgenError, match="can't read"):
        graph_ops.read(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_bytes(b"\n")
    with pytest.raises(KernelgenError, match="no op in the graph export"):
        graph_ops.read(tmp_path / "empty.txt")
