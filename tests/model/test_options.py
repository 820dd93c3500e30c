"""Options of `kernelgen model` that add to a model or change its graphs: adapters, context shifts, embeddings, drafts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import headers
import pytest
import random_llama

from kernelgen.cli.model import command
from kernelgen.model.exporter import Exporter
from kernelgen.model.sizes import DecodeCall, Settings
from kernelgen.spec.kernel import KernelSpec

from .conftest import ROOT, Derive, run_model

SIZE = random_llama.Size(n_embd=128, n_head=2, n_head_kv=1, n_ff=192, n_layer=3)
WINDOWED = replace(SIZE, n_layer=4, n_swa=64)
RUN = ("--n-ctx", 512, "--n-tokens", 16, "--n-ubatch", 16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    random_llama.write(file, size=SIZE, sparse=True)
    return file


def adapter(folder: Path, rank: int, *targets: str) -> Path:
    """Writes the header of an adapter, without its weights."""
    file = folder / f"rank{rank}.gguf"
    random_llama.write_adapter(file, SIZE, rank=rank, targets=targets)
    file.write_bytes(file.read_bytes()[: -(file.stat().st_size // 2)])
    return file


def named(found: Iterable[KernelSpec], op: str) -> list[KernelSpec]:
    return sorted((spec for spec in found if spec.op == op), key=lambda spec: spec.id)


def test_an_adapter_adds_products_of_its_rank_and_any_scale(model: Path, derive: Derive, tmp_path: Path) -> None:
    files = adapter(tmp_path, 8, "attn_q"), adapter(tmp_path, 4, "ffn_down", "attn_q")
    without = derive(model, *RUN)
    added = derive(model, *RUN, "--lora", files[0], "--lora", f"{files[1]}:0.25") - without
    weights = {str(spec.inputs[0]) for spec in named(added, "mul_mat")}
    assert weights == {"(128,8,1,1)/f16", "(8,128,1,1)/f16", "(128,4,1,1)/f16", "(4,128,1,1)/f16", "(192,4,1,1)/f16"}
    assert {spec.params for spec in named(added, "scale")} == {(("b", "any"), ("s", "any"))}
    assert "--lora rank8.gguf --lora rank4.gguf:0.25" in (tmp_path / "derived.yaml").read_text()


def test_a_context_is_shifted_in_place_and_in_pieces(model: Path, derive: Derive) -> None:
    """The kernels shift the keys of any cache: each number of cells divides the next, up to the longest cache."""
    without = derive(model, *RUN)
    shifts = derive(model, *RUN, "--context-shift") - without
    assert [str(spec.output) for spec in shifts] == ["(64,1,256,1)/f16"]
    assert all(spec.op == "rope" and spec.alias == 0 for spec in shifts)
    longer = derive(model, *RUN, "--n-ctx", "300,2000", "--context-shift") - without
    assert [str(spec.output) for spec in named(longer, "rope")] == ["(64,1,1024,1)/f16", "(64,1,256,1)/f16"]
    devices = ("--split-mode", "tensor", "--devices", 2)
    slices = derive(model, *RUN, *devices, "--context-shift") - derive(model, *RUN, *devices)
    assert [str(spec.output) for spec in slices] == ["(64,1,256,1)/f16"]


def test_keys_of_a_quantized_cache_are_rotated_in_f32(model: Path, derive: Derive) -> None:
    types = ("--type-k", "q8_0", "--type-v", "q8_0")
    added = derive(model, *RUN, *types, "--context-shift") - derive(model, *RUN, *types)
    assert sorted(spec.op for spec in added) == ["cpy", "cpy", "mul_mat", "rope"]


def test_embeddings_are_of_all_tokens_and_pooled(model: Path, derive: Derive, tmp_path: Path) -> None:
    found = derive(model, *RUN, "--embeddings", "--pooling", "last")
    assert {str(spec.output) for spec in named(found, "get_rows")} >= {"(128,1,1,1)/f32"}
    assert "--embeddings --pooling last" in (tmp_path / "derived.yaml").read_text()
    assert "n_outputs" not in (tmp_path / "derived.yaml").read_text()
    mean = derive(model, *RUN, "--embeddings", "--pooling", "mean")
    assert "cont" in {spec.op for spec in mean - found}, "the mean is a product with what is transposed"


def test_the_encoder_of_a_model_with_a_decoder(derive: Derive, tmp_path: Path) -> None:
    """The encoder's kernels equal those of a model without a decoder, up to the pooling."""
    files = tmp_path / "t5.gguf", tmp_path / "t5encoder.gguf"
    random_llama.write_t5(files[0], SIZE, decoder=True)
    random_llama.write_t5(files[1], SIZE)
    alone = derive(files[1], *RUN, "--embeddings", "--pooling", "none")
    assert derive(files[0], *RUN, "--encoder") == alone
    assert alone < derive(files[0], *RUN, "--n-encoded", 16), "the encoder's kernels are beside the decoder's"


def test_a_decoder_attends_to_a_few_numbers_of_tokens(derive: Derive, tmp_path: Path) -> None:
    file = tmp_path / "t5.gguf"
    random_llama.write_t5(file, SIZE, decoder=True)
    found = derive(file, *RUN, "--n-encoded", "5,9")
    masks = {str(spec.inputs[3]) for spec in named(found, "flash_attn_ext")}
    assert masks == {"(5,16,1,1)/f16", "(9,16,1,1)/f16"}
    assert "--n-encoded 5,9" in (tmp_path / "derived.yaml").read_text()


def test_pooled_graphs_have_as_many_sequences_as_there_can_be(derive: Derive, tmp_path: Path) -> None:
    """A kernel for more sequences serves fewer."""
    file = tmp_path / "bert.gguf"
    random_llama.write_bert(file, SIZE)
    found = named(derive(file, *RUN, "--embeddings"), "get_rows")
    assert [str(spec.output) for spec in found if spec.inputs[0].ne[1] == 16] == ["(128,16,1,1)/f32"]


def test_a_control_vector_is_added_by_all_layers_but_the_first(model: Path, derive: Derive) -> None:
    added = derive(model, *RUN, "--control-vector") - derive(model, *RUN)
    assert {str(spec.inputs[1]) for spec in added} == {"(128,1,1,1)/f32"}
    assert {(spec.op, str(spec.output)) for spec in added} >= {("add", "(128,16,1,1)/f32")}


def test_a_manifest_has_a_model_and_its_draft(
    model: Path, derive: Derive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = headers.write(headers.qwen3(n_vocab=SIZE.n_vocab), tmp_path / "small.gguf", sparse=True)
    one, other = derive(model, *RUN, "--fuse", "layer"), derive(small, *RUN, "--fuse", "layer")
    capsys.readouterr()
    assert derive(model, *RUN, "--fuse", "layer", "--model-draft", small) == one | other
    said = capsys.readouterr().out
    types = ("--type-k", "q8_0", "--type-v", "q8_0", "--type-k-draft", "q8_0")
    run = (*RUN, "--n-tokens", "1,16", *types, "--model-draft", small)
    shifts = derive(model, *run, "--context-shift") - derive(model, *run)
    assert {spec.op for spec in shifts} == {"cpy", "mul_mat", "rope"}
    assert [str(spec.output) for spec in named(shifts, "rope")] == ["(128,2,256,1)/f32", "(64,1,256,1)/f32"]
    assert said.startswith("llama: ")
    assert f"\n{small}: qwen3: " in said
    assert "\nllama.cpp's programs use the draft only with --spec-type draft-simple\n" in said
    assert "--model-draft" in (text := (tmp_path / "derived.yaml").read_text()) and "small.gguf" in text


def test_a_draft_s_cache_has_its_own_types(model: Path, derive: Derive) -> None:
    """llama.cpp gives a draft's cache its -ctkd and -ctvd, not the model's -ctk and -ctv."""
    without_draft = derive(model, *RUN, "--type-k", "q8_0")
    with_draft = derive(model, *RUN, "--type-k", "q8_0", "--model-draft", model, "--type-k-draft", "q4_0")
    types = {
        (spec.inputs[1].dtype, spec.inputs[2].dtype) for spec in named(with_draft - without_draft, "flash_attn_ext")
    }
    assert types == {("q4_0", "f16")}


def test_options_of_rope_are_in_its_parameters(model: Path, derive: Derive, tmp_path: Path) -> None:
    options = ("--rope-scaling", "yarn", "--rope-scale", 4, "--rope-freq-base", 5e5, "--yarn-orig-ctx", 128)
    ropes = named(derive(model, *RUN, *options, "--yarn-beta-fast", 16), "rope")
    rope_params = {"ext_factor": 1.0, "freq_scale": 0.25, "freq_base": 5e5, "n_ctx_orig": 128, "beta_fast": 16.0}
    assert ropes and all(rope_params.items() <= dict(spec.params).items() for spec in ropes)
    assert "--rope-scaling yarn --rope-scale 4.0" in (tmp_path / "derived.yaml").read_text()


def test_overridden_metadata_changes_the_graph(model: Path, derive: Derive) -> None:
    norms = named(derive(model, *RUN, "--override-kv", "llama.attention.layer_norm_rms_epsilon=float:0.5"), "rms_norm")
    assert norms and all(dict(spec.params)["eps"] == 0.5 for spec in norms)


@pytest.mark.parametrize("options", [(), ("--embeddings",)])
def test_recurrent_models_have_calls_of_several_sequences(
    options: tuple[str, ...], exporter: Exporter, derive: Derive, tmp_path: Path
) -> None:
    """llama.cpp computes embeddings of a recurrent model one sequence after the other."""
    assert exporter.libraries is not None
    load_backends = Path(os.environ.get("LLAMA_LOAD_BACKENDS", ROOT / "tools/llama_cpp/libload_backends.so")).absolute()
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries), "LD_PRELOAD": str(load_backends)}
    command = [exporter.libraries / "test-llama-archs", "-a", "^lfm2$", "-s", "1", "-o", tmp_path]
    subprocess.run(list(map(str, command)), env=environment, check=False, capture_output=True)
    kernels = derive(tmp_path / "lfm2-dense.gguf", *RUN, "--n-seq-max", 2, *options)
    assert {spec.output.ne[2] for spec in named(kernels, "ssm_conv")} == ({1} if options else {1, 2})


def test_each_option_of_llama_cpp_that_changes_graphs_is_known(llama_cpp_sources: Path) -> None:
    source = (llama_cpp_sources / "common" / "arg.cpp").read_text()
    options = {re.findall('"([^"]+)"', names)[-1] for names in re.findall(r"common_arg\(\s*\{([^}]*)\}", source)}
    derived, missing, others = (
        part.splitlines()[1:] for part in (ROOT / "tests/data/llama-options.txt").read_text().split("\n\n")[1:]
    )
    pairs = [
        (option, name) for option, _, names in (line.partition(": ") for line in derived) for name in names.split()
    ]
    entries = [name for _, name in pairs] + " ".join([*missing, *others]).split()
    assert len(options) > 300
    assert sorted(entries) == sorted(options), "say in tests/data/llama-options.txt what the option does"
    assert {option for option, _ in pairs} <= {option for parameter in command.params for option in parameter.opts}
    page = (ROOT / "docs/reference/features.md").read_text().partition("\n## What is not derived\n")[2]
    assert [name for name in " ".join(missing).split() if f"`{name}`" not in page] == []


@pytest.fixture
def with_head(tmp_path: Path) -> Path:
    file = tmp_path / "head.gguf"
    random_llama.write_glm4_moe(file, replace(SIZE, n_expert=4, n_expert_used=2))
    return file


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    file = tmp_path / "eagle3.gguf"
    random_llama.write_eagle3(file, SIZE, (0, 1, SIZE.n_layer))
    return file


def test_the_head_of_a_model_joins_a_hidden_state_and_a_token(
    with_head: Path, derive: Derive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the head the model has no experts."""
    alone = derive(with_head, *RUN)
    capsys.readouterr()
    added = derive(with_head, *RUN, "--spec-type", "draft-mtp") - alone
    said = capsys.readouterr().out
    # the device samples a token of each sequence
    assert {str(spec.output) for spec in named(added, "concat")} == {"(256,16,1,1)/f32", "(256,1,1,1)/f32"}
    assert "(256,128,1,1)/f32" in {str(spec.inputs[0]) for spec in named(added, "mul_mat")}
    assert {str(spec.inputs[0]) for spec in named(added, "mul_mat_id")} == {"(128,192,4,1)/f32", "(192,128,4,1)/f32"}
    assert {dict(spec.params).get("k", 10) for spec in named(added, "top_k")} == {10}
    assert f"{with_head}: glm4moe: " in said
    assert "\n  16 tokens, 0 outputs, " in said
    assert "\n  16 tokens, 1 output, flash attention on, top_k=10 on the device: " in said
    assert "--spec-type draft-mtp" in (tmp_path / "derived.yaml").read_text()


def test_a_model_gives_the_hidden_states_of_all_tokens_to_its_head(with_head: Path, exporter: Exporter) -> None:
    """With a single output too: the head reads the hidden states of all tokens, and the output's rows are picked after
    the last layer.
    """
    settings = Settings((512,), 16, 1, (16,), None, None, "f16", "f16", (True,), False, False)
    call = [DecodeCall(512, 1, 16, 1, 256)]
    ((_, _, alone),) = exporter.graphs(with_head, settings, call)
    ((_, _, read),) = exporter.graphs(with_head, replace(settings, speculation="draft-mtp"), call)
    assert [name for name in alone.names if name.startswith("ffn_out-2")]
    first, second = (
        next(
            node.output.ne for node, name in zip(graph.nodes, graph.names, strict=True) if name.startswith("ffn_out-2")
        )
        for graph in (alone, read)
    )
    assert (first[1], second[1]) == (1, 16)


def test_an_eagle3_draft_reads_layers_of_its_model(
    model: Path, eagle3: Path, derive: Derive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = derive(model, *RUN)
    capsys.readouterr()
    added = derive(model, *RUN, "--spec-type", "draft-eagle3", "--model-draft", eagle3) - alone
    said = capsys.readouterr().out
    weights = {str(spec.inputs[0]) for spec in named(added, "mul_mat")}
    assert weights >= {"(384,128,1,1)/f32", "(256,128,1,1)/f32"}, "of its encoder, and of its attention"
    assert f"\n{eagle3}: eagle3: " in said
    assert f"\n{eagle3}, its encoder: eagle3: " in said
    text = (tmp_path / "derived.yaml").read_text()
    assert "--model-draft eagle3.gguf --spec-type draft-eagle3" in text


def test_a_head_of_gemma_4_reads_the_cache_of_its_model(
    derive: Derive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head joins the model's embedding of a token and its hidden state, and writes to no cache."""
    model, head = tmp_path / "gemma4.gguf", tmp_path / "gemma4-head.gguf"
    random_llama.write_gemma4(model, WINDOWED)
    random_llama.write_gemma4_head(head, model, WINDOWED)
    alone = derive(model, *RUN)
    capsys.readouterr()
    added = derive(model, *RUN, "--spec-type", "draft-mtp", "--model-draft", head) - alone
    said = capsys.readouterr().out
    assert {str(spec.output) for spec in named(added, "concat")} == {"(256,16,1,1)/f32", "(256,1,1,1)/f32"}
    assert {str(spec.output) for spec in named(added, "flash_attn_ext")} == {"(64,4,16,1)/f32", "(64,4,1,1)/f32"}
    assert not named(added, "set_rows")
    assert f"\n{head}: gemma4-assistant: " in said
    assert "--model-draft gemma4-head.gguf --spec-type draft-mtp" in (tmp_path / "derived.yaml").read_text()


@pytest.mark.parametrize("lengths", ["256,512,1024", "256"])
def test_kernels_for_a_longer_context_are_counted(
    exporter: Exporter, tmp_path: Path, capsys: pytest.CaptureFixture[str], lengths: str
) -> None:
    """The note of `kernelgen model` names an option, and the number of kernels that it adds."""
    file = tmp_path / "model.gguf"
    random_llama.write(file, size=replace(SIZE, n_ctx=5000), sparse=True)

    def derived(n_kv: str) -> tuple[int, str]:
        run = ("--n-tokens", "1,8", "--fuse", "layer", "--n-kv", n_kv)
        assert run_model(exporter, file, tmp_path / "derived.yaml", *run) == 0
        out = capsys.readouterr().out
        (kernels,) = re.findall(r"^(\d+) kernels in", out, re.MULTILINE)
        return int(kernels), out

    kernels, out = derived(lengths)
    ((more, longer),) = re.findall(
        r"the model's context has 5000: for all of it(?:, with (\d+) more kernels)?, --n-kv (\S+)$", out, re.MULTILINE
    )
    assert longer == ",".join(map(str, (256, 512, 1024, 2048, 4096, 5120)))
    all_kernels, out = derived(longer)
    assert "more kernels" not in out
    assert more == (str(all_kernels - kernels) if "," in lengths else "")
