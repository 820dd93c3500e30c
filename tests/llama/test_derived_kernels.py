"""Models run on the kernels that `kernelgen model` derives from their headers: llama.cpp's programs get the CPU's results."""

from __future__ import annotations

import re
from pathlib import Path

import architectures
import gguf
import harness
import numpy as np
import pytest
import random_llama

PROMPT = "A NeuronCore computes what its kernels say"
PROMPT_TOKENS = 44
"""Tokens of PROMPT: a start, a space, and one for each character."""
TABLE = ("--override-tensor", r"token_embd\.weight=NEURON0")
BUFFERS = {"none": "", "auto": "_bf16"}
"""The end of the name of the weights' buffers for a value of `--weights`; for other values the layout is the end."""
Q8_0, Q4_K = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_K


def results(
    programs: harness.Programs, model: Path, output: Path, environment: dict[str, str], *options: object
) -> tuple[np.ndarray, str]:
    """Returns the logits of all tokens of the prompt, in double precision, and the log."""
    words = ("--model", model, "--output", output, "--prompt", PROMPT, "--verbose", *options)
    done = programs.run("llama-results", *words, environment=environment | {"GGML_SCHED_DEBUG": "2"})
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (tensor,) = (t for t in gguf.GGUFReader(output).tensors if t.name == "logits")
    return np.asarray(tensor.data, np.float64), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("architecture", "weights", "flash_attn", "n_ctx", "fuse", "form"),
    [
        ("llama", np.float16, "on", 256, "layer", "none"),
        pytest.param("llama", np.float16, "on", 256, "layer", "transposed", marks=pytest.mark.long),
        # attention of 256 cells also uses the kernels for 512, the only ones
        pytest.param("llama", np.float16, "off", 512, "none", "none", marks=pytest.mark.long),
        pytest.param("qwen3", Q8_0, "on", 256, "none", "none", marks=pytest.mark.long),
        pytest.param("qwen3", Q8_0, "on", 256, "none", "planes", marks=pytest.mark.long),
        pytest.param("qwen3", Q4_K, "on", 256, "none", "none", marks=pytest.mark.long),
        pytest.param("llama", Q4_K, "on", 256, "layer", "planes", marks=pytest.mark.long),
        pytest.param("llama", Q4_K, "on", 256, "layer", "auto", marks=pytest.mark.long),
    ],
)
def test_a_model_is_derived_built_and_run(
    programs: harness.Programs,
    tmp_path: Path,
    architecture: str,
    weights: random_llama.Weights,
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
    # The tokens of the prompt, and 1, with which llama.cpp checks whether the device has flash attention. Kernels for
    # other numbers compute the warm-up of two tokens and calls of 13 and 5.
    options = {"n_tokens": (1, 8, PROMPT_TOKENS), "n_ctx": (n_ctx,), "fuse": fuse, "weights": form}
    more = ("--n-kv", n_ctx, "--flash-attn", flash_attn, "--n-ubatch", 512)
    harness.derive(programs, model, tmp_path / "kernels", *more, **options)

    def run(environment: dict[str, str], layers: int, tokens: int, *more: object) -> tuple[np.ndarray, str]:
        # llama.cpp also reserves memory for a call of this many tokens
        sizes = ("--ctx-size", n_ctx, "--ubatch-size", tokens, "--gpu-layers", layers, "--flash-attn", flash_attn)
        return results(programs, model, tmp_path / "results.gguf", environment, *sizes, *more)

    device_environment = programs.environment(kernels=tmp_path / "kernels", log=True)
    cpu, _ = run(harness.without_device(device_environment), 0, PROMPT_TOKENS)
    assert PROMPT_TOKENS in cpu.shape
    assert cpu.std() > 0.1
    # The embedding table is in device memory in the file's order; if it is also the output's matrix, it is in no
    # layout.
    tables = [(13, TABLE)] if form == "none" else []
    for tokens, more in ((PROMPT_TOKENS, ()), (13, ()), (1, ()), *tables):
        device, log = run(device_environment, 99, tokens, *more)
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
        assert ran.device and not ran.cpu
        # by default llama.cpp keeps the embedding of the input tokens on the CPU
        assert set(architectures.dispatched(log)[1]) == (set() if more else harness.ON_THE_CPU)
        assert "because no kernel computes them" not in log and "no kernel for" not in log
        assert ran.grouped == 0 if fuse == "none" else ran.grouped >= 0.9 * ran.device.total()


LONGEST = 512
"""The longest `--n-kv` of `long_context`'s kernels."""


@pytest.fixture(scope="module")
def long_context(programs: harness.Programs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a model with a context of 32,768 cells, and kernels for at most `LONGEST` cells."""
    folder = tmp_path_factory.mktemp("long_context")
    model, kernels = folder / "model.gguf", folder / "kernels"
    random_llama.write(model, size=random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=64, n_ctx=32768))
    harness.derive(programs, model, kernels, "--n-kv", LONGEST, n_tokens=(1, 64), n_ctx=None, fuse="layer")
    return model, kernels


@pytest.mark.parametrize("options", [(), ("--ctx-size", 256)])
def test_defaults_of_llama_cpp_use_all_kernels(
    programs: harness.Programs, long_context: tuple[Path, Path], tmp_path: Path, options: tuple[object, ...]
) -> None:
    """With the model's own context, and with a cache that is shorter than the kernels' and fitted to memory."""
    model, kernels = long_context
    _, log = results(programs, model, tmp_path / "results", programs.environment(kernels=kernels, log=True), *options)
    ran = harness.ran(log)
    assert ran.device["FLASH_ATTN_EXT"] > 0
    assert not ran.cpu
    assert ran.grouped == ran.device.total()
    assert "because no kernel computes them" not in log
    assert "no graph used" not in log


def test_attention_to_more_cells_than_kernels_is_one_line(
    programs: harness.Programs, long_context: tuple[Path, Path], tmp_path: Path
) -> None:
    model, kernels = long_context
    options = ("--prompt", "a" * (2 * LONGEST), "--ubatch-size", 64)
    _, log = results(programs, model, tmp_path / "results", programs.environment(kernels=kernels), *options)
    lines = re.findall(r"^ggml-neuron: (.*(?:no kernel for|a call attends).*)$", log, re.MULTILINE)
    assert lines == [
        f"a call attends to {LONGEST + 256} cells, more than the longest --n-kv of kernelgen model, {LONGEST}: the CPU computes "
        "such attention"
    ]


@pytest.mark.parametrize("cores", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 15))])
def test_layers_are_split_over_cores(programs: harness.Programs, tmp_path: Path, cores: int) -> None:
    """Cores compute batches of a prompt at the same time, each core its own layers; results are those of one core."""
    model, kernels = tmp_path / "model.gguf", tmp_path / "kernels"
    random_llama.write(model, size=random_llama.Size(n_layer=cores + 1))
    harness.derive(programs, model, kernels, n_tokens=(1, 16), n_ctx=(256,))
    one = programs.environment(kernels=kernels, buffers="device", log=True)
    many = one | {"NEURON_RT_NUM_CORES": str(cores), "NEURON_SIMULATOR_LAUNCH_US": "100"}
    batches = ("--gpu-layers", 99, "--ctx-size", 256, "--split-mode", "layer", "--ubatch-size", 16)
    expected, _ = results(programs, model, tmp_path / "one.gguf", one, *batches)
    logits, log = results(programs, model, tmp_path / "many.gguf", many, *batches)
    assert np.array_equal(logits, expected)
    assert "pipeline parallelism enabled" in log
    launched = re.findall(r"core (\d+): \d+ launches, (\d+) of them while another", log)
    assert sorted(int(core) for core, _ in launched) == list(range(cores))
    assert all(int(overlapping) > 0 for _, overlapping in launched)
