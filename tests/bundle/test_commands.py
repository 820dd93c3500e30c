"""`kernelgen inspect`, `compile` and `bundle` as commands: their output and exit codes."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kernelgen.bundle import build as bundle
from kernelgen.bundle import pack
from kernelgen.cli import bundle as bundle_command
from kernelgen.cli import compile as compile_command
from kernelgen.cli import inspect as inspect_command
from kernelgen.errors import EXIT_USAGE, KernelgenError
from kernelgen.hlo import proto
from kernelgen.hlo.estimate import estimate
from kernelgen.neff import description
from kernelgen.plan import Bundle, Kernel, Neff, Plan

from .conftest import COMPILER, Kernels, make_hlo
from .test_bundle import REAL


def run(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def failure(command: Any, *arguments: object) -> str:
    error = run(command, *arguments).exception
    assert isinstance(error, KernelgenError) and error.exit_code == EXIT_USAGE
    return str(error)


@pytest.fixture
def out(kernels: Kernels, tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    bundle.build(*kernels.arguments, tree_path=folder / "tiny_trn1", pack_path=folder / "tiny_trn1.kernels.gguf")
    return folder


def described(path: Path, *options: str) -> dict[str, Any]:
    result = run(inspect_command.command, path, "--format", "json", *options)
    assert result.exception is None
    (what,) = json.loads(result.stdout)
    assert isinstance(what, dict)
    return what


def test_pack_and_tree_say_the_same(out: Path, kernels: Kernels) -> None:
    packed = described(out / "tiny_trn1.kernels.gguf", "--check")
    laid = described(out / "tiny_trn1", "--check")
    assert laid == described(out / "tiny_trn1" / "index.json")
    assert (packed.pop("kind"), laid.pop("kind")) == ("pack", "tree")
    for name in ("path", "size"):
        del packed[name], laid[name]
    assert packed == laid
    assert (packed["manifest"], packed["target"], packed["compiler"]) == ("tiny", "trn1", COMPILER)
    assert (packed["kernel_count"], packed["neff_count"], packed["simulated"]) == (12, 6, True)
    relu, silu = (next(k for k in packed["kernels"] if k["id"].startswith(f"{op}-6-")) for op in ("relu", "silu"))
    assert relu["same_as"] is None and silu["same_as"] == relu["id"]
    assert relu["neff_size"] == kernels.neffs[relu["id"]].stat().st_size
    made = estimate(kernels.hlos[relu["id"]].read_bytes(), "trn1")
    assert relu["neff_memory"] == silu["neff_memory"] == {"code": made.code_bytes, "rings": 0, "scratchpad": 0}
    said = run(inspect_command.command, out / "tiny_trn1").stdout
    assert (
        said.count(f"its program takes {made.code_bytes} bytes of code, 0 bytes of rings, 0 bytes of scratchpad\n")
        == 12
    )


def test_notes_are_kept_in_pack_and_tree_and_printed(kernels: Kernels, tmp_path: Path) -> None:
    first, second, third = sorted(kernels.specs)[:3]
    notes = {first: {"knobs": [{"tile": 8}, "whole"]}, second: {}, third: {"loops": 2}}
    kernels.notes = {id: json.dumps(note, indent=1) for id, note in notes.items()}
    tree, packed = tmp_path / "tree", tmp_path / "pack.kernels.gguf"
    bundle.build(*kernels.arguments, tree_path=tree, pack_path=packed)
    for path in (tree, packed):
        found = {k["id"]: k["notes"] for k in described(path, "--check")["kernels"] if "notes" in k}
        assert found == {id: note for id, note in notes.items() if note}
        text = run(inspect_command.command, path).stdout
        assert '      knob         {"tile":8}\n      knob         whole\n' in text and "      loops        2\n" in text
    kernels.notes[third] = "["
    with pytest.raises(KernelgenError, match=r"\.notes\.json: not the notes of a kernel"):
        bundle.build(*kernels.arguments, pack_path=packed)


def test_costs_of_a_bundle_are_printed_for_each_kernel_and_together(
    kernels: Kernels, out: Path, tmp_path: Path
) -> None:
    first, second = sorted(kernels.specs)[:2]

    def cost(times: int) -> dict[str, Any]:
        return {
            "work": {
                "tensor": {"bfloat16": 1000 * times},
                "vector": {"one": 100},
                "scalar": {},
                "gpsimd": {},
                "dma": {"512": 1600 * times},
            },
            "instructions": {"tensor": times, "vector": 1, "scalar": 0, "gpsimd": 0, "dma": 2},
            "sbuf_bytes_per_partition": 64 // times,
            "psum_bytes_per_partition": 2048 * times,
        }

    notes = {first: {"costs": [cost(1), cost(2)]}, second: {"costs": [cost(4)], "nki": ["a note"]}}
    kernels.notes = {id: json.dumps(note) for id, note in notes.items()}
    tree, packed = tmp_path / "tree", tmp_path / "pack.kernels.gguf"
    bundle.build(*kernels.arguments, tree_path=tree, pack_path=packed)
    for path in (tree, packed):
        what = described(path, "--cost")
        own = {k["id"]: k["cost"] for k in what["kernels"] if "cost" in k}
        idle = {"scalar": 0, "gpsimd": 0}
        assert [[one["ns"] for one in own[id]] for id in (first, second)] == [
            [{"tensor": 430, "vector": 135, "dma": 10} | idle, {"tensor": 860, "vector": 135, "dma": 20} | idle],
            [{"tensor": 1720, "vector": 135, "dma": 40} | idle],
        ]
        assert what["total_cost"] == {
            "modelled": True,
            "target": "trn1",
            "bottleneck": "tensor",
            "elapsed_ns": 3010 + round(0.6 * 405),
            "kernels": 2,
            "without": 10,
            "ns": {"tensor": 3010, "vector": 405, "dma": 70} | idle,
            "instructions": {"tensor": 7, "vector": 3, "dma": 6} | idle,
            "dma_bytes": 11200,
            "sbuf_bytes_per_partition": 64,
            "psum_bytes_per_partition": 8192,
        }
        text = run(inspect_command.command, path, "--cost").stdout
        assert (
            "cost         3.3 µs, modelled for trn1, not measured, of 2 of 12 kernels together; the bottleneck is tensor\n"
            in text
        )
        assert text.count("modelled for trn1, not measured") == 4
    assert "none of its kernels has a recorded cost" in failure(inspect_command.command, out / "tiny_trn1", "--cost")
    kernels.notes[first] = json.dumps({"costs": [{"cycles": 1}]})
    bundle.build(*kernels.arguments, pack_path=packed)
    assert "the recorded cost of a kernel cannot be read" in failure(inspect_command.command, packed, "--cost")


def test_text(out: Path, kernels: Kernels) -> None:
    text = run(inspect_command.command, out / "tiny_trn1.kernels.gguf").stdout
    assert "tiny_trn1.kernels.gguf: bundle of kernels, a GGUF pack\n" in text
    for line in ("target       trn1", f"compiler     {COMPILER}", "kernel count 12", "neff count   6"):
        assert f"  {line}\n" in text
    assert "      relu((6,1,1,1)/f32) -> (6,1,1,1)/f32\n" in text
    neff = run(inspect_command.command, kernels.neffs[min(kernels.specs)]).stdout
    assert "  input        input0: f32[1], 4 bytes\n" in neff and "  output       output0: f32[1], 4 bytes\n" in neff
    assert "  simulated    yes\n" in neff
    module = run(inspect_command.command, kernels.hlos[min(kernels.specs)]).stdout
    assert ": HLO module\n" in module and "  instructions 1 copy, 1 parameter\n" in module


def test_real_neff(tmp_path: Path, real_neff: Callable[..., bytes]) -> None:
    path = tmp_path / "x"
    path.write_bytes(real_neff(make_hlo(6), "trn2", 2))
    what = described(path)
    assert (what["kind"], what["simulated"], what["compiler"]) == ("neff", False, "neuronx-cc 2.24.5133.0+58f8de22")
    assert (what["target"], what["device"], what["physical_cores"], what["lnc"]) == ("trn2", "cayman", 2, 2)
    assert what["features"] == ["logical cores"] and what["build"] == "" and what["name"] == "kernel.neff"
    assert [(t["name"], t["usage"], t["dtype"], t["size"]) for t in what["tensors"]] == [
        ("input0", "in", "f32", 24),
        ("output0", "out", "f32", 24),
    ]
    assert what["digest"] == "the hash is not a known digest of the payload"
    text = run(inspect_command.command, path).stdout
    for line in ("target       trn2", "compiler     neuronx-cc 2.24.5133.0+58f8de22", "build        none"):
        assert f"  {line}\n" in text
    path.write_bytes(real_neff(make_hlo(6), "inf2", 1, version="2.14.227.0+2d4f85be"))
    what = described(path)
    assert (what["target"], what["digest"]) == ("trn1, trn1n, inf2", "MD5")
    path.write_bytes(path.read_bytes()[:2000] + b"damage" + path.read_bytes()[2006:])
    assert "damaged NEFF" in failure(inspect_command.command, path)


def test_a_neff_of_a_form_that_is_not_known(tmp_path: Path) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("sg00/def.json"))
    payload = file.getvalue()
    data = REAL[:16] + len(payload).to_bytes(8, "little") + REAL[24:1024] + payload
    (tmp_path / "x").write_bytes(data)
    what = described(tmp_path / "x")
    assert (what["kind"], what["simulated"]) == ("neff", False)
    assert what["members"] == {"sg00/def.json": 0} and "it has no info.json" in what["not_read"]


def test_check_reads_the_files(out: Path) -> None:
    made = pack.read(out / "tiny_trn1.kernels.gguf")
    with made.path.open("r+b") as file:
        file.seek(made.data_offset + made.neffs[2].offset + 2000)
        file.write(b"\xee")
    assert described(made.path)["kernel_count"] == 12
    assert "SHA-256 is not the one in the index" in failure(inspect_command.command, made.path, "--check")

    laid = out / "tiny_trn1"
    hlo = next((laid / "generic/hlo").iterdir())
    hlo.write_bytes(hlo.read_bytes() + b"x")
    assert described(laid)["kernel_count"] == 12
    assert f"{hlo}: not the file that index.json describes" in failure(inspect_command.command, laid, "--check")
    hlo.unlink()
    assert f"{hlo}: missing, but index.json names it" in failure(inspect_command.command, laid)


def test_a_real_neff_in_a_simulated_bundle(out: Path) -> None:
    index = json.loads((out / "tiny_trn1/index.json").read_text())
    file = out / "tiny_trn1" / index["kernels"][0]["neff"]
    size = index["kernels"][0]["neff_size"]
    file.write_bytes(REAL[:16] + (size - 1024).to_bytes(8, "little") + REAL[24:1024] + bytes(size - 1024))
    assert "real, unlike its bundle" in failure(inspect_command.command, out / "tiny_trn1")


def test_check_compares_real_neffs_with_what_the_index_says(
    kernels: Kernels, tmp_path: Path, real_neff: Callable[..., bytes]
) -> None:
    for id, path in kernels.neffs.items():
        path.write_bytes(real_neff(kernels.hlos[id].read_bytes(), "trn1", 1))
    laid, packed = tmp_path / "tree", tmp_path / "p.gguf"
    made = bundle.build(*kernels.arguments, tree_path=laid, pack_path=packed)
    assert made.origin.compiler == "neuronx-cc 2.24.5133.0+58f8de22"
    assert described(laid, "--check")["neff_count"] == described(packed, "--check")["neff_count"] == 12
    # The index may have any digest.
    index = json.loads((laid / "index.json").read_text())
    file = laid / index["kernels"][3]["neff"]

    def exchanged(data: bytes) -> str:
        file.write_bytes(data)
        index["kernels"][3] |= {"neff_sha256": hashlib.sha256(data).hexdigest(), "neff_size": len(data)}
        (laid / "index.json").write_text(json.dumps(index))
        described(laid)
        return failure(inspect_command.command, laid, "--check")

    assert f"{file}: compiled for cayman (trn2), not for trn1 (sunda)" in exchanged(real_neff(make_hlo(4), "trn2", 2))
    assert f"{file}: its input input0 has 396 bytes; its HLO's input0: f32[4], 16" in exchanged(
        real_neff(make_hlo(99), "trn1", 1)
    )


def test_check_of_a_pack_compares_the_device(
    kernels: Kernels, tmp_path: Path, real_neff: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for id, path in kernels.neffs.items():
        path.write_bytes(real_neff(kernels.hlos[id].read_bytes(), "trn3", 2))
    with monkeypatch.context() as patch:
        patch.setattr(description, "check", lambda *arguments, **named: None)
        bundle.build(*kernels.arguments, pack_path=tmp_path / "p.gguf")
    assert described(tmp_path / "p.gguf")["kernel_count"] == 12
    text = failure(inspect_command.command, tmp_path / "p.gguf", "--check")
    assert "compiled for mariana (trn3), not for trn1 (sunda)" in text
    assert "compiled for logical cores of 2 physical cores, with code for 2; expected 1" in text


def test_files_of_no_known_kind(tmp_path: Path, out: Path) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").touch()
    (tmp_path / "short.neff").write_bytes(b"x" * 10)
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    good = out / "tiny_trn1.kernels.gguf"
    names = ("text", "empty", "short.neff", "short.gguf", "in", "missing")
    result = run(inspect_command.command, good, *(tmp_path / name for name in names))
    assert isinstance(result.exception, KernelgenError) and result.exception.exit_code == EXIT_USAGE
    assert "kernel count 12" in result.stdout, "what can be read is still printed"
    text = str(result.exception)
    for name, reason in zip(
        names,
        ("neither a bundle's", "neither a bundle's", "not a NEFF: 10 bytes", "damaged kernel pack at byte 4",
         "not a bundle tree", "No such file"),
        strict=True,
    ):  # fmt: skip
        assert f"{tmp_path / name}: {reason}" in text


def test_compile_command(tmp_path: Path) -> None:
    (tmp_path / "k.hlo.pb").write_bytes(make_hlo(5))
    arguments = (tmp_path / "k.hlo.pb", "-o", tmp_path / "k.neff", "--compiler", "simulator")
    result = run(compile_command.command, *arguments, "--target", "trn2", "--lnc", "1", "--optlevel", "3")
    assert result.exception is None
    flags = described(tmp_path / "k.neff")["flags"]
    assert flags[:6] == ["--framework", "XLA", "--target", "trn2", "--optlevel", "3"] and flags[-2:] == ["--lnc", "1"]
    assert "--lnc 2: trn1 takes 1" in failure(compile_command.command, *arguments, "--target", "trn1", "--lnc", "2")


def test_compile_command_prints_warnings(tmp_path: Path) -> None:
    module = proto.parse(make_hlo(4))
    for i in module.computations[0].instructions:
        i.shape.element_type = 5
    (tmp_path / "k.hlo.pb").write_bytes(proto.serialize(module))
    result = run(
        compile_command.command,
        tmp_path / "k.hlo.pb",
        "-o",
        tmp_path / "k.neff",
        "--target",
        "trn1",
        "--compiler",
        "simulator",
    )
    assert result.exit_code == 0 and (tmp_path / "k.neff").exists()
    assert "warning: kernel k for trn1: [kernelgen/i64-parameter] input0 (parameter)" in result.stderr


def test_compile_command_says_which_compiler_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("NEURON_SDK", raising=False)
    (tmp_path / "k.hlo.pb").write_bytes(make_hlo(5))
    result = run(compile_command.command, tmp_path / "k.hlo.pb", "-o", tmp_path / "k.neff", "--target", "trn1")
    assert result.exception is None
    assert result.stderr.startswith("note: neuronx-cc is not installed") and result.stdout == ""


def test_bundle_command(kernels: Kernels, tmp_path: Path) -> None:
    plan = Plan(
        tuple(Kernel(kernels.specs[i], (("kernelgen", "elementwise"),)) for i in sorted(kernels.specs)),
        (kernels.config,),
        tuple(Neff(i, "trn1", 1, 1) for i in sorted(kernels.specs)),
        (Bundle("tiny", "trn1", "trn1", tuple(kernels.specs)),),
    )
    (tmp_path / "plan.json").write_text(plan.to_json())
    for kernel, path in kernels.neffs.items():
        path.rename(path.with_name(f"{kernel}.trn1.neff"))
    common = ("--hlo-dir", kernels.folder, "--neff-dir", kernels.folder, "-o", tmp_path / "out")
    arguments = ("--plan", tmp_path / "plan.json", *common)
    result = run(bundle_command.command, *arguments, "--form", "pack", "--form", "embed", "--jax-version", "1.1")
    assert result.exception is None
    assert result.stdout == f"{tmp_path / 'out/tiny_trn1.kernels.gguf'}\n"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "tiny_trn1.S",
        "tiny_trn1.c",
        "tiny_trn1.h",
        "tiny_trn1.kernels.gguf",
    ]
    assert described(tmp_path / "out/tiny_trn1.kernels.gguf", "--check")["jax"] == "1.1"

    text = failure(bundle_command.command, "tiny_trn2", *arguments)
    assert "the plan has no bundle 'tiny_trn2': did you mean 'tiny_trn1'?" in text
    for content in ("", "[]", "{}", '{"format":1}', '{"format":1,"kernels":[1],"configs":{},"neffs":[],"bundles":[]}'):
        (tmp_path / "bad.json").write_text(content)
        assert "bad.json: not a plan" in failure(bundle_command.command, "--plan", tmp_path / "bad.json", *common)
