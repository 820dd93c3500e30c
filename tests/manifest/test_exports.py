"""The llama family asks for exactly what llama.cpp does: held against llama.cpp's own graph exports (tests/data/graph-ops)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.ggml import shapes
from kernelgen.kernel import KernelSpec
from kernelgen.manifest import coverage, graph_ops
from kernelgen.manifest.families import llama

DATA = Path(__file__).parents[1] / "data" / "graph-ops"
LLAMA3 = Path(__file__).parents[2] / "manifests" / "llama3.yaml"
MANIFESTS = {"llama3-8b-f16": LLAMA3} | {path.stem: path for path in sorted(DATA.glob("*.yaml"))}

KEYS = {
    "family": "llama",
    "embedding_length": "64",
    "head_count": "4",
    "head_count_kv": "2",
    "feed_forward_length": "96",
    "vocab_size": "100",
    "context_length": "512",
    "layer_norm_rms_epsilon": "1e-5",
    "n_ctx": "1024",
    "n_tokens": "[1, 300]",
}


def specs(path: Path, library: Library) -> set[KernelSpec]:
    (request,) = manifest.load([path], Catalog([library]))
    return {kernel.spec for kernel in request.kernels}


def small(tmp_path: Path, library: Library, **keys: str) -> set[KernelSpec]:
    file = tmp_path / "m.yaml"
    lines = "".join(f"  {key}: {value}\n" for key, value in {**KEYS, **keys}.items())
    file.write_text(f"format: 1\nname: m\ntargets: [trn1]\nmodel:\n{lines}", encoding="utf-8")
    return specs(file, library)


@pytest.mark.parametrize("export", sorted(DATA.glob("*.txt")), ids=lambda path: path.name)
def test_a_models_own_export_is_covered(export: Path, library: Library) -> None:
    stem = export.name.removesuffix(".txt").removesuffix(".flash-attn").removesuffix(".no-flash-attn")
    result = coverage.compare(specs(MANIFESTS[stem], library), graph_ops.read(export))
    assert [f"{op.line}: {op.spec}" for op in result.missing] == []
    assert result.covered


@pytest.mark.parametrize("name", MANIFESTS)
def test_beyond_the_exports_there_are_only_other_lengths(name: str, library: Library) -> None:
    # An export holds the full cache and equal numbers of tokens and outputs; a run meets others too.
    graph = [op for path in DATA.glob(f"{name}.*.txt") for op in graph_ops.read(path)]
    exported = Counter(spec.op for spec, _, _ in graph)
    for spec in coverage.compare(specs(MANIFESTS[name], library), graph).beyond:
        assert spec.op in exported
        if spec.op not in ("flash_attn_ext", "soft_max", "mul_mat", "get_rows", "cpy", "cont"):
            assert "n_seq_max" in MANIFESTS[name].read_text(encoding="utf-8"), spec  # graphs of one sequence of two


def test_llama3_has_the_kernels_that_its_shapes_ask_for(library: Library) -> None:
    counts = Counter(spec.op for spec in specs(LLAMA3, library))
    # 16 cache lengths for one token; for 512 tokens the cache holds 512 cells at least, which leaves 15.
    assert counts["flash_attn_ext"] == counts["soft_max"] == 31
    assert counts["rope"] == 4
    assert sum(counts.values()) == 157


@settings(max_examples=150, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_kernel_is_one_that_ggml_would_make(data: st.DataObject, library: Library, tmp_path: Path) -> None:
    def choose(*options: str) -> str:
        return data.draw(st.sampled_from(options))

    heads = choose("1", "2", "4")
    flash = choose("on", "off", "both")
    keys = {
        "head_count": heads,
        "head_count_kv": choose(*(n for n in ("1", "2", "4") if int(n) <= int(heads))),
        "key_length": choose("16", "64", "96", "128"),
        "type_k": choose("f16", "f32", "bf16", "q8_0" if flash == "on" else "f16"),
        "type_v": choose("f16", "f32", "bf16"),
        "flash_attn": flash,
        "fused_qkv": choose("true", "false"),
        "n_seq_max": choose("1", "2", "3"),
        "n_tokens": choose("1", "[1, 2, 6]", "[3, 300]"),
        "n_ctx": choose("1", "256", "1000"),
        "rope": choose("{freq_factors: true}", "{scaling: {type: yarn, factor: 4}}", "{}"),
        "biases": choose("[]", "[attn_q, attn_k, attn_v, attn_output]", "[ffn_up, ffn_gate, ffn_down]"),
    }
    keys["n_tokens"] = "1" if keys["n_ctx"] != "1000" else keys["n_tokens"]
    if int(keys["key_length"]) % 32:
        keys["type_k"] = "f16"
    for spec in small(tmp_path, library, **keys):
        assert shapes.check(spec.op, spec.inputs, spec.output, dict(spec.params), spec.alias) == [], spec


def test_contexts_are_padded_as_llama_cpp_pads_them(tmp_path: Path, library: Library) -> None:
    assert small(tmp_path, library, n_ctx="1000") == small(tmp_path, library, n_ctx="1024")
    assert small(tmp_path, library, n_ctx="1000") != small(tmp_path, library, n_ctx="1025")


def test_only_reachable_cache_lengths_are_built(tmp_path: Path, library: Library) -> None:
    found = small(tmp_path, library, flash_attn="on")
    lengths = {
        (spec.inputs[0].ne[1], spec.inputs[1].ne[1])
        for spec in found
        if spec.op == "flash_attn_ext" and spec.inputs[0] and spec.inputs[1]
    }
    assert lengths == {(1, 256), (1, 512), (1, 768), (1, 1024), (300, 512), (300, 768), (300, 1024)}
    assert small(tmp_path, library, n_kv="[512, 1024]") < small(tmp_path, library)


def test_one_output_of_many_tokens_goes_through_the_last_layer_alone(tmp_path: Path, library: Library) -> None:
    found = small(tmp_path, library, n_tokens="300", n_outputs="2")
    outputs = {spec.output.ne[1] for spec in found if spec.output.ne[0] == 100}
    assert outputs == {2}
    assert {spec.output.ne[1] for spec in found if spec.op == "swiglu"} == {2, 300}


def test_absent_weights_default_and_tied_embeddings_are_the_output(tmp_path: Path, library: Library) -> None:
    def types(**keys: str) -> set[tuple[tuple[int, ...], str]]:
        found = small(tmp_path, library, **keys)
        return {
            (s.inputs[0].ne[:2], s.inputs[0].dtype)
            for s in found
            if s.op == "mul_mat" and s.inputs[0] and s.inputs[0].ne[2] == 1
        }

    assert types() == types(weights="f16") == types(weights="{default: f16}")
    tied = types(weights="{token_embd: q8_0}")
    assert ((64, 100), "q8_0") in tied
    assert ((64, 64), "f16") in tied


def test_yarn_is_computed_in_32_bit_floats() -> None:
    assert llama._f32_round(0.1) != 0.1
    exported = graph_ops.read(DATA / "llama-2-7b-yarn-q8_0-cache.flash-attn.txt")
    rope = next(spec for spec, _, _ in exported if spec.op == "rope")
    assert dict(rope.params)["freq_scale"] == 1 / 16
    assert dict(rope.params)["ext_factor"] == 1
