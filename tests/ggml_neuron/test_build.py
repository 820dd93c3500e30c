"""The backend with an embedded bundle that `kernelgen build` wrote, and the errors of the backend's build.

All other tests of this folder load the backend as a plugin. test_page.py builds it inside an unchanged llama.cpp.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, Programs

BACKEND = ROOT / "backend" / "ggml-neuron"


def cmake(source: Path, build: Path, *arguments: str, target: str = "ggml-neuron") -> Path:
    """Configures and builds a target with CMake; returns the plugin's path."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DCMAKE_BUILD_TYPE=None"]  # no optimization
    for command in (
        ["cmake", *generator, "-S", source, "-B", build, *options, *arguments],
        ["cmake", "--build", build, "--parallel", "2", "--target", target],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return next(build.rglob("libggml-neuron.so"))


def run(programs: Programs, plugin: Path, *scenarios: str, **variables: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs.find("scenarios"), plugin, programs.llama_cpp, *scenarios],
        env=programs.environment(GGML_NEURON_LOG="1", **variables),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
def test_kernels_are_embedded(programs: Programs, recorded: Path, llama_cpp: Path, tmp_path: Path) -> None:
    output = tmp_path / "embed"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "kernelgen",
            "build",
            recorded,
            "--compiler",
            "simulator",
            "-o",
            output,
            "--form",
            "embed",
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        check=True,
    )
    plugin = cmake(
        BACKEND,
        tmp_path / "build",
        f"-DGGML_NEURON_LLAMA_DIR={llama_cpp}",
        f"-DGGML_NEURON_EMBED={output}/scenarios_{programs.target}.c",
    )
    shutil.rmtree(output)  # the plugin contains everything
    done = run(programs, plugin, "chain", "cache")
    assert done.stdout == "chain: ok\ncache: ok\n", done.stderr
    count = len(re.findall(r"^  - op: ", recorded.read_text(), re.MULTILINE))
    assert f"embedded scenarios_{programs.target}: {count} kernels for {programs.target}" in done.stderr


def test_without_llama_cpp_the_message_says_what_to_set(tmp_path: Path) -> None:
    done = subprocess.run(["cmake", "-S", BACKEND, "-B", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "set GGML_NEURON_LLAMA_DIR to the source tree" in " ".join(done.stderr.split())


@pytest.mark.parametrize("project", ["ggml-neuron", "exporter"])
def test_folders_are_relative_to_where_cmake_is_called(
    project: str, programs: Programs, llama_cpp: Path, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "llama.cpp").symlink_to(llama_cpp)
    (tmp_path / "libraries").symlink_to(programs.llama_cpp)
    folders = ["-DGGML_NEURON_LLAMA_DIR=../llama.cpp", "-DGGML_NEURON_GGML_DIR=../libraries"]
    done = subprocess.run(
        ["cmake", "-S", BACKEND.parent / project, "-B", "build", *folders],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cache = (tmp_path / "here/build/CMakeCache.txt").read_text()
    assert f"\nGGML_NEURON_LLAMA_DIR:PATH={tmp_path}/llama.cpp\n" in cache
    assert f"\nGGML_NEURON_GGML_DIR:PATH={tmp_path}/libraries\n" in cache


def test_a_file_that_is_not_a_bundle_is_not_embedded(llama_cpp: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["cmake", "-S", BACKEND, "-B", tmp_path, f"-DGGML_NEURON_LLAMA_DIR={llama_cpp}", "-DGGML_NEURON_EMBED=nothing"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "'nothing' is neither a target nor a .c file" in " ".join(done.stderr.split())
