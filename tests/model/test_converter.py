"""`kernelgen model` on Hugging Face checkpoints with llama.cpp's own converter.

NEURON_KERNELGEN_CONVERTER_PYTHON names a Python with the modules that the converter imports; without it these tests are
skipped (docs/reference/model-inputs.md has the command).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernelgen.model.checkpoint import PROGRAM
from kernelgen.model.exporter import Exporter

from .conftest import run_model

VARIABLE = "NEURON_KERNELGEN_CONVERTER_PYTHON"
MAKE = Path(__file__).with_name("make_checkpoints.py")
NAMES = ("llama", "llama31", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral")


@pytest.fixture(scope="module")
def python() -> str:
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no Python that has torch, transformers and sentencepiece")
    return os.environ[VARIABLE]


@pytest.fixture(scope="module")
def checkpoints(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the checkpoints of `NAMES`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    subprocess.run([python, MAKE, folder], check=True, capture_output=True, env=_environment())
    return folder


def _environment() -> dict[str, str]:
    """Returns this process's environment without the paths of its Python's modules."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_s_manifest_is_that_of_the_converted_model(
    name: str,
    python: str,
    checkpoints: Path,
    exporter: Exporter,
    llama_cpp_sources: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = checkpoints / name
    file = tmp_path / "whole.gguf"
    command = [python, llama_cpp_sources / PROGRAM, whole, "--outfile", file]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=_environment())

    # a file that ends after its header, without a tokenizer; and the configuration alone
    cut, alone = tmp_path / "cut", tmp_path / "alone"
    for folder in (cut, alone):
        folder.mkdir()
        shutil.copy(whole / "config.json", folder)
    weights = (whole / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: 8 + int.from_bytes(weights[:8], "little")])

    options = ("--name", "m", "--n-ctx", 512, "--n-tokens", "1,64")
    assert run_model(exporter, file, tmp_path / "wanted.yaml", *options) == 0
    assert exporter.libraries is not None
    monkeypatch.setenv("LD_LIBRARY_PATH", str(exporter.libraries))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    from_tree = Exporter(exporter.program, llama_cpp_sources)
    for source in (whole, cut, alone):
        output = tmp_path / f"{source.name}.yaml"
        assert run_model(from_tree, source, output, *options, "--python", python) == 0, capsys.readouterr().err
        assert _kernels(output) == _kernels(tmp_path / "wanted.yaml")


def _kernels(path: Path) -> str:
    return path.read_text().partition("\nsizes:")[2]
