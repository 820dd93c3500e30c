"""A model's layers on several NeuronCores (-sm layer, -ts) give the logits of one core."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from programs import ROOT, Programs, build

sys.path.insert(0, str(ROOT / "tools" / "llama_cpp"))

import random_llama

LAYERS = 15
PROMPT = "A NeuronCore computes what its kernels say"  # 44 tokens: llama-results requires a multiple of four


@dataclass(frozen=True)
class Model:
    """A model, its kernels, and its logits on one core."""

    path: Path
    kernels: Path
    logits: np.ndarray


def results(
    programs: Programs, model: Path, cores: int | None, *arguments: str, **variables: str | Path
) -> tuple[np.ndarray, str]:
    """Returns the logits of the prompt's tokens and the log."""
    output = model.parent / f"results-{cores}.gguf"
    output.unlink(missing_ok=True)
    command: list[str | Path] = [programs.llama_cpp / "llama-results", "-m", model, "-o", output, "-p", PROMPT]
    command += ["-ngl", "99", "-c", "256", "-sm", "layer", "--verbose", *arguments]
    done = subprocess.run(
        command,
        env=programs.environment(
            GGML_BACKEND_PATH=programs.find("libggml-neuron.so"),
            GGML_NEURON_BUFFERS="device",
            NEURON_RT_NUM_CORES=str(cores) if cores else None,
            **variables,
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    (tensor,) = (t for t in gguf.GGUFReader(output).tensors if t.name == "logits")
    return np.array(tensor.data), log


@pytest.fixture(scope="module")
def model(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("cores")
    path = folder / "model.gguf"
    size = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=LAYERS, n_ctx=256)
    random_llama.write(path, size=size)
    results(programs, path, 1, GGML_NEURON_RECORD=folder / "model.graphs")
    build(folder / "model.graphs", folder / "kernels")
    logits, log = results(programs, path, 1, GGML_NEURON_KERNEL_DIR=folder / "kernels")
    assert set(layers_of(log).values()) == {"NEURON0"}
    assert logits.std() > 0.1
    return Model(path, folder / "kernels", logits)


def layers_of(log: str) -> dict[int, str]:
    """Returns the device of each layer from llama.cpp's log."""
    return {int(n): device for n, device in re.findall(r"layer\s+(\d+) assigned to device (\w+)", log)}


@pytest.mark.parametrize(
    ("cores", "split", "used"),
    [
        (2, "3,1", 2),
        pytest.param(2, "", 2, marks=pytest.mark.long),
        pytest.param(4, "", 4, marks=pytest.mark.long),
        pytest.param(4, "1,0,2,1", 3, marks=pytest.mark.long),
        pytest.param(16, "", 15, marks=pytest.mark.long),  # ggml takes at most 15 devices
    ],
)
def test_layers_on_several_cores(programs: Programs, model: Model, cores: int, split: str, used: int) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": model.kernels, "GGML_NEURON_LOG": "1"}
    logits, log = results(programs, model.path, cores, *(("-ts", split) if split else ()), **variables)
    devices = layers_of(log)
    assert len(devices) == LAYERS + 1
    assert len(set(devices.values())) == used, devices
    if split == "3,1":
        assert list(devices.values()).count("NEURON0") == 12
    assert " 0 ops ran on the CPU instead of a NeuronCore" in log
    assert np.array_equal(logits, model.logits)


@pytest.mark.parametrize(
    ("arguments", "used"), [([], ["NEURON0"]), (["-dev", "NEURON0,NEURON1"], ["NEURON0", "NEURON1"])]
)
def test_one_core_is_the_default(programs: Programs, model: Model, arguments: list[str], used: list[str]) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": model.kernels, "NEURON_SIMULATOR_CORES": "2"}
    logits, log = results(programs, model.path, None, *arguments, **variables)
    assert sorted(set(layers_of(log).values())) == used
    assert ("ggml-neuron: 1 of 2 NeuronCores is used: -dev NEURON0,NEURON1, -sm tensor, " in log) == (len(used) == 1)
    assert np.array_equal(logits, model.logits)


@pytest.mark.parametrize("program", ["llama-bench", pytest.param("llama-results", marks=pytest.mark.long)])
def test_loading_says_what_to_use_instead_of_a_split_by_rows(
    programs: Programs, model: Model, tmp_path: Path, program: str
) -> None:
    """Also with llama-bench, which silences llama.cpp's own messages."""
    command: list[str | Path] = [programs.llama_cpp / program, "-m", model.path, "-ngl", "99", "-sm", "row"]
    command += (
        ["-p", "44", "-n", "0", "-r", "1"]
        if program == "llama-bench"
        else ["-o", tmp_path / "results.gguf", "-p", PROMPT]
    )
    done = subprocess.run(
        command,
        env=programs.environment(
            GGML_BACKEND_PATH=programs.find("libggml-neuron.so"),
            GGML_NEURON_KERNEL_DIR=model.kernels,
            NEURON_RT_NUM_CORES="2",
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = re.findall(r"^ggml-neuron: (NeuronCores do not.*\n.*)$", done.stderr, re.MULTILINE)
    assert said == [
        "NeuronCores do not support -sm row\n"
        "ggml-neuron:     use -sm tensor, which splits weights by heads and the like, or -sm layer, which gives each core whole layers"
    ], done.stderr
    assert done.returncode == 1, done.stderr  # not a signal
    assert "ggml_abort" not in done.stderr


def test_every_core_at_once(programs: Programs, kernels: Path) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_BUFFERS": "device", "NEURON_RT_NUM_CORES": "16"}
    result = programs.run("scenarios", "every-core", **variables)
    assert result.stdout == "every-core: ok\n", result.stderr
