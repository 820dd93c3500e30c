"""`kernelgen model` derives the kernels that a run uses; `bazel run //tools/llama_cpp:derived_kernels` checks all
architectures.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path

import any_tokens
import default_kernels
import derived_kernels
import folded_layers
import gguf
import harness
import models
import numpy as np
import pytest
import random_llama

from kernelgen import cli, manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.model import exporter

# A sliding window, a recurrent model, a recurrent model with a window and experts, and attention sinks.
ARCHITECTURES = ("gemma3", "mamba", "qwen3next", "gpt-oss")

WHOLE = "qwen2"
"""An architecture that runs entirely on the device with the kernels that are derived by default."""

LAYERED = "phi3"
"""An architecture whose layers share a weight."""

PROMPT = "A NeuronCore computes what its kernels say"
PROMPT_TOKENS = 44
"""Tokens of PROMPT: a start, a space, and one for each character."""
TABLE = ("--override-tensor", r"token_embd\.weight=NEURON0")
BUFFERS = {"none": "", "auto": "_bf16"}
"""The end of the name of the weights' buffers for a value of `--weights`; for other values the layout is the end."""


@pytest.fixture(scope="module")
def rows(programs: harness.Programs) -> list[derived_kernels.Comparison]:
    return derived_kernels.compare_all(programs, ARCHITECTURES)


def test_no_kernel_is_missing(rows: list[derived_kernels.Comparison]) -> None:
    assert {row.name.partition(" ")[0] for row in rows} == set(ARCHITECTURES)
    for row in rows:
        assert row.failure == ""
        assert row.missing == ()
        assert row.refused == ()
        assert row.derived >= row.recorded > 40


def test_the_page_has_a_row_for_each(rows: list[derived_kernels.Comparison]) -> None:
    text = derived_kernels.page([*rows, derived_kernels.Comparison("broken", failure="no | model")])
    assert text.count("\n| ") == len(rows) + 2
    assert "| broken | | | | | | no / model |\n" in text
    written = derived_kernels.PAGE.read_text(encoding="utf-8")
    for row in rows:
        assert any(line in written for line in text.splitlines() if line.startswith(f"| {row.name} |"))


def test_default_kernels_compute_calls_of_other_numbers_of_tokens(programs: harness.Programs, tmp_path: Path) -> None:
    """The page states this; `bazel run //tools/llama_cpp:default_kernels` shows it for other architectures."""
    work = tmp_path / "work"
    work.mkdir()
    runner = default_kernels.DefaultKernelsRunner(programs, work, 1)
    model = runner.do(WHOLE, lambda stage, count: None)
    assert model.passed, model.failure
    assert (model.lacking, model.reasons) == (0, {})
    assert model.launches > 100
    written = default_kernels.PAGE.read_text(encoding="utf-8")
    assert default_kernels.known(written)[WHOLE] is False
    assert default_kernels.worse({WHOLE: model}, written) == []
    assert runner.do(WHOLE, lambda stage, count: None) == model  # reused from the earlier run


def test_the_page_of_default_kernels_tells_what_is_left() -> None:
    good = [models.ArchitectureRow(1e-9, "OK", "OK")]
    whole = default_kernels.DefaultKernelsResult(good, 80, 290)
    left = default_kernels.DefaultKernelsResult(good, 90, 195, 56, 8, {"CPY: not cut": 2, "SSM_CONV: not cut": 2})
    failed = default_kernels.DefaultKernelsResult([models.ArchitectureRow(1.0, "FAIL", "OK")], 80)
    text = default_kernels.page(
        {"whole": whole, "left": left, "none": default_kernels.DefaultKernelsResult(absent=True)}
    )
    assert "Of 2 architectures 2 pass, with the test's limits. 1 of these run wholly on the device" in text
    assert "| left | yes | 90 | 195 | 8 of 56 | CPY, SSM_CONV: not cut |\n" in text
    assert default_kernels.known(text) == {"whole": False, "left": True}
    assert default_kernels.worse({"whole": whole, "left": left}, text) == []
    assert default_kernels.worse({"whole": left, "left": failed, "new": left}, text) == ["whole", "left", "new"]


def test_the_page_of_layers_tells_what_is_in_groups() -> None:
    log = """\
ggml-neuron: 300 ops ran in groups, in 10 launches, 30.0 ops each
ggml-neuron: 100 ops were in no group: 90 because no group has such a node; 10 because their groups have other nodes beside them
"""
    model = default_kernels.DefaultKernelsResult(
        [models.ArchitectureRow(1e-9, "OK", "OK")], 80, 290, ran=400, fused=2e-12
    )
    model.folds = [folded_layers.Folded(270, 10, 4, 7)]
    default_kernels._add_groups(model, log)
    odd = default_kernels.DefaultKernelsResult(
        [models.ArchitectureRow(1.0, "FAIL", "OK")], 7, folds=[folded_layers.Folded(9, 2, 2, 1, "none")]
    )
    found = {"llama": model, "odd": odd, "none": default_kernels.DefaultKernelsResult(absent=True)}
    text = default_kernels.layers_page(found)
    assert "Of 2 architectures 1 pass" in text and "75% of all ops" in text
    assert "\n- 90: no group has such a node\n- 10: their groups have other nodes beside them\n" in text
    assert "In 1 architectures one kernel computes several layers; not in odd: none." in text
    others = "90 no group has such a node; 10 their groups have other nodes beside them"
    assert f"| llama | yes | 80 | 75% | 30.0 | 2.0e-12 | 270 → 10 (4) | {others} |\n" in text
    assert "| odd | no | 7 |  |  |  | no |  |\n" in text
    assert default_kernels.DefaultKernelsResult.from_json(asdict(model)) == model


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (
            '{op: "ssm_conv", inputs: ["(67,16,1,1)/f32", "(4,16,1,1)/f32"], output: "(16,64,1,1)/f32"}',
            "SSM_CONV: not cut along tokens",
        ),
        (
            '{op: "mul_mat", inputs: ["(32,8,4,1)/f16", "(32,64,4,1)/f32"], output: "(8,64,4,1)/f32"}',
            "MUL_MAT: these tensors are not cut along tokens",
        ),
        (
            '{op: "sqr", inputs: ["(32,64,1,1)/f32"], output: "(32,64,1,1)/f32"}',
            "SQR: no kernel for other numbers of tokens",
        ),
    ],
)
def test_the_reason_for_each_node_without_a_kernel_is_reported(entry: str, reason: str) -> None:
    builder = models.CachingBuilder()
    assert default_kernels.reasons({entry: None}, builder) == {reason: 1}
    assert default_kernels.reasons({entry: "no emitter"}, builder) == {"no emitter": 1}


@pytest.mark.parametrize(
    ("architecture", "weights", "flash_attn", "n_ctx", "fuse", "form"),
    [
        ("llama", np.float16, "on", 256, "layer", "none"),
        pytest.param("llama", np.float16, "on", 256, "layer", "transposed", marks=pytest.mark.long),
        # attention of 256 cells also uses the kernels for 512, the only ones
        pytest.param("llama", np.float16, "off", 512, "none", "none", marks=pytest.mark.long),
        pytest.param("qwen3", gguf.GGMLQuantizationType.Q8_0, "on", 256, "none", "none", marks=pytest.mark.long),
        pytest.param("qwen3", gguf.GGMLQuantizationType.Q8_0, "on", 256, "none", "planes", marks=pytest.mark.long),
        pytest.param("qwen3", gguf.GGMLQuantizationType.Q4_K, "on", 256, "none", "none", marks=pytest.mark.long),
        pytest.param("llama", gguf.GGMLQuantizationType.Q4_K, "on", 256, "layer", "planes", marks=pytest.mark.long),
        pytest.param("llama", gguf.GGMLQuantizationType.Q4_K, "on", 256, "layer", "auto", marks=pytest.mark.long),
    ],
)
def test_a_model_is_derived_built_and_run(
    programs: harness.Programs,
    tmp_path: Path,
    architecture: str,
    weights: type[np.floating] | gguf.GGMLQuantizationType,
    flash_attn: str,
    n_ctx: int,
    fuse: str,
    form: str,
) -> None:
    """The kernels that are derived from a random model's header compute every layer: the logits of a prompt at once, in
    calls with a number of tokens that has no kernels, and token by token.
    """
    model = tmp_path / "random.gguf"
    random_llama.write(model, architecture=architecture, weights=weights)
    output = tmp_path / "random.yaml"
    arguments = ["model", model, "-o", output, "--n-ctx", n_ctx, "--n-kv", n_ctx, "--flash-attn", flash_attn]
    arguments += ["--target", harness.target(), "--fuse", fuse, "--weights", form]
    # The tokens of the prompt, and 1, with which llama.cpp checks whether the device has flash attention. Kernels for
    # other numbers compute the warm-up of two tokens and calls of 13 and 5.
    arguments += ["--n-tokens", f"1,8,{PROMPT_TOKENS}"]
    arguments += ["--exporter", derived_kernels.exporter(), "--llama-cpp", programs.llama_cpp]
    assert cli.run(list(map(str, arguments))) == 0
    (request,) = manifest.load([output], Catalog([builtin_library()]))
    built = harness.build_request(request, tmp_path / "kernels")
    assert (built.failed, built.refused) == ({}, {})

    def run(name: str, environment: dict[str, str], layers: int, tokens: int, *more: str) -> tuple[np.ndarray, str]:
        done = programs.run(
            "llama-results",
            *("--model", model, "--output", tmp_path / name, "--prompt", PROMPT, "--ctx-size", n_ctx),
            *("--flash-attn", flash_attn),
            # llama.cpp also reserves memory for a call of this many tokens
            *("--ubatch-size", tokens, "--gpu-layers", layers, "--verbose", *more),
            environment=environment | {"GGML_SCHED_DEBUG": "2"},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        (tensor,) = (t for t in gguf.GGUFReader(tmp_path / name).tensors if t.name == "logits")
        return np.asarray(tensor.data, np.float64), done.stdout + done.stderr

    without = programs.environment()
    del without["GGML_BACKEND_PATH"]
    cpu, _ = run("cpu.gguf", without, 0, PROMPT_TOKENS)
    assert PROMPT_TOKENS in cpu.shape
    assert cpu.std() > 0.1
    # The embedding table is in device memory in the file's order; if it is also the output's matrix, it is in no
    # layout.
    tables = [(13, TABLE)] if form == "none" else []
    for tokens, more in ((PROMPT_TOKENS, ()), (13, ()), (1, ()), *tables):
        environment = programs.environment(kernels=tmp_path / "kernels", log=True)
        device, log = run("device.gguf", environment, 99, tokens, *more)
        assert device.shape == cpu.shape
        error = ((device - cpu) ** 2).mean() / (cpu**2).mean()
        print(f"{architecture}, {tokens} tokens per call{' '.join(('', *more))}: NMSE {error:.2e}")
        assert error <= 1e-3
        # all weights except norms are in the buffers that the kernels' layouts require
        sizes = {
            name: float(size) for name, size in re.findall(r"(NEURON0\w*) model buffer size =\s*([\d.]+) MiB", log)
        }
        assert max(sizes, key=sizes.__getitem__) == "NEURON0" + BUFFERS.get(form, f"_{form}")
        ran = harness.ran(log)
        assert ran["device"].total() > 0
        assert ran["cpu"].total() == 0
        # by default llama.cpp keeps the embedding of the input tokens on the CPU
        assert set(models.dispatched(log)["cpu"]) == (set() if more else {"GET_ROWS"})
        assert "because no kernel computes them" not in log and "no kernel for" not in log
        grouped = re.search(r"(\d+) ops ran in groups", log)
        assert (fuse == "none") == (grouped is None)
        assert grouped is None or int(grouped[1]) >= 0.9 * ran["device"].total()


LONGEST = 512
"""The longest `--n-kv` of `long_context`'s kernels."""


@pytest.fixture(scope="module")
def long_context(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a model with a context of 32,768 cells, and kernels for at most `LONGEST` cells."""
    folder = tmp_path_factory.mktemp("long_context")
    model = folder / "model.gguf"
    random_llama.write(model, size=random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_ctx=32768))
    any_tokens.derive(
        programs,
        any_tokens.RandomModel("llama"),
        model,
        folder / "kernels",
        n_tokens=(1, 64),
        n_ctx=None,
        fuse="layer",
        more=("--n-kv", str(LONGEST)),
    )
    return model, folder / "kernels"


@pytest.mark.parametrize("options", [(), ("--ctx-size", 256)])
def test_defaults_of_llama_cpp_use_all_kernels(
    programs: harness.Programs, long_context: tuple[Path, Path], tmp_path: Path, options: tuple[object, ...]
) -> None:
    """With the model's own context, and with a cache that is shorter than the kernels' and fitted to memory."""
    model, kernels = long_context
    arguments = ("--model", model, "--output", tmp_path / "results.gguf", "--prompt", PROMPT, *options)
    done = programs.run("llama-results", *arguments, environment=programs.environment(kernels=kernels, log=True))
    assert done.returncode == 0, done.stderr
    ran = harness.ran(done.stderr)
    assert ran["device"]["FLASH_ATTN_EXT"] > 0
    assert ran["cpu"].total() == 0
    assert f"{ran['device'].total()} ops ran in groups" in done.stderr
    assert "because no kernel computes them" not in done.stderr
    assert "no graph used" not in done.stderr


def test_attention_to_more_cells_than_kernels_is_one_line(
    programs: harness.Programs, long_context: tuple[Path, Path], tmp_path: Path
) -> None:
    model, kernels = long_context
    prompt = "a" * (2 * LONGEST)
    arguments = ("--model", model, "--output", tmp_path / "results.gguf", "--prompt", prompt, "--ubatch-size", 64)
    done = programs.run("llama-results", *arguments, environment=programs.environment(kernels=kernels, log=False))
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^ggml-neuron: (.*(?:no kernel for|a call attends).*)$", done.stderr, re.MULTILINE)
    assert lines == [
        f"a call attends to {LONGEST + 256} cells, more than the longest --n-kv of kernelgen model, {LONGEST}: the CPU computes "
        "such attention"
    ]


def test_the_page_of_layers_has_all_architectures_and_how_they_fold(programs: harness.Programs, tmp_path: Path) -> None:
    written = default_kernels.PAGES["layer"].read_text(encoding="utf-8")
    rows = {
        cells[0]: cells for line in written.splitlines() if (cells := line.strip("| ").split(" | "))[1:2] == ["yes"]
    }
    known = default_kernels.known(default_kernels.PAGE.read_text(encoding="utf-8"))
    assert rows.keys() == known.keys()
    assert f"Of {len(rows)} architectures {len(rows)} pass" in written
    program = exporter.find(derived_kernels.exporter(), programs.llama_cpp)
    for name, file in derived_kernels.save(programs, f"^{LAYERED}$", tmp_path):
        folded = folded_layers.folded(file, tmp_path, program, default_kernels.N_CTX)
        assert folded.why == "" and folded.most > 1 and folded.launches < 0.1 * folded.nodes
        assert f" | {folded.nodes} → {folded.launches} ({folded.kernels}) |" in f"| {' | '.join(rows[name])} |"


@pytest.mark.long
def test_layers_compute_a_model_in_memory_and_its_file(programs: harness.Programs, tmp_path: Path) -> None:
    """In memory each layer has its own factors of rope; in the file all layers share them."""
    runner = default_kernels.DefaultKernelsRunner(programs, tmp_path, 1, "layer")
    model = runner.do(LAYERED, lambda stage, count: None)
    assert model.passed, model.failure
    assert [row.roundtrip for row in model.rows] == ["OK"]
    assert model.grouped == model.ran > 0
    assert default_kernels.DefaultKernelsResult.from_json(asdict(model)) == model
