"""A scratch copy of this checkout, a project that uses it with CMake, and builds of that project whose commands are counted.

benchmarks/incremental_cmake.py and the tests of `add_neuron_kernels()` use it. It needs CMake and Ninja or make.
"""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scratch import BuildFailed

CHECKOUT = Path(__file__).resolve().parent.parent
_COPIED = (
    *("CMakeLists.txt", "LICENSE", "requirements.in", "requirements.txt"),
    *("backend/bundle", "examples", "kernels", "manifests", "rules", "tools/kernelgen", "tools/nki_interpreter"),
)
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "BUILD.bazel")


@dataclass(frozen=True)
class Result:
    """One build.

    Attributes:
        output: the build tool's output.
        seconds: wall time.
        emits: the number of emitted kernels.
        compiles: the compiled NEFFs, by `<kernel>.<config>`.
        commands: every command that ran, as the build tool describes it.
    """

    output: str
    seconds: float
    emits: int
    compiles: tuple[str, ...]
    commands: tuple[str, ...]


def copy(destination: Path) -> Path:
    """Copies the files of this checkout that CMake builds read."""
    for name in _COPIED:
        source, target = CHECKOUT / name, destination / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=_LEFT_OUT)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    # Steps write no bytecode, so each would compile its imports. Bytecode of a changed module is ignored.
    compileall.compile_dir(
        destination / "tools", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
    )
    return destination


def environment() -> dict[str, str]:
    """Returns this process's environment without variables that affect a build, and without shared caches."""
    prefixes = (
        "BAZEL",
        "BUILD_",
        "CMAKE",
        "JAVA_RUNFILES",
        "MAKE",
        "MFLAGS",
        "NEURON_KERNELGEN_SHARED_CACHE",
        "NEURON_SDK",
        "PYTHON",
        "RUNFILES",
        "TEST_",
        "VERBOSE",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}
    return {**kept, "NEURON_KERNELGEN_NEFF_CACHE": "off"}


def run(*command: object, expect: int | None = 0, env: dict[str, str] | None = None) -> str:
    """Runs a command and returns its output.

    Raises:
        BuildFailed: the exit status is not `expect`; None accepts any status.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, env=env or environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if expect is not None and done.returncode != expect:
        raise BuildFailed(f"exit status {done.returncode}: {' '.join(words)}\n{done.stdout}")
    return done.stdout


@dataclass
class Project:
    """A project with a build folder.

    Attributes:
        source: its source folder.
        build: its build folder.
        generator: CMake's generator.
        cmake: the CMake program.
        variables: additional environment variables.
    """

    source: Path
    build: Path
    generator: str = "Ninja"
    cmake: str = "cmake"
    variables: Mapping[str, str] = field(default_factory=dict)

    def configure(self, *arguments: str, expect: int | None = 0, python: str | None = sys.executable) -> str:
        """Runs CMake; `python` is the interpreter with kernelgen's packages; if None, CMake finds one."""
        named = [f"-DNEURON_KERNELGEN_PYTHON={python}"] if python else []
        return run(
            *(self.cmake, "-G", self.generator, "-S", self.source, "-B", self.build, *named, *arguments),
            expect=expect,
            env=environment() | dict(self.variables),
        )

    def make(self, *arguments: str, expect: int | None = 0) -> Result:
        """Builds the project, and counts the executed steps."""
        begun = time.perf_counter()
        command = [self.cmake, "--build", self.build, "--parallel", "2", *arguments]
        output = run(*command, expect=expect, env=environment() | dict(self.variables))
        seconds = time.perf_counter() - begun
        # Both tools print a command's description after its number or share: "[3/17] Emitting …", "[ 42%] Emitting …".
        commands = tuple(re.findall(r"^\[[^\]]+\] ((?!Re-running|Built target).*)$", output, re.MULTILINE))
        emits = sum(c.startswith("Emitting ") for c in commands)
        compiles = [id_ for c in commands for id_ in re.findall(r"^Compiling (\S+) \(", c)]
        return Result(output, seconds, emits, tuple(sorted(compiles)), commands)

    def ninja(self, *arguments: str) -> tuple[str, float]:
        """Runs Ninja itself; returns its output and the seconds."""
        begun = time.perf_counter()
        output = run("ninja", "-C", self.build, *arguments)
        return output, time.perf_counter() - begun


def write(folder: Path, lines: Sequence[str], languages: str = "CXX") -> None:
    """Writes a CMakeLists.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(["cmake_minimum_required(VERSION 3.20)", f"project(user LANGUAGES {languages})", *lines])
    (folder / "CMakeLists.txt").write_text(text + "\n")
