"""`kernelgen model` on headers made here: the manifest has the kernels that llama.cpp uses."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import export
import headers
import pytest

from kernelgen import cli
from kernelgen.dispatch import coverage
from kernelgen.model import graph_ops
from kernelgen.model.exporter import Exporter
from kernelgen.spec.kernel import GraphSpec, KernelSpec

from .conftest import ROOT, Derive, run_model, specs

GRAPH_OPS = ROOT / "tests" / "data" / "graph-ops"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if n > 1 else []) for n, name in enumerate(export.CASES)]
)
def test_the_data_of_other_tests_are_what_the_programs_write(name: str, exporter: Exporter, tmp_path: Path) -> None:
    assert exporter.libraries is not None
    written = list(export.files(name, exporter.program, exporter.libraries, tmp_path))
    assert {path.name for path in written} == {
        path.name
        for path in GRAPH_OPS.iterdir()
        if re.fullmatch(rf"{re.escape(name)}\.(|no-flash-attn\.|flash-attn\.)(txt|yaml)", path.name)
    }
    for path in written:
        assert path.read_text() == (GRAPH_OPS / path.name).read_text()


MODELS = {
    "qwen3": headers.qwen3(),
    "qwen3-q4_K": headers.qwen3(types=("q4_K", "q6_K")),
    "qwen2": headers.decoder("qwen2", **headers.SMALL, qkv_bias=True),
    "gemma2": headers.gemma2(),
    "mixtral": headers.mixtral(),
}


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_what_llama_cpp_exports_is_covered(
    name: str, flash: str, derive: Derive, exporter: Exporter, tmp_path: Path
) -> None:
    file = headers.write(MODELS[name], tmp_path / "model.gguf", sparse=True)
    out = tmp_path / "ops.txt"
    assert exporter.libraries is not None
    command = [exporter.libraries / "test-export-graph-ops", "-m", file, "-o", out, "-fa", flash]
    command += ["-c", "1024", "-b", "64", "-ub", "64", "-ot", "zzz=CPU"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    derived = derive(file, "--n-ctx", 1024, "--n-tokens", "1,64", "--n-ubatch", 64, "--flash-attn", flash)
    # an export has weights in ggml's order
    result = coverage.compare({spec.without_layouts for spec in derived}, graph_ops.read(out))
    assert [str(op.spec) for op in result.missing] == []
    assert len(result.covered) > 20


@pytest.mark.parametrize("ftype", ["Q4_K_M", "Q8_0", "Q2_K", "IQ4_XS"])
def test_a_quantization_that_was_not_made_has_llama_quantize_s_types(
    ftype: str, exporter: Exporter, llama_cpp_sources: Path, tmp_path: Path
) -> None:
    # llama.cpp compares its own choice of types with this file
    schema = (llama_cpp_sources / "tests" / "snapshots" / "qwen3-14b.schema").read_text()
    default, *others = re.findall(rf"^\[{ftype}\] (\S+)\n((?:\S+ \S+\n)*)", schema, re.MULTILINE)[0]
    changed = dict(line.split() for line in others[0].splitlines())
    sizes = {"n_embd": 5120, "n_head": 40, "n_head_kv": 8, "head": 128, "n_ff": 17408, "n_vocab": 151936, "n_layer": 40}
    header = headers.decoder("qwen3", **sizes, qk_norm=True)  # type: ignore[arg-type]
    file = headers.write(header, tmp_path / "model.gguf")
    command = [exporter.program, file, "--ctx-size", "256", "--graph", "n_tokens=1", "--ftype", ftype]
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=True)
    tensors = json.loads(done.stdout.splitlines()[1])["tensors"]
    found = {t["name"]: t["type"] for t in tensors if t.get("role") == "weight"}
    wanted = {t.name: "f32" if t.dtype == "f32" else changed.get(t.name, default) for t in header.tensors}
    assert found == wanted


def test_a_manifest_of_a_quantization_is_that_of_its_file(derive: Derive, tmp_path: Path) -> None:
    plain = derive(headers.write(headers.qwen3(), tmp_path / "model.gguf"), "--ftype", "Q8_0")
    assert plain == derive(headers.write(headers.qwen3(types=("q8_0",)), tmp_path / "model.gguf"))
    assert "--ftype" not in (tmp_path / "derived.yaml").read_text()


def test_a_sliding_window_has_a_cache_of_its_own(
    derive: Derive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.gemma2(), tmp_path / "gemma.gguf")
    every = ",".join(map(str, range(256, 2049, 256)))
    derived = derive(
        file, "--n-ctx", 2048, "--n-tokens", "1,64", "--n-ubatch", 64, "--flash-attn", "on", "--n-kv", every
    )
    text = (tmp_path / "derived.yaml").read_text()
    assert "  n_kv: [256, 512, 768, 1024, 1280, 1536, 1792, 2048]\n" in text
    assert "listed for one size" not in capsys.readouterr().out
    # the window's cache has 256 cells plus a call's 64, rounded up
    assert {spec.output.ne[1] for spec in derived if spec.op == "set_rows"} == {512, 2048}
    lengths = {spec.inputs[1].ne[1] for spec in derived if spec.op == "flash_attn_ext" and spec.inputs[1]}
    assert lengths == set(range(256, 2049, 256))
    # without flash attention the strides of the two caches differ
    derive(file, "--n-ctx", 2048, "--n-tokens", "1,64", "--n-ubatch", 64, "--flash-attn", "off")
    assert "  n_kv_swa: [256, 512]\n" in (tmp_path / "derived.yaml").read_text()
    assert "listed for one size" not in capsys.readouterr().out


def test_coverage_takes_a_model_as_it_is_run(
    derive: Derive, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.gemma2(), tmp_path / "model.gguf")
    options = ["--n-ctx", "512,1024", "--n-tokens", "1,64", "--n-seq-max", "2", "--flash-attn", "both"]
    derive(file, *options)
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries), "--format", "json"]
    capsys.readouterr()
    command = ["coverage", str(tmp_path / "derived.yaml"), "--model", str(file), *where]
    # All lengths of both contexts, with one sequence and with two.
    assert cli.run([*command, *options]) == 0
    (found,) = json.loads(capsys.readouterr().out)["graphs"]
    assert all(step["nodes"] == step["covered"] > 50 for step in found["steps"])
    assert {(s["sizes"]["n_seqs"], s["sizes"]["n_tokens"]) for s in found["steps"]} == {(1, 1), (1, 64), (2, 64)}
    assert {s["context"]["flash_attn"] for s in found["steps"]} == {True, False}
    assert {(s["context"]["n_ctx"], s["sizes"]["n_kv"]) for s in found["steps"]} == {
        (512, 256),
        (1024, 256),
        (1024, 512),
    }
    # For a call of 65 tokens, only kernels that do not depend on the number of tokens exist.
    assert cli.run([*command, "--n-ctx", "512", "--n-tokens", "1,65", "--flash-attn", "both"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["graphs"]
    without = {
        s["sizes"]["n_tokens"]: s["nodes"] - s["covered"] for s in found["steps"] if s["sizes"]["n_outputs"] == 1
    }
    assert without[1] == 0 < without[65]
    assert {m["kind"] for m in found["missing"]} == {"other shapes"}


@pytest.mark.parametrize("cache", [("--flash-attn", "on"), ("--flash-attn", "off", "--n-ctx", "1024")])
def test_coverage_finds_groups_of_several_sequences_with_a_cache_each(
    derive: Derive, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: tuple[str, ...]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    options = ["--n-tokens", "1,2,16", "--n-ubatch", "16", "--n-seq-max", "2", "--n-kv", "256", *cache]
    where = ["--exporter", str(exporter.program), "--llama-cpp", str(exporter.libraries), "--format", "json"]
    launches = {}
    for fuse in ("layer", "none"):
        derive(file, *options, "--fuse", fuse)
        capsys.readouterr()
        command = ["coverage", str(tmp_path / "derived.yaml"), "--model", str(file), *where, *options]
        assert cli.run(command) == 0
        (found,) = json.loads(capsys.readouterr().out)["graphs"]
        steps = {(s["sizes"]["n_seqs"], s["sizes"]["n_tokens"], s["sizes"]["n_outputs"]): s for s in found["steps"]}
        assert {(1, 1, 1), (2, 2, 2), (2, 16, 16)} <= set(steps)
        assert all(step["nodes"] == step["covered"] > 50 for step in steps.values())
        if fuse == "layer":
            launches = {sizes: step["groups"]["launches"] for sizes, step in steps.items()}
            embedding = 1
            assert all(s["groups"]["nodes"] == s["nodes"] - embedding for of, s in steps.items() if of[1] == of[2])
        else:
            assert not any("groups" in step for step in steps.values())
    assert launches[1, 1, 1] == launches[2, 2, 2] == launches[2, 16, 16]


def test_several_contexts_have_the_kernels_of_each(derive: Derive, tmp_path: Path) -> None:
    file = headers.write(headers.gemma2(), tmp_path / "model.gguf")
    options = ("--n-tokens", "1,64", "--n-ubatch", 64, "--flash-attn", "both")
    alone = [derive(file, "--n-ctx", n_ctx, *options) for n_ctx in (256, 512, 1024)]
    assert derive(file, "--n-ctx", "256,512,1024", *options) == alone[0] | alone[1] | alone[2]
    assert '(1,${128 * n_ctx},1,1)/f16"' in (tmp_path / "derived.yaml").read_text()


def test_the_header_is_enough(exporter: Exporter, tmp_path: Path) -> None:
    whole = headers.write(headers.qwen3(), tmp_path / "model.gguf", sparse=True)
    outputs = [tmp_path / "whole.yaml", tmp_path / "header.yaml"]
    assert run_model(exporter, whole, outputs[0], "--name", "m") == 0
    headers.write(headers.qwen3(), whole)
    assert run_model(exporter, whole, outputs[1], "--name", "m") == 0
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


def test_a_split_model_is_named_by_its_first_file(derive: Derive, tmp_path: Path) -> None:
    whole = derive(headers.write(headers.qwen3(), tmp_path / "whole.gguf"))
    paths = [tmp_path / f"model-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, path in enumerate(paths):
        headers.write(headers.qwen3(), path, part=(i, 3))
    assert derive(paths[0]) == whole


def test_the_summary_and_the_manifest_say_what_it_is(
    exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "Tiny-Qwen3.gguf")
    output = tmp_path / "Tiny-Qwen3.yaml"
    assert run_model(exporter, file, output, "--n-ctx", 512, "--n-tokens", 1, "--flash-attn", "on") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "qwen3: 1.64 million parameters, 3.1 MiB of weights, 2 layers"
    assert lines[1] == "  1 token, 1 output, flash attention on: 52 nodes, none without a kernel"
    assert lines[-1] == str(output)
    text = output.read_text()
    assert "#   kernelgen model Tiny-Qwen3.gguf --n-ctx 512 --n-tokens 1 --flash-attn on --fuse none\n" in text
    assert "\nname: tiny_qwen3\ntargets: [trn1, trn1n, inf2, trn2]\n" in text
    assert f"{len(specs(output))} kernels in " in lines[-2]


def test_few_numbers_of_tokens_and_flash_attention_are_the_default(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    output = tmp_path / "model.yaml"
    for options, made in (
        (["--n-ctx", 256], "--n-ctx 256 --n-tokens 1,8,32,128,256 --flash-attn on"),
        (["--n-ubatch", 16], "--n-ctx any --n-tokens 1,8,16 --n-ubatch 16 --flash-attn on"),
    ):
        assert run_model(exporter, file, output, *options) == 0
        assert f"#   kernelgen model model.gguf {made} --fuse none\n" in output.read_text()
    assert all(spec.op != "soft_max" for spec in specs(output))


def test_a_name_in_the_header_does_not_become_part_of_the_manifest(exporter: Exporter, tmp_path: Path) -> None:
    fields: dict[str, headers.Value] = {".general.name": 'a"\n  - op: evil # \x1b[31m\u2028'}
    file = headers.write(headers.qwen3(fields=fields), tmp_path / "model.gguf")
    output = tmp_path / "m.yaml"
    assert run_model(exporter, file, output, "--n-tokens", 1, "--n-ctx", 256) == 0
    assert not any(line.lstrip().startswith("- op: evil") for line in output.read_text().splitlines())
    assert all(line.isprintable() for line in output.read_text(encoding="utf-8").split("\n"))


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_kernels_of_any_context_are_those_of_caches_that_are_in_use_whole(
    name: str, derive: Derive, tmp_path: Path
) -> None:
    """No kernel depends on the cache's length, so each length in use has its kernels once."""
    file = headers.write(MODELS[name], tmp_path / "model.gguf", sparse=True)
    options = ("--n-tokens", "1,64", "--n-ubatch", 64, "--fuse", "layer")
    found = derive(file, "--n-ctx", "any", "--n-kv", "256,512,1024", *options)
    text = (tmp_path / "derived.yaml").read_text()
    assert "--n-ctx any --n-tokens 1,64 --n-kv 256,512,1024" in text
    assert "n_ctx}" not in text
    alone = [derive(file, "--n-ctx", n, "--n-kv", n, *options) for n in (256, 512, 1024)]
    assert found == alone[0] | alone[1] | alone[2]


def test_sequences_with_a_cache_each_have_the_kernels_of_one_and_groups_of_tokens_of_each(
    derive: Derive, tmp_path: Path
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    options = ("--n-tokens", "2,64", "--n-outputs", 2, "--n-ubatch", 64, "--n-kv", "256,512", "--fuse", "layer")
    one = derive(file, *options)
    more = derive(file, *options, "--n-seq-max", 3) - one
    alone = [s for s in more if isinstance(s, KernelSpec)]
    assert one and {(s.op, s.inputs[0].ne[1], s.output.ne[1]) for s in alone if s.inputs[0]} == {
        ("set_rows", n_tokens, n) for n_tokens in (2, 64) for n in (1024, 2048)
    }
    found = [
        [(node.inputs[1].tensor.ne[1], node.output.ne[2]) for node in s.nodes if node.op == "flash_attn_ext"]
        for s in more
        if isinstance(s, GraphSpec)
    ]
    assert sorted(found) == sorted(
        [(n_kv, n_tokens)] * n_seqs * 2 for n_kv in (256, 512) for n_seqs in (2, 3) for n_tokens in (1, 64 // n_seqs)
    )


@pytest.mark.parametrize(
    ("options", "made"),
    [
        (["--flash-attn", "off"], "4096"),
        (["--flash-attn", "both"], "any"),
        (["--flash-attn", "off", "--n-seq-max", 2], "4096"),
    ],
)
def test_kernels_for_one_context_alone_are_reported(
    options: list[object], made: str, exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    output = tmp_path / "model.yaml"
    command = (exporter, file, output, "--n-tokens", 2, "--n-kv", "256,2048")
    cells = 2048 if made == "any" else 4096
    assert run_model(*command, *options) == 0
    said = "without flash attention a cache's length is in the strides of its values"
    assert f"\n{said}: such kernels are for -c {cells} alone (--n-ctx)\n" in capsys.readouterr().out
    text = output.read_text()
    assert f"--n-ctx {made} --n-tokens 2" in text
    lengths = {s.inputs[2].ne[1] for s in specs(output) if s.op == "set_rows" and s.inputs[2] and s.inputs[2].ne[0] > 1}
    assert lengths == ({256, 2048} if made == "any" else {cells})
    assert run_model(*command, *options, "--n-ctx", 4096) == 0
    assert "such kernels are for" not in capsys.readouterr().out


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_base_of_rope_that_no_frequency_has_is_reported(
    exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    header = headers.decoder("llama", **headers.SMALL, fields={"rope.freq_base": value})  # type: ignore[arg-type]
    source = headers.write(header, tmp_path / "model.gguf", sparse=True)
    assert run_model(exporter, source, tmp_path / "m.yaml", "--n-ctx", 256, "--n-tokens", "1") == 0
    assert "no kernel: rope: freq_base: expected " in capsys.readouterr().out
    ops = {spec.op for spec in specs(tmp_path / "m.yaml")}
    assert "mul_mat" in ops and "rope" not in ops
