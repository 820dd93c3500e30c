"""Runs the commands of docs/guides as the pages have them: from a model's file to tokens, and the builds of the
backend.

llama.cpp's own programs are those of the other tests, because building all of it takes too long. Everything else runs
in a folder that looks like that of a page's reader.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, Programs

sys.path.insert(0, str(ROOT / "tools" / "llama_cpp"))

import random_llama

GUIDES = ROOT / "docs" / "guides"


def commands(page: str, heading: str) -> list[str]:
    """Returns the command lines of a section of a guide, without their `#` comments."""
    text = (GUIDES / f"{page}.md").read_text()
    section = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"{page}.md has no section '{heading}'"
    return [line.partition("   #")[0].strip() for line in section[1].splitlines() if line.startswith("    ")]


@pytest.fixture
def checkout(tmp_path: Path, llama_cpp: Path) -> Path:
    """Returns a checkout of the project, with one of llama.cpp beside it."""
    (tmp_path / "llama.cpp").symlink_to(llama_cpp)
    made = tmp_path / "neuron-kernelgen"
    made.mkdir()
    for name in ("backend", "examples", "kernels", "requirements.txt", "requirements.in", "rules", "tools"):
        (made / name).symlink_to(ROOT / name)
    return made


def shell(command: str, folder: Path, **variables: str | Path) -> str:
    """Runs a command line in a folder; returns what it prints."""
    environment = os.environ | {"CMAKE_GENERATOR": "Ninja" if shutil.which("ninja") else "Unix Makefiles"}
    environment |= {"NEURON_KERNELGEN_PYTHON": sys.executable, "NEURON_KERNELGEN_NEFF_CACHE": "off"}
    environment |= {
        "CCACHE_DISABLE": "1"
    }  # llama.cpp uses ccache if it finds one, and a sandbox may make ccache's folder read-only
    # No test here is about optimized code, and the page's commands leave the build type to CMake.
    environment |= {"CMAKE_BUILD_TYPE": "None"} | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",  # a model with random weights prints any bytes
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout[-4000:]}"
    return done.stdout


def scenarios(programs: Programs, plugin: Path, *names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [programs.find("scenarios"), plugin, programs.llama_cpp, *names],
        env=programs.environment(GGML_NEURON_LOG="1", NEURON_SIMULATOR_INSTANCE=None),
        capture_output=True,
        text=True,
        check=False,
    )


def built_by(command: str) -> str:
    """Returns a build command that builds only the plugin, instead of all of llama.cpp."""
    assert command == "cmake --build build -j $(nproc)"
    return f"{command} --target ggml-neuron"


def simple(programs: Programs, llama_cpp: Path, program: Path) -> None:
    """Builds llama-simple from its one file with the libraries of the other programs; ggml looks for its CPU backend
    beside the program.
    """
    program.parent.mkdir(parents=True)
    for backend in programs.llama_cpp.glob("libggml-cpu*.so"):
        (program.parent / backend.name).symlink_to(backend)
    folders = [f"-I{llama_cpp / 'include'}", f"-I{llama_cpp / 'ggml' / 'include'}", f"-L{programs.llama_cpp}"]
    words = ["c++", llama_cpp / "examples" / "simple" / "simple.cpp", *folders, "-lllama", "-lggml", "-lggml-base"]
    done = subprocess.run([*words, "-o", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_derive_build_and_run(programs: Programs, exporter: Path, llama_cpp: Path, tmp_path: Path) -> None:
    three = commands("run-a-model", "Derive, build, run")
    assert [re.search(r"kernelgen (\w+)", command)[1] for command in three] == ["model", "build", "simulate"]
    random_llama.write(tmp_path / "model.gguf", size=random_llama.Size(n_ctx=32768))
    simple(programs, llama_cpp, tmp_path / "bin" / "llama-simple")
    program = tmp_path / "bin" / "kernelgen"
    program.write_text(
        f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(ROOT / "tools"))} exec {shlex.quote(sys.executable)} -m kernelgen "$@"\n'
    )
    program.chmod(0o755)
    set_up = {
        "PATH": os.pathsep.join([str(program.parent), str(programs.llama_cpp), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": programs.llama_cpp,
        "GGML_BACKEND_PATH": programs.find("libggml-neuron.so"),
        "GGML_NEURON_LIBNRT": programs.simulator,
        "NEURON_KERNELGEN_EXPORTER": exporter,
        "NEURON_KERNELGEN_CACHE": tmp_path / "cache",
        "XDG_CACHE_HOME": tmp_path / "cache",
        "GGML_NEURON_LOG": "1",
    }
    derive, build, run = (shell(command, tmp_path, **set_up) for command in three)
    assert "none without a kernel" in derive
    assert "and the model's context has 32768: for all of it, with " in derive
    assert re.search(r"\d+ built .* 0 failed", build)
    assert re.search(r"decoded 3[12] tokens in", run)
    assert re.search(r"[1-9]\d* ops ran on NeuronCores", run)
    assert "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore" in run, run[-3000:]
    assert list((tmp_path / "cache").rglob("simulator/*/*.xla"))


@pytest.mark.long
def test_the_simulator_is_where_kernelgen_looks(checkout: Path) -> None:
    configure, build, install = commands("use-the-simulator", "Build it")
    assert configure.startswith("cmake -S backend/simulator ")
    shell(f"{configure} -DCMAKE_UNITY_BUILD=ON", checkout)  # halves the time of compiling
    shell(build, checkout)
    shell(install, checkout)
    (installed,) = (checkout / ".venv").rglob("libnrt.so.1")
    code = "import sys; from kernelgen.cli import simulate; sys.prefix = sys.argv[1]; print(simulate.find(None, {}))"
    line = shlex.join([sys.executable, "-c", code, str(checkout / ".venv")])
    assert shell(line, checkout, PYTHONPATH=ROOT / "tools") == f"{installed}\n"


def test_the_exporter_is_configured(checkout: Path, programs: Programs, llama_cpp: Path) -> None:
    (command,) = (c for c in commands("derive-a-manifest", "1. Build export-graphs") if " -S " in c)
    folder = shlex.quote(str(programs.llama_cpp))
    shell(f"{command.replace('/path/to/llama.cpp', str(llama_cpp))} -DGGML_NEURON_GGML_DIR={folder}", checkout)
    assert "libllama.so" in (checkout / "build" / "exporter" / "CMakeCache.txt").read_text()


def test_llama_cpp_has_the_backend_and_what_a_first_run_needs_as_targets(checkout: Path) -> None:
    configure, build = (c for c in commands("run-a-model", "Set up once") if c.startswith("cmake "))
    assert "Including NEURON backend" in shell(configure, checkout)
    plan = shell(re.sub(r"^cmake --build (\S+) -j \$\(nproc\) --target", r"ninja -C \1 -n -v", build), checkout)
    for made in ("bin/llama-simple", "bin/export-graphs", "bin/libggml-neuron.so", "neuron-simulator/libnrt.so.1"):
        assert re.search(rf" -o {made}\b", plan), made
    # Nothing of llama.cpp that is not needed is built.
    assert "tools/server" not in plan and "common/" not in plan


@pytest.mark.long
def test_a_plugin_is_built_beside_llama_cpp(checkout: Path, programs: Programs, llama_cpp: Path) -> None:
    configure, build, run = commands("build-the-backend", "As a plugin")
    assert run.startswith("GGML_BACKEND_PATH=$PWD/build/libggml-neuron.so llama-bench")
    shell(configure.replace("/path/to/llama.cpp", str(llama_cpp)), checkout)
    shell(build, checkout)
    done = scenarios(programs, checkout / "build" / "libggml-neuron.so", "add")
    assert done.stdout == "no devices\n"
    assert (
        "ggml-neuron: no devices: no kernels\nggml-neuron:     GGML_NEURON_KERNEL_DIR names where they are\n"
        in done.stderr
    )


def test_llama_cpp_builds_it_with_kernels_from_manifests(checkout: Path, programs: Programs, recorded: Path) -> None:
    plain = next(
        c for c in commands("build-the-backend", "Inside llama.cpp's own build") if c.startswith("cmake -S llama.cpp")
    )
    configure, build = commands("embed-kernels", "From manifests")
    assert configure.startswith(plain)
    # Run from the folder with the manifests: their paths are relative to it.
    work = checkout / "work"
    work.mkdir()
    (work / "llama.cpp").symlink_to(checkout.parent / "llama.cpp")
    # The page's other manifests are for trn1.
    text = recorded.read_text().replace(f"targets: [{programs.target}]", "targets: [trn1]")
    (work / "attention.yaml").write_text(text)
    shutil.copy(ROOT / "examples" / "llama.cpp" / "feed_forward.yaml", work)
    # Without optimization, headers take most of the time. The other tests' plugin is compiled without precompiled
    # headers.
    precompiled = ROOT / "tests" / "ggml_neuron" / "precompiled_headers.cmake"
    configure = (
        configure.replace("/path/to/neuron-kernelgen", str(checkout))
        + f" -DCMAKE_PROJECT_llama.cpp_INCLUDE={precompiled}"
    )
    assert "Including NEURON backend" in shell(configure, work)
    shell(built_by(build), work)
    done = scenarios(programs, work / "build" / "bin" / "libggml-neuron.so", "chain", "cache")
    assert done.stdout == "chain: ok\ncache: ok\n", done.stderr
    assert "embedded scenarios_trn1: " in done.stderr
    assert "embedded feed_forward_trn1: 1 kernels for trn1" in done.stderr


def test_a_hook_file_names_the_manifests(checkout: Path) -> None:
    (name,) = set(re.findall(r"`(examples/llama\.cpp/[\w-]+\.cmake)`", (GUIDES / "embed-kernels.md").read_text()))
    plain = next(
        c for c in commands("build-the-backend", "Inside llama.cpp's own build") if c.startswith("cmake -S llama.cpp")
    )
    command = re.sub(r"(?<=-DCMAKE_PROJECT_ggml_INCLUDE=)\S+", str(checkout / name), plain)
    said = shell(command.replace("-S llama.cpp", "-S ../llama.cpp"), checkout)
    assert "add_neuron_kernels(ggml-neuron-kernels): " in said and "3 kernels, 3 compiles with " in said
    # The plugin's link depends on them.
    assert re.search(
        r"build bin/libggml-neuron\.so.*libggml-neuron-kernels\.a", (checkout / "build" / "build.ninja").read_text()
    )


@pytest.mark.long
def test_a_project_around_llama_cpp_builds_the_plugin(checkout: Path, programs: Programs, llama_cpp: Path) -> None:
    configure, build = commands("embed-kernels", "In a project around llama.cpp")
    shell(configure.replace("/path/to/llama.cpp", str(llama_cpp)), checkout)
    shell(built_by(build), checkout)
    (plugin,) = (checkout / "build" / "bin").glob("libggml-neuron.so")
    done = scenarios(programs, plugin, "add")
    assert "embedded attention_trn1: 2 kernels for trn1" in done.stderr
    assert "embedded feed_forward_trn1: 1 kernels for trn1" in done.stderr


def test_a_project_without_llama_cpp_or_the_backend_is_reported(checkout: Path, llama_cpp: Path) -> None:
    command = ["cmake", "-S", "examples/llama.cpp", "-B", "build"]
    for arguments, message in (
        ([], "name its source tree with -DLLAMA_CPP_DIR=<folder>"),
        (
            [f"-DLLAMA_CPP_DIR={llama_cpp}", "-DNEURON_KERNELGEN_DIR=/nowhere"],
            "name a checkout with -DNEURON_KERNELGEN_DIR=<folder>",
        ),
    ):
        done = subprocess.run([*command, *arguments], cwd=checkout, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert message in " ".join(done.stderr.split())
