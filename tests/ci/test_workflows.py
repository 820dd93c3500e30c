"""examples/ci: the steps of both workflows work, in several runs, with the cache of the first run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "ci"))

import summary

import cmake_project
import scratch

ROOT = Path(__file__).resolve().parents[2]

EXAMPLES = ROOT / "examples" / "ci"

# They change the machine, or build llama.cpp, which tests/ggml_neuron does with the same option.
NOT_RUN = {"Install", "Build the backend"}

MANIFEST = """\
format: 1
name: llama3
targets: [trn1]
kernels:
  - {op: add, inputs: ["(64,4,1,1)/f32", "(64,1,1,1)/f32"], output: "(64,4,1,1)/f32"}
  - {op: relu, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32"}
"""

ONE_MORE = '  - {op: silu, inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32"}\n'


class Runner:
    """A double of one of GitHub's machines: a home folder, a folder for temporary files, and a summary."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.home, self.temp, self.checkout = folder / "home", folder / "temp", checkout
        self.summary = folder / "summary.md"
        self.home.mkdir(parents=True)
        self.temp.mkdir()
        own = {"HOME": str(self.home), "RUNNER_TEMP": str(self.temp), "GITHUB_STEP_SUMMARY": str(self.summary)}
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("TEST_", "RUNFILES", "BUILD_", "PYTHON", "XDG_"))
        }
        for name in (
            "NEURON_KERNELGEN_CACHE",
            "NEURON_KERNELGEN_NEFF_CACHE",
            "NEURON_KERNELGEN_SHARED_CACHE",
            "NEURON_SDK",
        ):
            kept.pop(name, None)
        self.env = kept | own

    def run(self, workflow: str) -> str:
        """Runs a workflow's steps; returns the job's summary."""
        (job,) = yaml.safe_load((EXAMPLES / workflow).read_text())["jobs"].values()
        for step in job["steps"]:
            if "run" in step and step.get("name") not in NOT_RUN:
                done = subprocess.run(
                    ["bash", "--noprofile", "--norc", "-e", "-c", step["run"]],
                    cwd=self.checkout,
                    env=self.env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    check=False,
                )
                assert done.returncode == 0, f"{step['name']}:\n{done.stdout[-4000:]}"
        text = self.summary.read_text()
        self.summary.unlink()
        return text

    def cached(self, workflow: str) -> list[Path]:
        """Returns the folders that the workflow keeps between runs."""
        (job,) = yaml.safe_load((EXAMPLES / workflow).read_text())["jobs"].values()
        (step,) = (s for s in job["steps"] if str(s.get("uses", "")).startswith("actions/cache@"))
        return [Path(line.replace("~", str(self.home))) for line in step["with"]["path"].split()]

    def hand_over(self, workflow: str, to: Runner) -> None:
        """Gives the next machine the kept folders, complete, and nothing else."""
        for ours, theirs in zip(self.cached(workflow), to.cached(workflow), strict=True):
            assert ours.is_dir(), f"the workflow keeps {ours}, which does not exist"
            theirs.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(ours, theirs)


def provide_python(runner: Runner) -> None:
    """Spares the first run the download of its packages."""
    base = scratch.cache_folder()
    if (base / "python").is_dir():
        folder = runner.home / ".cache" / "neuron-kernelgen" / "python"
        folder.mkdir(parents=True)
        for environment in (base / "python").iterdir():
            (folder / environment.name).symlink_to(environment)


def rows(text: str) -> list[list[str]]:
    """Returns the cells of a Markdown table without its two header lines."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@pytest.mark.long
def test_a_repository_with_bazel(tmp_path: Path) -> None:
    with scratch.checkout() as checkout:
        checkout.edit("MODULE.bazel", 'neuron.kernels(manifest = ["//manifests:basic.yaml"])\n', "")
        checkout.edit("manifests/BUILD.bazel", 'neuron_manifest(name = "basic")\n', "")
        (checkout.path / "manifests/llama3.yaml").write_text(MANIFEST)
        first, second = (Runner(tmp_path / name, checkout.path) for name in ("first", "second"))
        provide_python(first)
        for runner in (first, second):
            # GitHub's machines have Bazelisk.
            scratch.provide_bazel(runner.home / ".cache" / "neuron-kernelgen")
        # Bazel takes ~ from the user's entry in the system, not from HOME.
        rc = "build:disk-cache --disk_cache={}/.cache/neuron-kernelgen/bazel\n" + "".join(
            [f"startup {option}\n" for option in scratch.SMALL_SERVER]
            + [f"build {option}\n" for option in scratch.ONE_WORKER]
        )
        try:
            (checkout.path / ".user.bazelrc").write_text(rc.format(first.home))
            assert rows(first.run("bazel.yml"))[:2] == [["emitted", "2", "0", "0"], ["compiled", "2", "0", "0"]]
            assert len(list((first.temp / "packs").glob("*.kernels.gguf"))) == 1
            first.hand_over("bazel.yml", second)
            (checkout.path / "manifests/llama3.yaml").write_text(MANIFEST + ONE_MORE)
            (checkout.path / ".user.bazelrc").write_text(rc.format(second.home))
            assert rows(second.run("bazel.yml"))[:2] == [["emitted", "1", "2", "0"], ["compiled", "1", "2", "0"]]
        finally:
            for runner in (first, second):
                subprocess.run([checkout.path / "bazelw", "shutdown"], cwd=checkout.path, env=runner.env, check=False)
                subprocess.run(["chmod", "-R", "u+w", runner.home], check=False)


@pytest.mark.long
def test_a_fork_of_llama_cpp_with_cmake(tmp_path: Path) -> None:
    fork = tmp_path / "llama.cpp"
    cmake_project.copy(fork / "neuron-kernelgen")
    shutil.copytree(ROOT / "tools" / "ci", fork / "neuron-kernelgen" / "tools" / "ci")
    (fork / "neuron").mkdir()
    shutil.copy(EXAMPLES / "CMakeLists.txt", fork / "neuron")
    (fork / "neuron/llama3.yaml").write_text(MANIFEST)
    first, second = (Runner(tmp_path / name, fork) for name in ("first", "second"))
    provide_python(first)
    assert rows(first.run("cmake.yml")) == [["llama3_trn1", "2", "0", "0", ""]]
    assert len(list((first.temp / "hlo").rglob("*.hlo*"))) >= 2
    assert len(list(fork.glob("build-neuron/**/*.kernels.gguf"))) == 1
    first.hand_over("cmake.yml", second)
    shutil.rmtree(fork / "build-neuron")
    (fork / "neuron/llama3.yaml").write_text(MANIFEST + ONE_MORE)
    assert rows(second.run("cmake.yml")) == [["llama3_trn1", "1", "2", "0", ""]]


def test_a_log_without_kernels_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "build.log").write_text("ninja: no work to do.\n")
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path / "build.log"), str(tmp_path / "absent")])
    assert summary.main() == 1
    errors = capsys.readouterr().err
    assert "says nothing about kernels" in errors
    assert "absent" in errors


def test_failures_are_counted(tmp_path: Path) -> None:
    log = tmp_path / "actions.json"
    log.write_text(
        '{"mnemonic": "NeuronCompile", "exitCode": 1}\n{"mnemonic": "NeuronCompile", "cacheHit": true}\n{"mnemonic": "CppCompile"}'
    )
    assert rows("\n".join(summary.table(log))) == [
        ["emitted", "0", "0", "0"],
        ["compiled", "0", "1", "1"],
        ["bundled", "0", "0", "0"],
    ]
    log.write_text("12 built (3 compiled, 8 from the cache, 1 up to date), 2 failed, 3.1 s")
    assert rows("\n".join(summary.table(log))) == [["all", "3", "8", "1", "2"]]
    log.write_text("5 built (4 compiled, 1 equal to another, 0 up to date), 0 failed, 3.1 s")
    assert rows("\n".join(summary.table(log))) == [["all", "4", "0", "0", "0"]]
