"""Whole models on the simulated device: test-llama-archs, and a random Llama from a GGUF file."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import gguf
import harness
import numpy as np
import pytest
import random_llama

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2")

ALL_LAYERS = 99

# llama.cpp itself keeps the embedding of the input tokens on the CPU.
ON_THE_CPU = {"GET_ROWS"}

# "llama" is also run with experts: no emitter knows the first three, and the others lie between them.
EXPERTS = {"ARGSORT", "MUL_MAT_ID", "REPEAT", "MUL", "SWIGLU"}

# 44 tokens: a start, a space, and one for each character. llama-results reserves no room to align the tokens in its file, so that
# their number must be a multiple of four, and so must the vocabulary's.
PROMPT = "A NeuronCore computes what its kernels say"

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

# A line of the scheduler's own log: "node # 12 (   MUL_MAT):  Qcur-0 (  16K) [NEURO         ] use=…"
_NODE = re.compile(r"node #\s*(?P<index>\d+) \(\s*(?P<op>\S+)\s*\):.*?\) \[\s*(?P<backend>\S+)\s")


def dispatched(log: str) -> dict[str, Counter[str]]:
    """Returns how many nodes of each op the scheduler gave to the device and to the CPU, from a log with GGML_SCHED_DEBUG=2.

    The log cuts names of backends after five characters and of ops after ten. Graphs of which the device has nothing don't count:
    they are the CPU's own, which the results are compared with.
    """
    found: dict[str, Counter[str]] = {"device": Counter(), "cpu": Counter()}
    graph: dict[str, Counter[str]] = {"device": Counter(), "cpu": Counter()}
    last = -1

    def end() -> None:
        for where, ops in graph.items():
            if graph["device"]:
                found[where] += ops
        for where in graph:
            graph[where] = Counter()

    for match in _NODE.finditer(log):
        if int(match["index"]) <= last:
            end()
        last = int(match["index"])
        graph["device" if match["backend"].startswith("NEURO") else "cpu"][match["op"]] += 1
    end()
    return found


@dataclass(frozen=True)
class Row:
    """One row of test-llama-archs."""

    nmse: float
    status: str
    roundtrip: str


def architecture_rows(output: str) -> dict[str, list[Row]]:
    """Returns the rows of test-llama-archs' table for the device, by architecture."""
    found: dict[str, list[Row]] = {}
    for line in _COLOUR.sub("", output).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < 6 or "(" not in cells[4]:
            continue
        status, _, error = cells[4].partition("(")
        found.setdefault(cells[1], []).append(Row(float(error.split(")")[0]), status.strip(), cells[5]))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_agrees_with_the_cpu(programs: harness.Programs, tmp_path: Path, architecture: str) -> None:
    arguments = ("-a", f"^{architecture}$", "-b", harness.DEVICE, "-s", "1")

    def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return programs.run("test-llama-archs", *arguments, environment=environment, preload=True)

    kernels, built = harness.build_what_runs(programs, run, tmp_path)
    assert built.failed == {}

    environment = programs.environment(kernels=kernels, log=True) | {"GGML_SCHED_DEBUG": "2"}
    done = programs.run("test-llama-archs", *arguments, "-v", "9", environment=environment, preload=True)
    output = done.stderr + done.stdout
    assert done.returncode == 0, output[-4000:]
    rows = architecture_rows(output)[architecture]
    assert rows
    assert all(row.nmse <= 1e-4 and row.status == "OK" and row.roundtrip == "OK" for row in rows), rows
    ops, done_by = dispatched(output), harness.ran(output)
    print(
        f"{architecture}: NMSE {[row.nmse for row in rows]}; {built.kernels} kernels; {done_by['device'].total()} ops ran on the device"
    )
    print(f"graphs: on the device {dict(ops['device'])}, on the CPU {dict(ops['cpu'])}")
    assert done_by["device"].total() > 0
    assert done_by["cpu"] == Counter()
    assert set(ops["cpu"]) <= (ON_THE_CPU | EXPERTS if architecture == "llama" else ON_THE_CPU)


class TestRandomLlama:
    """A file made here: prompt and generation with every layer on the device."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("model") / "random.gguf"
        random_llama.write(path)
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def kernels(cls, programs: harness.Programs, model: Path) -> Path:
        """Kernels for what both programs ask for, built from one record."""

        def run(environment: dict[str, str]) -> None:
            cls.results(programs, model, model.parent / "scratch.gguf", environment)
            cls.bench(programs, model, environment)

        folder, built = harness.build_what_runs(programs, run, model.parent)
        assert built.failed == {}
        return folder

    @staticmethod
    def results(
        programs: harness.Programs, model: Path, output: Path, environment: dict[str, str], layers: int = ALL_LAYERS
    ) -> str:
        """Writes the logits of every token of the prompt to `output`; returns the log."""
        done = programs.run(
            "llama-results",
            *("--model", model, "--output", output, "--prompt", PROMPT),
            *("--ctx-size", 256, "--gpu-layers", layers, "--fit", "off", "--verbose"),
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
        ops, done_by = dispatched(log), harness.ran(log)
        print(f"NMSE {error:.2e}; {done_by['device'].total()} ops ran on the device")
        print(f"graphs: on the device {dict(ops['device'])}, on the CPU {dict(ops['cpu'])}")
        assert error <= 1e-3
        assert done_by["device"].total() > 0
        assert done_by["cpu"] == Counter()
        assert set(ops["cpu"]) <= ON_THE_CPU

    def test_bench_runs_prompt_and_generation(self, programs: harness.Programs, model: Path, kernels: Path) -> None:
        report = self.bench(programs, model, programs.environment(kernels=kernels))
        assert [(run["n_prompt"], run["n_gen"]) for run in report] == [(32, 0), (0, 8)]
        for run in report:
            print(
                f"prompt {run['n_prompt']}, generated {run['n_gen']}: {run['avg_ts']:.1f} tokens/s on {run['backends']}"
            )
            assert "NEURON" in str(run["backends"])


def logits(path: Path) -> np.ndarray:
    """Returns what llama-results wrote, in double precision."""
    (tensor,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "logits")
    return np.asarray(tensor.data, np.float64)
