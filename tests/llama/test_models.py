"""A random Llama from a GGUF file, on kernels built from a recording: a prompt and generation with every layer on the device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import architectures
import gguf
import harness
import numpy as np
import pytest
import random_llama

ALL_LAYERS = 99
# 44 tokens: a start, a space, and one for each character. llama-results reserves no room to align the tokens in its
# file, so their number must be a multiple of four, and so must the vocabulary's.
PROMPT = "A NeuronCore computes what its kernels say"


def read_logits(path: Path) -> np.ndarray:
    """Returns the logits that llama-results wrote, in double precision."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "logits")
    return np.asarray(tensor.data, np.float64)


def results(
    programs: harness.Programs,
    model: Path,
    output: Path,
    environment: dict[str, str],
    *options: object,
    layers: int = ALL_LAYERS,
) -> str:
    """Writes the logits of all tokens of the prompt to `output`; returns the log."""
    words = ["--model", model, "--output", output, "--prompt", PROMPT, "--ctx-size", 256, "--gpu-layers", layers]
    variables = environment | {"GGML_SCHED_DEBUG": "2"}
    done = programs.run("llama-results", *words, "--verbose", *options, environment=variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def bench(programs: harness.Programs, model: Path, environment: dict[str, str]) -> list[dict[str, object]]:
    """Runs a prompt of 32 tokens, then generates 8; returns llama-bench's own report."""
    words = ["--model", model, "--n-prompt", 32, "--n-gen", 8, "--n-gpu-layers", ALL_LAYERS]
    done = programs.run("llama-bench", *words, "--repetitions", 1, "--output", "json", environment=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    report: list[dict[str, object]] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama.write(path)
    return path


@pytest.fixture(scope="module")
def kernels(programs: harness.Programs, model: Path) -> Path:
    """Returns kernels for both programs, built from one recording; with them a second run records nothing more."""
    recorded, folder = model.parent / "recorded.yaml", model.parent / "kernels"

    def run(environment: dict[str, str]) -> None:
        results(programs, model, model.parent / "scratch.gguf", environment)
        bench(programs, model, environment)

    run(programs.environment(record=recorded))
    harness.build_manifest(recorded, folder)
    before = recorded.read_bytes()
    run(programs.environment(kernels=folder, record=recorded))
    assert recorded.read_bytes() == before
    return folder


def test_logits_agree_with_the_cpu(programs: harness.Programs, model: Path, kernels: Path, tmp_path: Path) -> None:
    environment = programs.environment(kernels=kernels, log=True)
    log = results(programs, model, tmp_path / "device.gguf", environment)
    results(programs, model, tmp_path / "cpu.gguf", harness.without_device(environment), layers=0)
    device, cpu = read_logits(tmp_path / "device.gguf"), read_logits(tmp_path / "cpu.gguf")
    assert device.shape == cpu.shape
    assert cpu.std() > 0.1
    error = float(((device - cpu) ** 2).mean() / (cpu**2).mean())
    ran, (on_device, on_cpu) = harness.ran(log), architectures.dispatched(log)
    print(f"NMSE {error:.2e}; {ran.device.total()} ops ran; graphs: on the device {on_device}, on the CPU {on_cpu}")
    assert error <= 1e-3
    assert ran.device and not ran.cpu
    assert set(on_cpu) <= harness.ON_THE_CPU


@pytest.mark.parametrize("cores", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 15))])
def test_layers_are_split_over_cores(programs: harness.Programs, kernels: Path, tmp_path: Path, cores: int) -> None:
    """Cores compute batches of a prompt at the same time, each core its own layers; results are those of one core."""
    model = tmp_path / "model.gguf"
    random_llama.write(model, size=random_llama.Size(n_layer=cores + 1))
    environment = programs.environment(kernels=kernels, buffers="device", log=True)
    batches = ("--split-mode", "layer", "--ubatch-size", 16)
    results(programs, model, tmp_path / "one.gguf", environment, *batches)
    many = environment | {"NEURON_RT_NUM_CORES": str(cores), "NEURON_SIMULATOR_LAUNCH_US": "100"}
    log = results(programs, model, tmp_path / "many.gguf", many, *batches)
    assert (tmp_path / "many.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()
    assert "pipeline parallelism enabled" in log
    launched = re.findall(r"core (\d+): (\d+) launches, (\d+) of them while another", log)
    assert sorted(int(core) for core, _, _ in launched) == list(range(cores))
    assert all(int(overlapping) > 0 for _, _, overlapping in launched)


def test_bench_runs_prompt_and_generation(programs: harness.Programs, model: Path, kernels: Path) -> None:
    report = bench(programs, model, programs.environment(kernels=kernels))
    assert [(run["n_prompt"], run["n_gen"]) for run in report] == [(32, 0), (0, 8)]
    assert all("NEURON" in str(run["backends"]) for run in report)
