"""Runs the backend in real processes in which the simulator fails on purpose (NEURON_SIMULATOR_FAULT).

Whatever fails, the process must end with right results or with an error that names the failure: it must not crash, and
no result may be wrong.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
import random_llama
from programs import SCENARIOS, Programs, build

WAYS = {"step": "the whole step", "parts+sums": "a part and the sum before it"}
"""The parts of a model that are one program on all cores, by the names of `kernelgen model --fuse`."""

CORES = 2
WAIT = {"NEURON_RT_EXEC_TIMEOUT": "2", "NEURON_SIMULATOR_LOAD_TIMEOUT": "2"}
"""The timeout, in seconds, of a core that waits for others."""

TOLERANCE = 1e-3
"""The largest allowed normalised mean squared error of logits, if the CPU computes what a kernel could not."""

FAILURES = re.compile(
    r"no memory|(the \w+ execution: |graph_compute: )GGML status: error.*|(graph_compute|the \w+ execution) failed|no kernel for .*"
)
"""The allowed output of a scenario after a failure. Any other output reports a wrong result."""

PROMPT = "A NeuronCore computes what its kernels say"  # 44 tokens: llama-results requires a multiple of four

NOT_A_RESULT = ("not-a-number",)  # its status is compared, which faults change

NO_BUFFER = re.compile(
    r"^ggml-neuron: \w+: no buffer of .*(\n[\d.]+ E \w+: failed to allocate .*)?\Z",
    re.MULTILINE,
)
"""The end of a log if the backend has no buffer left: ggml may also name the buffer that it did not get."""

NO_PART = re.compile(
    r"^ggml-neuron: \w+: no buffer of .*(\n[\d.]+ E \w+: failed to allocate .*)?"
    r"\n.*ggml-backend-meta\.cpp:\d+: GGML_ASSERT\(\S+bufs\[i\]\) failed$",
    re.MULTILINE,
)
"""ggml's meta backend, which splits weights, always ends like this if a device has no buffer left."""

REPORTED = re.compile(r"^(ggml-neuron: |.*ggml-neuron: \w+ing (a buffer|tensor '.*'): core \d+: )", re.MULTILINE)
"""A line that names the failure."""


@dataclass(frozen=True)
class RoundsBench:
    """The inputs of rounds.

    Attributes:
        programs: the programs built from C++.
        kernels: the scenarios' kernels.
        model: a model.
        model_kernels: its kernels, and those of its parts on two cores.
        logits: its logits without a fault.
        folder: the folder for files.
        sums: for rounds with programs that contain sums: another model, whose parts are equal on both cores, and its logits.
        sums_kernels: the kernels of that model, by way.
    """

    programs: Programs
    kernels: Path
    model: Path
    model_kernels: Path
    logits: np.ndarray
    folder: Path
    sums: tuple[Path, np.ndarray] | None = None
    sums_kernels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """A process and its faults.

    Attributes:
        what: `scenarios`; `model`; `parts` of a model on two cores (-sm tensor); or one of `WAYS`, with the suffix `
            freed` for llama-bench, which frees everything when a call fails.
        fault: NEURON_SIMULATOR_FAULT.
        buffers: GGML_NEURON_BUFFERS.
    """

    what: str
    fault: str
    buffers: str

    def __str__(self) -> str:
        return f"{self.what}, {self.buffers} buffers, {self.fault}"


def make_bench(programs: Programs, folder: Path, kernels: Path | None = None) -> RoundsBench:
    """Returns the inputs of rounds, built with the simulator.

    Args:
        programs: the programs built from C++.
        folder: the folder for files.
        kernels: the scenarios' kernels; built if None.
    """
    if kernels is None:
        recording = folder / "scenarios.graphs"
        _scenarios(programs, folder, GGML_NEURON_RECORD=recording, GGML_NEURON_BUFFERS="device")
        kernels = folder / "kernels"
        build(recording, kernels)
    model, recording = folder / "model.gguf", folder / "model.graphs"
    random_llama.write(model, size=random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=2, n_ctx=256))
    done = _model(programs, model, folder / "recorded.gguf", GGML_NEURON_RECORD=recording, GGML_NEURON_BUFFERS="device")
    assert done.returncode == 0, done.stderr
    done = _model(
        programs,
        model,
        folder / "recorded.gguf",
        parts=True,
        GGML_NEURON_RECORD=recording,
        GGML_NEURON_BUFFERS="device",
    )
    assert done.returncode == 0, done.stderr
    build(recording, folder / "model")
    done = _model(programs, model, folder / "right.gguf", GGML_NEURON_KERNEL_DIR=folder / "model")
    assert done.returncode == 0, done.stderr
    return RoundsBench(programs, kernels, model, folder / "model", read_logits(folder / "right.gguf"), folder)


def add_sums(bench: RoundsBench) -> RoundsBench:
    """Adds the inputs of rounds with programs that contain sums."""
    folder, programs = bench.folder / "sums", bench.programs
    folder.mkdir()
    model, recorded = folder / "model.gguf", folder / "ops.graphs"
    random_llama.write(model, size=random_llama.Size(n_embd=128, n_head=2, n_head_kv=2, n_ff=256, n_layer=2, n_ctx=256))
    recording = {"GGML_NEURON_RECORD": recorded, "GGML_NEURON_BUFFERS": "device"}
    for done in (
        _model(programs, model, folder / "recorded.gguf", parts=True, **recording),
        _bench(programs, model, **recording),
        _model(programs, model, folder / "right.gguf", GGML_NEURON_KERNEL_DIR=bench.model_kernels),
    ):
        assert done.returncode == 0, done.stderr
    build(recorded, folder / "ops")
    logits, kernels = read_logits(folder / "right.gguf"), {}
    for way in WAYS:
        manifest = folder / f"{way}.yaml"
        fused = [sys.executable, "-m", "kernelgen", "model", recorded, "--fuse", way, "-o", manifest]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).absolute().parents[1])}
        subprocess.run(fused, env=environment, check=True, capture_output=True)
        build(manifest, folder / way)
        kernels[way] = f"{folder / way}:{folder / 'ops'}"
        used = {"GGML_NEURON_KERNEL_DIR": kernels[way], "GGML_NEURON_BUFFERS": "device", "GGML_NEURON_LOG": "1"}
        for done in (
            _model(programs, model, folder / "right.gguf", parts=True, **used),
            _bench(programs, model, **used),
        ):
            assert "has kernels with reductions inside" in done.stderr, done.stderr
            assert "no kernels for all ranks" not in done.stderr, done.stderr
    return replace(bench, sums=(model, logits), sums_kernels=kernels)


def _scenarios(programs: Programs, folder: Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    command = [programs.find("scenarios"), programs.find("libggml-neuron.so"), programs.llama_cpp]
    return _run(programs, [*command, *(s for s in SCENARIOS if s not in NOT_A_RESULT), "scheduled"], folder, variables)


def _model(
    programs: Programs, model: Path, output: Path, *, parts: bool = False, **variables: str | Path
) -> subprocess.CompletedProcess[str]:
    output.unlink(missing_ok=True)
    arguments: list[str | Path] = ["-m", model, "-o", output, "-p", PROMPT]
    arguments += ["-ngl", "99", "-c", "256"]
    variables = {"GGML_BACKEND_PATH": programs.find("libggml-neuron.so"), **variables}
    if parts:
        arguments += ["-sm", "tensor"]
        variables["NEURON_RT_NUM_CORES"] = str(CORES)
    return _run(programs, [programs.llama_cpp / "llama-results", *arguments], output.parent, variables)


def _bench(programs: Programs, model: Path, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    """Generates some tokens over several cores, and frees the context and the model, also when a call fails."""
    command = [programs.llama_cpp / "llama-bench", "-m", model, "-p", "0", "-n", "6", "-r", "1", "-t", "1", "-fa", "1"]
    variables = {
        "GGML_BACKEND_PATH": programs.find("libggml-neuron.so"),
        "NEURON_RT_NUM_CORES": str(CORES),
        **variables,
    }
    return _run(programs, [*command, "-ngl", "99", "-sm", "tensor"], model.parent, variables)


def _run(
    programs: Programs, command: Sequence[str | Path], folder: Path, variables: dict[str, str | Path]
) -> subprocess.CompletedProcess[str]:
    """Runs a program; caches XLA's compiled code for the next rounds."""
    return subprocess.run(
        command,
        env=programs.environment(
            GGML_NO_BACKTRACE="1", NEURON_SIMULATOR_THREADS="1", NEURON_SIMULATOR_CACHE=folder / "xla", **variables
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def read_logits(path: Path) -> np.ndarray:
    """Returns the logits that llama-results wrote, in double precision."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    return np.array(found["logits"].data, np.float64)


def play(bench: RoundsBench, one: Round) -> str:
    """Runs a round.

    Returns:
        The outcome: `right`, `an error` or `ended` (the program ended itself, and printed the reason).

    Raises:
        AssertionError: it crashed, a result is wrong, or an error was not reported.
    """
    variables = {"NEURON_SIMULATOR_FAULT": one.fault, "GGML_NEURON_BUFFERS": one.buffers}
    output, right = bench.folder / "round.gguf", bench.logits
    way = one.what.removesuffix(" freed")
    if way in WAYS:
        assert bench.sums is not None
        model, right = bench.sums
        variables |= WAIT | {"GGML_NEURON_KERNEL_DIR": bench.sums_kernels[way]}
        if one.what != way:
            done = _bench(bench.programs, model, **variables)
            log = f"{one}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
            return _ending_of_bench(done, log)
        done = _model(bench.programs, model, output, parts=True, **variables)
    elif one.what != "scenarios":
        variables["GGML_NEURON_KERNEL_DIR"] = str(bench.model_kernels)
        done = _model(bench.programs, bench.model, output, parts=one.what == "parts", **variables)
    else:
        done = _scenarios(bench.programs, bench.folder, GGML_NEURON_KERNEL_DIR=bench.kernels, **variables)
    log = f"{one}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    if one.what != "scenarios" and done.returncode == 0:
        got = read_logits(output)
        error = float(((got - right) ** 2).sum() / (right**2).sum())
        assert error <= TOLERANCE, f"the logits' error is {error}: {log}"
        return "right"
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    if one.what == "scenarios":
        wrong = {name: text for name, text in said.items() if text != "ok" and not FAILURES.fullmatch(text)}
        assert not wrong, f"{wrong}: {log}"
        if done.returncode == 0:
            return "right"
    assert REPORTED.search(done.stderr), f"what failed is not said: {log}"
    if done.returncode == -signal.SIGSEGV and one.what != "scenarios":
        # llama-results does not check that it got a context. A thread writes its log, so the last lines may be missing.
        # Then the backend's last line, about a missing buffer, is followed by llama.cpp's line about that buffer, or by
        # nothing.
        refused = NO_BUFFER.search(done.stderr.rstrip())
        assert refused or "failed to create context with model" in done.stderr, f"a crash: {log}"
        return "ended"
    splits = one.what == "parts" or way in WAYS
    if done.returncode == -signal.SIGABRT:
        # Nor does it catch exceptions that it throws. ggml can only abort if data did not arrive.
        ends = [re.compile(r"failed to decode batch|ggml-neuron: \w+ing .*core \d")] + [NO_PART] * splits
        ended = any(end.search(done.stderr) for end in ends)
        assert ended, f"a crash: {log}"
        return "ended"
    assert done.returncode in (1, 3), f"a crash: {log}"
    return "an error"


def _ending_of_bench(done: subprocess.CompletedProcess[str], log: str) -> str:
    """Returns the outcome of llama-bench, which ends with 1 after it has freed everything."""
    if done.returncode == 0:
        return "right"
    assert REPORTED.search(done.stderr), f"what failed is not said: {log}"
    if done.returncode == -signal.SIGABRT:  # ggml can only abort if it gets no buffer, or if data did not arrive
        ends = (NO_PART, re.compile(r"ggml-neuron: \w+ing .*core \d"))
        assert any(end.search(done.stderr) for end in ends), f"a crash: {log}"
        return "ended"
    assert done.returncode == 1, f"a crash: {log}"
    return "an error"
