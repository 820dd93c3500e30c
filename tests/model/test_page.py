"""docs/reference/models.md and docs/reference/graphs.md match the programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import headers
import random_projector

from kernelgen.cli import model
from kernelgen.model.exporter import VARIABLE, Exporter
from kernelgen.model.graphs import VERSION

from .conftest import ROOT

MODELS = "\n".join(
    (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("models", "model-inputs", "model-options", "model-choices")
)
GRAPHS = (ROOT / "docs" / "reference" / "graphs.md").read_text(encoding="utf-8")


def pattern(output: str) -> str:
    """Returns the expression that an output must match; a line `…` stands for any lines."""
    return "".join(r"(?:.*\n)*?" if line == "…" else re.escape(line) + r"\n" for line in output.splitlines())


def test_the_sessions_are_as_shown(exporter: Exporter, tmp_path: Path) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```$", MODELS, re.MULTILINE | re.DOTALL)
    headers.write(headers.qwen3(), tmp_path / "tiny-qwen3.gguf")
    random_projector.write(tmp_path / "qwen2vl.gguf", "qwen2vl_merger", size=random_projector.Size(n_layer=3))
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    assert len(parts) > len(blocks) == 2
    environment = os.environ | {VARIABLE: str(exporter.program), "LD_LIBRARY_PATH": str(exporter.libraries)}
    for part in parts:
        command, _, expected = part.partition("\n")
        arguments = [sys.executable, "-m", *command.split()]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(pattern(expected), done.stdout), done.stdout


def test_the_page_names_every_option() -> None:
    options = {option for parameter in model.command.params for option in parameter.opts if option.startswith("--")}
    named = set(re.findall(r"--[a-z][a-z-]+", MODELS))
    assert options - named <= {"--kernels", "--name", "--output"}


def test_the_format_is_as_described(exporter: Exporter, tmp_path: Path) -> None:
    file = headers.write(headers.qwen3(), tmp_path / "model.gguf")
    command = [exporter.program, file, "--ctx-size", "512", "--graph", "n_tokens=1,n_kv=256"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(exporter.libraries)}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=True)
    first, graph = map(json.loads, done.stdout.splitlines())
    shown = re.findall(r"^```json\n(.*?)\n```$", GRAPHS, re.MULTILINE | re.DOTALL)
    assert first == json.loads(shown[0])
    assert first["version"] == VERSION
    assert {**graph, "tensors": ["…"]} == json.loads(shown[1].replace("[…]", '["…"]'))
    described = set(re.findall(r"^\| (`.*?) \|", GRAPHS, re.MULTILINE))
    keys = {key for cell in described for key in re.findall(r"`(\w+)`", cell)}
    tensors = graph["tensors"]
    assert {key for tensor in tensors for key in tensor} <= keys
    assert {tensor["role"] for tensor in tensors if "role" in tensor} == {"weight", "cache", "input", "output"}
    for number, tensor in enumerate(tensors):
        assert all(source < number for source in tensor.get("src", ()))
        root, offset = tensor.get("view", (number, 0))
        assert "view" not in tensors[root] or root == number
        assert offset >= 0
    wanted = {t.name for t in headers.qwen3().tensors}
    assert {t["name"] for t in tensors if t.get("role") == "weight"} == wanted


def test_the_version_of_ggml_is_the_one_that_cmake_takes() -> None:
    text = (ROOT / "backend" / "exporter" / "CMakeLists.txt").read_text(encoding="utf-8")
    (supported,) = re.findall(r"EXPORTER_SUPPORTS_GGML ([\d.]+)", text)
    assert f"It works with ggml {supported}: CMake refuses other versions of llama.cpp" in MODELS
