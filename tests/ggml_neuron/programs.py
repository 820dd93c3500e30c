"""Runs the programs that were built from C++, for the tests of this folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_bundles

from kernelgen import cli
from kernelgen.spec.filenames import STATE
from kernelgen.targets import INSTANCES, TARGETS

ROOT = Path(__file__).parents[2]

# Scenarios that need kernels; each prints the names of the kernels that are missing.
SCENARIOS = (
    "add",
    "chain",
    "chain-allocated",
    "views",
    "cache",
    "copied-destination",
    "freed-copy",
    "copies",
    "inplace",
    "inplace-twice",
    "same-twice",
    "optimizer",
    "unused",
    "not-a-number",
    "reuse",
    "skip",
)


# Graphs of the program `groups`; each contains groups.
GROUPS = (
    *("hit", "twice", "between", "cache", "attention", "unmasked", "reading", "softmax", "softmax-unmasked"),
    *("in-place", "views", "several-results", "kept", "square", "tied"),
    *("mixed-plain", "mixed-rows", "mixed-row", "mixed-sum", "mixed-state"),
    *("heads-1", "heads-3"),
    "copied-mask",
)
RANDOM = ("random-0", "random-1")


@dataclass(frozen=True)
class Result:
    """The outcome of a run of `scenarios`.

    Attributes:
        status: the exit status; negative for a signal.
        said: each scenario's outcome: `ok`, or what was wrong.
        log: stderr.
    """

    status: int
    said: dict[str, str]
    log: str


Run = Callable[..., Result]


def ran_on(result: Result) -> tuple[int, int]:
    """Returns how many nodes ran on the device and how many on the CPU instead, from the log."""
    device = re.search(r"(\d+) ops ran on NeuronCores", result.log)
    cpu = re.search(r"(\d+) ops ran on the CPU instead of a NeuronCore", result.log)
    assert device and cpu, result.log
    return int(device[1]), int(cpu[1])


@dataclass(frozen=True)
class Benched:
    """A model, what `llama_bench` records with it, and a folder with the kernels of the recording."""

    model: Path
    recorded: Path
    kernels: Path


@dataclass(frozen=True)
class Programs:
    """The programs that were built from C++.

    Attributes:
        folder: the folder with scenarios, dispatch, the plugin and the libnrt that does nothing.
        llama_cpp: the folder with ggml's libraries and its CPU backend.
        simulator: the simulator's libnrt.
        compiled: a folder where programs share what XLA compiled; None for no sharing.
        target: the target of the simulated machine, unless NEURON_SIMULATOR_INSTANCE is given.
    """

    folder: Path
    llama_cpp: Path
    simulator: Path
    compiled: Path | None = None
    target: str = "trn1"

    def find(self, name: str) -> Path:
        return next(path for path in self.folder.rglob(name) if path.is_file())

    def environment(self, **variables: str | Path | None) -> dict[str, str]:
        """Returns variables with which the backend finds the simulator; `variables` replace them, None removes one."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("GGML_", "NEURON_", "NOOP_"))}
        chosen = {
            "LD_LIBRARY_PATH": self.llama_cpp,
            "GGML_NEURON_LIBNRT": self.simulator,
            "NEURON_SIMULATOR_PYTHON": sys.executable,
            "NEURON_SIMULATOR_PATH": ROOT / "tools",
            "NEURON_SIMULATOR_CACHE": self.compiled,
            "NEURON_SIMULATOR_INSTANCE": {one.target: one.name for one in INSTANCES}[self.target],
            "NEURON_RT_NUM_CORES": "1",
            **variables,
        }
        return inherited | {name: str(value) for name, value in chosen.items() if value is not None}

    def run(self, program: str, *scenarios: str, **variables: str | Path | None) -> subprocess.CompletedProcess[str]:
        """Runs scenarios of a test program; `variables` are those of `environment`."""
        return subprocess.run(
            [self.find(program), self.find("libggml-neuron.so"), self.llama_cpp, *scenarios],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def named(built: Path, variable: str) -> Path:
    """Returns the path of a file or folder built from C++: `built`, where Bazel puts it, or the value of a variable."""
    path = Path(os.environ.get(variable, built)).absolute()
    assert path.exists(), f"{path} is not there; run this through Bazel"
    return path


def find_programs(there: Callable[[Path, str], Path] = named) -> Programs:
    """Returns the programs that were built from C++; `there` finds each path and handles a missing one."""
    built = ROOT / "backend" / "ggml-neuron" / "test_programs"
    llama_cpp = ROOT / "tools" / "llama_cpp" / "llama_cpp"
    simulator = ROOT / "backend" / "simulator" / "libnrt.so.1"
    return Programs(
        there(built, "GGML_NEURON_TEST_PROGRAMS"),
        there(llama_cpp, "LLAMA_CPP_PROGRAMS"),
        there(simulator, "GGML_NEURON_LIBNRT"),
    )


def manifest_of(recording: Path) -> Path:
    """Writes the manifest of what GGML_NEURON_RECORD recorded, beside it; returns its path."""
    manifest = recording.with_suffix(".yaml")
    kernelgen("model", recording, "-o", manifest)
    return manifest


def build(manifest: Path, output: Path) -> None:
    """Builds the pack and the tree of a manifest, or of a recording (`*.graphs`), with the simulator's compiler; kernels
    of earlier builds of this process are not built again.
    """
    if manifest.suffix == ".graphs":
        manifest = manifest_of(manifest)
    state = output / STATE
    output.mkdir(parents=True, exist_ok=True)
    if _MADE.exists():
        shutil.rmtree(state, ignore_errors=True)
        shutil.move(_MADE, state)
    kernelgen("build", manifest, "--compiler", "simulator", "-o", output, "--form", "pack", "--form", "tree")
    shutil.move(state, _MADE)


_FOLDER = tempfile.TemporaryDirectory(prefix="kernels-")
_MADE = Path(_FOLDER.name) / "made"
"""HLO and NEFFs of all builds. The folder moves into each build in turn."""


def kernelgen(*arguments: str | Path) -> None:
    """Runs a command line of kernelgen in this process."""
    status = cli.run([str(argument) for argument in arguments])
    assert status == 0, f"kernelgen {shlex.join(map(str, arguments))}: exit status {status}"


def built_tree(kernels: Path) -> Path:
    """Returns the only tree in a folder that `build` wrote, for any target."""
    (index,) = kernels.glob("*/index.json")
    return index.parent


def built_pack(kernels: Path) -> Path:
    """Returns the only pack in a folder that `build` wrote."""
    (path,) = kernels.glob("*.kernels.gguf")
    return path


def edit_pack(kernels: Path, pack: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Writes the bundle in a folder that `build` wrote as another pack, after `edit` changed its index; returns the pack."""
    tree = built_tree(kernels)
    index = json.loads((tree / "index.json").read_text())
    edit(index)
    pack.write_bytes(tiny_bundles.pack_bytes(tiny_bundles.Draft(tree, index)))
    return pack


def damage_pack(kernels: Path, pack: Path, neffs: Iterable[Path]) -> Path:
    """Copies the pack in a folder that `build` wrote, and changes a byte of each of these NEFFs; returns the copy."""
    data = bytearray(built_pack(kernels).read_bytes())
    for neff in {path.read_bytes() for path in neffs}:
        data[data.index(neff) + 500] ^= 1  # in the header's padding, which nrt_load does not read
    pack.write_bytes(data)
    return pack


def microcode(target: str) -> int:
    """Returns the bytes that libnrt takes on a logical core before a program is loaded."""
    return TARGETS[target].lnc * (96 << 20)


def groups_manifest(programs: Programs, *names: str) -> str:
    """Returns the manifest that the program `groups` prints for its kernels, for the target of the tests."""
    command = [programs.find("groups"), "manifest", *names]
    done = subprocess.run(command, env=programs.environment(), capture_output=True, text=True, check=True)
    return done.stdout.replace("targets: [trn1]", f"targets: [{programs.target}]")


def llama_bench(
    programs: Programs, model: Path, *more: str, flash_attn: str = "auto", **variables: str | Path
) -> subprocess.CompletedProcess[str]:
    """Runs llama-bench, which silences ggml's logger: a prompt of 16 tokens, then 4 generated tokens; by default with
    flash attention where the model has it.
    """
    arguments = ["-p", "16", "-n", "4", "-r", "1", "-ngl", "99", "-fa", flash_attn]
    return subprocess.run(
        [programs.llama_cpp / "llama-bench", "-m", model, *arguments, *more],
        env=programs.environment(GGML_BACKEND_PATH=programs.find("libggml-neuron.so"), **variables),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
