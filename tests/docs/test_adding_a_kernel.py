"""Follows docs/guides/write-a-kernel.md and add-an-op.md: writes their files and runs their commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernelgen
from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.model import graph_ops

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
PACKAGE = Path(kernelgen.__file__).parent
SCHEMA = "tools/kernelgen/manifest/manifest.schema.json"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def files(text: str) -> dict[str, str]:
    """Returns the code blocks that follow a line with only a path, by path."""
    return dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def run(command: str, folder: Path, path: Path) -> str:
    """Runs a command line of the page with this Python; returns its output."""
    words = shlex.split(command)
    program = {"kernelgen": [sys.executable, "-m", "kernelgen"], "python": [sys.executable]}[words[0]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*program, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_kernel_in_a_folder_of_ones_own(tmp_path: Path) -> None:
    text = (GUIDES / "write-a-kernel.md").read_text()
    written = files(text)
    assert sorted(written) == ["check_norm.py", "my_kernels/norm.py", "my_model.yaml"]
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    commands = [line for block in blocks(text, "sh") for line in block.splitlines()]
    assert len(commands) == 3
    _, inspected, checked = (run(command, tmp_path, PACKAGE.parent) for command in commands)
    pack = tmp_path / "build" / "my_model_trn1.kernels.gguf"
    assert pack.is_file() and pack.read_bytes()[:4] == b"GGUF"
    assert len(re.findall(r"rms_norm\(\(2048,(?:1|512),1,1\)/f32", inspected)) == 2
    assert checked == "as NumPy computes it\n"
    planned = run("kernelgen plan my_model.yaml --kernels my_kernels", tmp_path, PACKAGE.parent)
    assert len(re.findall(r"  my_kernels/norm\.py  ", planned)) == 2


def test_the_kernel_in_a_folder_of_ones_own_is_what_llama_cpp_asks_for(tmp_path: Path) -> None:
    (tmp_path / "my_model.yaml").write_text(files((GUIDES / "write-a-kernel.md").read_text())["my_model.yaml"])
    (request,) = manifest.load([tmp_path / "my_model.yaml"], Catalog([builtin_library()]))
    graph = graph_ops.read(ROOT / "tests" / "data" / "graph-ops" / "llama-3.2-1b.flash-attn.txt")
    asked = {spec for spec, _, _ in graph if spec.op == "rms_norm"}
    assert {kernel.spec for kernel in request.kernels} == asked


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Returns a copy of the files that add-an-op.md edits."""
    ignored = shutil.ignore_patterns("__pycache__", ".*cache")
    shutil.copytree(PACKAGE, tmp_path / "tools" / "kernelgen", ignore=ignored)
    shutil.copytree(builtin_library().root, tmp_path / "kernels", ignore=ignored)
    for folder in ("backend/ggml-neuron", "tests/kernels", "tests/manifest"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copytree(ROOT / "tools" / "regenerate", tmp_path / "tools" / "regenerate", ignore=ignored)
    generated = (
        "backend/nrt/targets.inc",
        "docs/reference/lint.md",
        "docs/reference/log.md",
        "docs/reference/targets.md",
        "rules/private/targets.bzl",
        "tests/compilers/fake_neuronx_cc",
        "tests/data/bundle-graph-keys.json",
        "tests/data/bundle-keys.json",
    )
    for file in generated:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def test_a_kernel_in_this_repository(checkout: Path) -> None:
    text = (GUIDES / "add-an-op.md").read_text()
    variants, entry, emitter, reference, test = blocks(text, "python")
    generate, command = (line for block in blocks(text, "sh") for line in block.splitlines())
    ops = checkout / "tools" / "kernelgen" / "ggml" / "ops.py"
    source = ops.read_text()
    # The page repeats two places of the file: the list with one more word, and an unchanged entry.
    assert variants.replace(" mish\n", "\n") in source, "the list of UNARY on the page is not that of ops.py"
    assert entry in source, "the entry on the page is not in ops.py"
    ops.write_text(source.replace(variants.replace(" mish\n", "\n"), variants))

    # Each step is needed: with the op alone, the suite reports that its emitter is missing, and then its reference.
    for file, addition in (("kernels/elementwise.py", emitter), ("tests/kernels/reference.py", reference)):
        with pytest.raises(AssertionError, match="mish"):
            run(
                "python -m pytest -q tests/kernels/test_library.py -k 'every and not target'",
                checkout,
                checkout / "tools",
            )
        with (checkout / file).open("a") as f:
            f.write("\n\n" + addition)
    with (checkout / "tests/kernels/test_elementwise.py").open("a") as f:
        f.write("\n\n" + test)
    tests = command.replace("test_elementwise.py", "test_elementwise.py -k 'mish or (every and not target)'")
    # The page's command runs this program.
    assert generate == "./bazelw run //tools:regenerate"
    with pytest.raises(AssertionError, match=f"{SCHEMA} is stale"):
        run("python -m regenerate --check", checkout, checkout / "tools")
    run("python -m regenerate", checkout, checkout / "tools")
    assert '"mish"' in (checkout / SCHEMA).read_text()
    assert re.search(r"\d+ passed", run(tests, checkout, checkout / "tools"))
