"""Fixtures: the backend as a plugin, and the test programs that run scenarios with it.

Programs are found where Bazel puts them. Variables name other places: GGML_NEURON_TEST_PROGRAMS (a build of
backend/ggml-neuron with GGML_NEURON_TESTS=ON), LLAMA_CPP_PROGRAMS, GGML_NEURON_LIBNRT, and
GGML_NEURON_SANITIZED_PROGRAMS (the folder of the builds `address` and `thread` of backend/sanitizers).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

from programs import (
    GROUPS,
    RANDOM,
    ROOT,
    SCENARIOS,
    Benched,
    Programs,
    Result,
    Run,
    build,
    find_programs,
    groups_manifest,
    llama_bench,
    manifest_of,
)

sys.path.insert(0, str(ROOT / "tools" / "llama_cpp"))

import random_llama


@pytest.fixture(scope="session", autouse=True)
def builds_share_workers(keep_workers: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Shares workers between builds: a build takes a second or two less when its workers have already imported JAX."""
    with keep_workers():
        yield


@pytest.fixture(scope="session")
def programs(
    there: Callable[[Path, str], Path], neuron_target: str, tmp_path_factory: pytest.TempPathFactory
) -> Programs:
    return replace(find_programs(there), compiled=tmp_path_factory.mktemp("compiled"), target=neuron_target)


@pytest.fixture(scope="session", params=["address", "thread"])
def sanitized(request: pytest.FixtureRequest, programs: Programs, there: Callable[[Path, str], Path]) -> Programs:
    """Returns the programs and the simulator compiled with a sanitizer; the last part of the folder's name is the sanitizer."""
    variable = "GGML_NEURON_SANITIZED_PROGRAMS"
    if variable in os.environ:
        found = there(ROOT, variable) / str(request.param)
    else:
        found = there(ROOT / "backend" / "sanitizers" / str(request.param), variable)
    return replace(programs, folder=found, simulator=next(found.rglob("libnrt.so")))


@pytest.fixture(scope="session")
def run(programs: Programs) -> Run:
    """Returns a function that runs scenarios; keyword arguments are environment variables."""

    def run(*scenarios: str, **variables: str | Path | None) -> Result:
        result = programs.run("scenarios", *scenarios, **variables)
        said = dict(line.split(": ", 1) for line in result.stdout.splitlines() if ": " in line)
        return Result(result.returncode, said, result.stderr)

    return run


@pytest.fixture(scope="session")
def noop(programs: Programs) -> dict[str, str | Path]:
    """Returns the variables that replace the simulator with the libnrt that does nothing, with the tensors of the
    kernel of `add`.
    """
    return {
        "GGML_NEURON_LIBNRT": programs.find("libnrt-noop.so"),
        "NOOP_NRT_TENSORS": "input0=1024,input1=256,output0=1024",
    }


@pytest.fixture(scope="session")
def recorded(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the manifest of what all scenarios compute when there are no kernels and the CPU computes everything."""
    recording = tmp_path_factory.mktemp("recorded") / "scenarios.graphs"
    result = run(*SCENARIOS, GGML_NEURON_RECORD=recording, GGML_NEURON_BUFFERS="device")
    assert result.said == dict.fromkeys(SCENARIOS, "ok"), result.log
    return manifest_of(recording)


@pytest.fixture(scope="session")
def kernels(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the pack and the tree that are built from the recorded manifest."""
    output = tmp_path_factory.mktemp("kernels")
    build(recorded, output)
    return output


@pytest.fixture(scope="session")
def group_kernels(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the kernels of the groups in `GROUPS` and `RANDOM` and of their nodes; `groups.yaml` is
    beside the folder.
    """
    path = tmp_path_factory.mktemp("groups") / "groups.yaml"
    path.write_text(groups_manifest(programs, *GROUPS, *RANDOM))
    build(path, path.parent / "kernels")
    return path.parent / "kernels"


@pytest.fixture(scope="session")
def benched(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Benched:
    folder = tmp_path_factory.mktemp("benched")
    found = Benched(folder / "model.gguf", folder / "mine.graphs", folder / "kernels")
    random_llama.write(found.model)
    llama_bench(programs, found.model, GGML_NEURON_RECORD=found.recorded)
    build(found.recorded, found.kernels)
    return found


@pytest.fixture(scope="session")
def llama_cpp(llama_cpp_sources: Path) -> Path:
    return llama_cpp_sources


@pytest.fixture(scope="session")
def exporter(there: Callable[[Path, str], Path]) -> Path:
    """Returns the program that `kernelgen model` runs."""
    return there(ROOT / "backend" / "exporter" / "exporter" / "export-graphs", "NEURON_KERNELGEN_EXPORTER")
