"""Whole models on the simulated device: test-llama-archs, and a random Llama from a GGUF file."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

import gguf
import harness
import models
import numpy as np
import pytest
import random_llama

from kernelgen.cli.list import architectures

ARCHITECTURES = ("gemma2", *(("llama", "qwen2", "qwen3") if os.environ.get("KERNELGEN_LONG_TESTS") else ()))

ALL_LAYERS = 99

# llama.cpp keeps the embedding of the input tokens on the CPU.
ON_THE_CPU = {"GET_ROWS"}

# 44 tokens: a start, a space, and one for each character. llama-results reserves no room to align the tokens in its
# file, so their number must be a multiple of four, and so must the vocabulary's.
PROMPT = "A NeuronCore computes what its kernels say"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def found(programs: harness.Programs, work: Path) -> dict[str, models.ArchitectureResult]:
    return models.run_all(programs, work, ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_agrees_with_the_cpu(found: dict[str, models.ArchitectureResult], architecture: str) -> None:
    model = found[architecture]
    assert model.failure == ""
    assert model.rows
    assert all(row.ok and row.roundtrip == "OK" for row in model.rows), model.rows
    assert model.ran > 0
    assert set(model.cpu) <= ON_THE_CPU
    assert model.share >= models.SHARE


def test_kernelgen_lists_what_the_architectures_need(found: dict[str, models.ArchitectureResult]) -> None:
    table = architectures()
    for name, model in found.items():
        assert model.needs == sorted(op for op, names in table.items() if name in names), name


def test_a_result_is_kept_until_something_changes(
    programs: harness.Programs, found: dict[str, models.ArchitectureResult], work: Path
) -> None:
    first = found["gemma2"]
    again = models.run_all(programs, work, ["gemma2"])["gemma2"]
    assert (first.reused, again.reused) == (False, True)
    assert again.rows == first.rows
    result = work / "gemma2" / "result.json"
    result.write_text(result.read_text().replace('"key": "', '"key": "0'))
    assert not models.run_all(programs, work, ["gemma2"])["gemma2"].reused


def test_rows_are_read_as_the_program_prints_them() -> None:
    lines = [
        "|     Model arch.|Device|Config|   NMSE vs. CPU|Roundtrip|",
        "|            clip|Neuron| Dense|\x1b[1;33mSKIP\x1b[0m           |     \x1b[1;33mSKIP\x1b[0m|",
        "|           llama|Neuron| Dense|\x1b[1;32mOK\x1b[0m (1.05e-13)|       \x1b[1;32mOK\x1b[0m|",
        "|           llama|Neuron|   MoE|\x1b[1;31mFAIL\x1b[0m (3.00e-01)|     \x1b[1;32mOK\x1b[0m|",
        "|             bad|Neuron| Dense|\x1b[1;31mFAIL\x1b[0m (toggle) (1.00e-13)|     \x1b[1;32mOK\x1b[0m|",
    ]
    rows = models.architecture_rows("\n".join(lines))
    assert rows == {
        "llama": [
            models.ArchitectureRow(1.05e-13, "OK", "OK", "Neuron", "Dense"),
            models.ArchitectureRow(0.3, "FAIL", "OK", "Neuron", "MoE"),
        ],
        "bad": [models.ArchitectureRow(1e-13, "FAIL", "OK", "Neuron", "Dense")],
    }
    assert [row.ok for row in rows["llama"] + rows["bad"]] == [True, False, False]


class TestRandomLlama:
    """A random model's file: prompt and generation with every layer on the device."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("model") / "random.gguf"
        random_llama.write(path)
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def kernels(cls, programs: harness.Programs, model: Path) -> Path:
        """Returns kernels for both programs, built from one recording."""

        def run(environment: dict[str, str]) -> None:
            cls.results(programs, model, model.parent / "scratch.gguf", environment)
            cls.bench(programs, model, environment)

        folder, built = harness.build_what_runs(programs, run, model.parent)
        assert built.failed == {}
        return folder

    @staticmethod
    def results(
        programs: harness.Programs,
        model: Path,
        output: Path,
        environment: dict[str, str],
        *options: object,
        layers: int = ALL_LAYERS,
    ) -> str:
        """Writes the logits of all tokens of the prompt to `output`; returns the log."""
        done = programs.run(
            "llama-results",
            *("--model", model, "--output", output, "--prompt", PROMPT),
            *("--ctx-size", 256, "--gpu-layers", layers, "--verbose", *options),
            environment=environment | {"GGML_SCHED_DEBUG": "2"},
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout + done.stderr

    @staticmethod
    def bench(programs: harness.Programs, model: Path, environment: dict[str, str]) -> list[dict[str, object]]:
        """Runs a prompt of 32 tokens, then generates 8; returns llama-bench's own report."""
        done = programs.run(
            "llama-bench",
            *("--model", model, "--n-prompt", 32, "--n-gen", 8, "--n-gpu-layers", ALL_LAYERS),
            *("--repetitions", 1, "--output", "json"),
            environment=environment,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        report: list[dict[str, object]] = json.loads(done.stdout)
        return report

    def test_logits_agree_with_the_cpu(
        self, programs: harness.Programs, model: Path, kernels: Path, tmp_path: Path
    ) -> None:
        log = self.results(programs, model, tmp_path / "device.gguf", programs.environment(kernels=kernels, log=True))
        without = programs.environment()
        del without["GGML_BACKEND_PATH"]
        self.results(programs, model, tmp_path / "cpu.gguf", without, layers=0)
        device, cpu = logits(tmp_path / "device.gguf"), logits(tmp_path / "cpu.gguf")
        assert device.shape == cpu.shape
        assert cpu.std() > 0.1
        error = float(((device - cpu) ** 2).mean() / (cpu**2).mean())
        ops, done_by = models.dispatched(log), harness.ran(log)
        print(f"NMSE {error:.2e}; {done_by['device'].total()} ops ran on the device")
        print(f"graphs: on the device {dict(ops['device'])}, on the CPU {dict(ops['cpu'])}")
        assert error <= 1e-3
        assert done_by["device"].total() > 0
        assert done_by["cpu"] == Counter()
        assert set(ops["cpu"]) <= ON_THE_CPU

    @pytest.mark.parametrize("cores", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 15))])
    def test_layers_are_split_over_cores(
        self, programs: harness.Programs, kernels: Path, tmp_path: Path, cores: int
    ) -> None:
        """Cores compute batches of a prompt at the same time, each core its own layers; results are those of one core."""
        model = tmp_path / "model.gguf"
        random_llama.write(model, size=random_llama.Size(n_layer=cores + 1))
        environment = programs.environment(kernels=kernels, buffers="device", log=True)
        batches = ("--split-mode", "layer", "--ubatch-size", 16)
        self.results(programs, model, tmp_path / "one.gguf", environment, *batches)
        many = environment | {"NEURON_RT_NUM_CORES": str(cores), "NEURON_SIMULATOR_LAUNCH_US": "100"}
        log = self.results(programs, model, tmp_path / "many.gguf", many, *batches)
        assert (tmp_path / "many.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()
        assert "pipeline parallelism enabled" in log
        launched = re.findall(r"core (\d+): (\d+) launches, (\d+) of them while another", log)
        assert sorted(int(core) for core, _, _ in launched) == list(range(cores))
        assert all(int(overlapping) > 0 for _, _, overlapping in launched)

    def test_bench_runs_prompt_and_generation(self, programs: harness.Programs, model: Path, kernels: Path) -> None:
        report = self.bench(programs, model, programs.environment(kernels=kernels))
        assert [(run["n_prompt"], run["n_gen"]) for run in report] == [(32, 0), (0, 8)]
        for run in report:
            print(
                f"prompt {run['n_prompt']}, generated {run['n_gen']}: {run['avg_ts']:.1f} tokens/s on {run['backends']}"
            )
            assert "NEURON" in str(run["backends"])


def logits(path: Path) -> np.ndarray:
    """Returns the logits that llama-results wrote, in double precision."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "logits")
    return np.asarray(tensor.data, np.float64)


def test_a_graph_whose_only_device_nodes_have_no_elements(programs: harness.Programs, tmp_path: Path) -> None:
    """Mamba gathers the states of no sequence; no other node has a kernel here."""
    environment = programs.environment(kernels=harness.odd_kernel(tmp_path), buffers="host")
    done = models.run(programs, environment, "^mamba$")
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(models.architecture_rows(done.stdout)) == {"mamba"}
