"""A prompt of several calls: the calls before the last read no logits, and take as many launches as the last one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, Programs, build, kernelgen

sys.path.insert(0, str(ROOT / "tools" / "llama_cpp"))

import random_llama

LAYERS = 3
CALL = 64
"""Tokens per call."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "model.gguf"
    random_llama.write(path, size=random_llama.Size(n_embd=128, n_head=4, n_head_kv=4, n_ff=256, n_layer=LAYERS))
    return path


def launches(programs: Programs, exporter: Path, model: Path, calls: int, *options: str) -> int:
    """Returns the number of launches of a prompt of some calls, with the kernels that are derived for one core."""
    folder = model.parent / "_".join(options).replace("-", "")
    manifest = folder.with_suffix(".yaml")
    if not manifest.exists():
        sizes = ["--n-ctx", "256", "--n-kv", "256", "--n-tokens", f"1,{CALL}", "--n-ubatch", str(CALL)]
        paths = ["--target", programs.target, "--exporter", exporter, "--llama-cpp", programs.llama_cpp]
        kernelgen("model", model, "-o", manifest, *options, *sizes, *paths)
        build(manifest, folder)
    words = ["-p", str(calls * CALL), "-n", "0", "-r", "1", "--no-warmup", "-ngl", "99", "-fa", "on"]
    done = subprocess.run(
        [programs.llama_cpp / "llama-bench", "-m", model, *words, "-ub", str(CALL)],
        env=programs.environment(
            GGML_BACKEND_PATH=programs.find("libggml-neuron.so"),
            GGML_NEURON_BUFFERS="device",
            GGML_NEURON_KERNEL_DIR=folder,
            GGML_NEURON_LOG="1",
            NEURON_RT_NUM_CORES="1",
        ),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in done.stderr, done.stderr
    found = re.search(r"core 0: (\d+) launches", done.stderr)
    assert found, done.stderr
    return int(found[1])


@pytest.mark.parametrize(("fuse", "call"), [("step", 1), pytest.param("layer", LAYERS + 1, marks=pytest.mark.long)])
def test_each_call_takes_as_many_launches(
    programs: Programs, exporter: Path, model: Path, fuse: str, call: int
) -> None:
    for calls in (1, 3):
        assert launches(programs, exporter, model, calls, "--fuse", fuse) == calls * call


@pytest.mark.long
def test_without_graph_kernels_of_such_calls_each_op_of_them_is_a_launch(
    programs: Programs, exporter: Path, model: Path
) -> None:
    """A call whose graph kernel is missing runs op by op, as with manifests that have only ops."""
    ops = launches(programs, exporter, model, 3, "--fuse", "none") - launches(
        programs, exporter, model, 1, "--fuse", "none"
    )
    assert launches(programs, exporter, model, 3, "--fuse", "step", "--n-outputs", "1") == 1 + ops
