"""Runs llama.cpp's own test of fused ops, test-fusion, on a small Llama with one kernel per layer.

test-fusion compares the number of launches of each graph kernel with `fusion/NEURON.csv`, and the logits with those
without groups and with the CPU's. It does not notice a row of that file without a count; this test does. To write the
file after an intended change, run test-fusion with `--record` in place of `--check`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, Programs, kernelgen

sys.path.insert(0, str(ROOT / "tools" / "llama_cpp"))

import random_llama

BASELINE = Path(__file__).parent / "fusion" / "NEURON.csv"

ROW = re.compile(
    r"llama +dense +(?P<mode>\w+) +(?P<label>graph-\S+) +(?P<fused>\d+) +(?P<unfused>\d+) +\d+ +(?P<nmse>\S+) +\S+ (?P<status>\w+)$"
)


@pytest.fixture(scope="module")
def model(programs: Programs, exporter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder `models` with a model, beside the folder `kernels` with its kernels."""
    folder = tmp_path_factory.mktemp("fusion")
    (folder / "models").mkdir()
    random_llama.write(folder / "models" / "llama.gguf")
    sizes = ["--n-ctx=512", "--n-tokens=1,32", "--n-ubatch=32", "--n-outputs=1,32", "--flash-attn=on", "--fuse=layer"]
    paths = [f"--exporter={exporter}", f"--llama-cpp={programs.llama_cpp}", f"--target={programs.target}"]
    kernelgen("model", folder / "models" / "llama.gguf", "-o", folder / "llama.yaml", *sizes, *paths)
    kernelgen("build", folder / "llama.yaml", "--compiler", "simulator", "-o", folder / "kernels")
    return folder / "models"


def fusions(text: str) -> dict[tuple[str, str], int]:
    """Returns the counts of a baseline by mode and label."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if not line.startswith("#")]
    return {(mode, label): int(count) for _, _, mode, label, count in rows}


def test_each_layer_is_one_launch(programs: Programs, model: Path) -> None:
    preload = os.environ.get("LLAMA_LOAD_BACKENDS", ROOT / "tools" / "llama_cpp" / "libload_backends.so")
    variables = {
        "GGML_BACKEND_PATH": programs.find("libggml-neuron.so"),
        "GGML_NEURON_KERNEL_DIR": model.parent / "kernels",
        "GGML_NEURON_LOG": "1",
        "LD_PRELOAD": Path(preload).absolute(),
    }
    result = subprocess.run(
        [programs.llama_cpp / "test-fusion", "--models", model, "--device", "NEURON0", "--check", BASELINE],
        env=programs.environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = result.stdout + result.stderr
    rows = [match for match in map(ROW.search, said.splitlines()) if match]
    expected = fusions(BASELINE.read_text())
    assert {(row["mode"], row["label"]): int(row["fused"]) for row in rows} == expected, said
    assert all(row["status"] == "ok" and row["unfused"] == "0" and float(row["nmse"]) <= 1e-6 for row in rows), said
    assert result.returncode == 0, said
    # the layers and the head, in each of two modes
    assert sum(expected.values()) == 2 * (random_llama.Size().n_layer + 1)
    assert "ops were in no group" not in said
    assert " 0 ops ran on the CPU instead of a NeuronCore" in said
