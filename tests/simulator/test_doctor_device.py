"""`kernelgen doctor --device` on the simulator: every check passes, and fails under the fault that it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernelgen import cli
from kernelgen.device import checks, measured
from kernelgen.device.bench import CheckError, MissingKernel
from kernelgen.dispatch import costs
from kernelgen.targets import TARGETS

pytestmark = pytest.mark.usefixtures("kept_workers")

ROOT = Path(__file__).parents[2]

FAULTS = {
    "init": {"init"},
    "load": {"load"},
    "execute": {"execute", "synchronous", "in place", "slices", "odd slices", "asynchronous", "latency"},
    "results": {"execute", "synchronous", "in place", "slices", "odd slices", "asynchronous"},
    "late": {"execute", "synchronous", "in place", "slices", "odd slices", "asynchronous"},
    "aliases": {"execute", "in place", "asynchronous"},
    "slices": {"slices", "odd slices"},
    "copies": {"copies"},
    "names": {"load"},
    "order": {"asynchronous"},
    "unknown": {"asynchronous"},
    "full": {"asynchronous"},
}
"""The checks that fail under each fault (NEURON_SIMULATOR_FAULT)."""


SAID = {
    "aliases": "the memory that input and result share is as it was before",
    "slices": "what is written to a slice at",
    "execute": "nrta_execute_schedule returned NRT_EXEC_COMPLETED_WITH_ERR",
    "order": "execution 1 of 3 is not done, and the last one is",
}
"""The report's text for faults that a check can notice in several ways."""


MISTAKES = {
    "layer": "The ops are right by themselves, so this SDK compiles the graph wrong: build models with --fuse=none",
    "rows": "one row read by number: 512 of 512 elements are wrong, the first 0.0 in place of",
    "division": "This SDK divides through a float32 reciprocal: emitters must divide by powers of two",
    "rounding": "This SDK folds float32 to bfloat16 and back away",
    "split": "This SDK splits an axis wrong: emitters must cut it into equal parts",
}
"""The report's text for a miscompile, by check."""

COMPILED = {"graph": "layer", "row": "rows", "division": "division", "rounding": "rounding", "split": "split"}
"""The check that finds each fault of the compiler."""

RUNNING = {
    "slow": {
        "launch": ("warning", "(assumed: {waited}): more than 4 times off"),
        "DMA": ("warning", "more than 4 times off. Kernels are chosen by what that takes: GGML_NEURON_COSTS"),
    },
    "rings": {"bindings": ("warning", "more than 2 times as long. Each layer of a token is such a launch")},
    "drops": {"queue": ("FAILED", "not all were done, though each was reported as done")},
    "writes": {"writes": ("FAILED", "was not there for the execution that was queued after it")},
    "bloat": {"memory": ("warning", "The backend keeps too little memory for programs")},
    "process": {"process": ("FAILED", "computed other results than this one with the same program and inputs")},
}
"""Checks of queues, memory and time that notice each fault of the runtime, with their status and text."""

NEW = {
    *("layer", "rows", "division", "rounding", "split", "launch", "bindings", "queue", "writes", "memory", "DMA"),
    *("collectives", "process"),
}


def built(folder: Path, manifest: str, target: str = "trn1") -> Path:
    (folder / "doctor.yaml").write_text(manifest)
    words = [
        "build",
        str(folder / "doctor.yaml"),
        f"--target={target}",
        "--compiler=simulator",
        "-o",
        str(folder / "out"),
    ]
    assert cli.run([*words, f"--kernels={checks.KERNELS}"]) == 0
    return folder / "out" / f"doctor_{target}"


def manifest_of(*ops: str) -> str:
    """Returns a manifest with only the small kernels of some ops."""
    lines = checks.MANIFEST.partition("graphs:")[0].splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(" ") or any(f"op: {op}," in line for op in ops))


@pytest.fixture(scope="module")
def bundle(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tree with the kernels that add and that write in place; most checks need only these."""
    return built(tmp_path_factory.mktemp("doctor"), manifest_of("add", "set_rows"), neuron_target)


@pytest.fixture(scope="module")
def summing(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same tree with the kernel for two cores."""
    return built(tmp_path_factory.mktemp("doctor"), manifest_of("add", "set_rows", "all_reduce"), neuron_target)


@pytest.fixture(scope="module")
def whole(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the tree of all kernels."""
    return built(tmp_path_factory.mktemp("doctor"), checks.MANIFEST, neuron_target)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def doctor(
    library: Path, environment: dict[str, str], bundle: Path, cache: Path, **variables: str
) -> tuple[int, dict[str, str], str]:
    """Returns the exit status, each check's status by its first word, and the output."""
    command = [sys.executable, "-m", "kernelgen", "doctor", "--device", "--format=json", f"--libnrt={library}"]
    changed = environment | {"NEURON_SIMULATOR_CACHE": str(cache), "PYTHONPATH": str(ROOT / "tools")} | variables
    done = subprocess.run(
        [*command, f"--bundle={bundle}"], env=changed, capture_output=True, text=True, check=False, timeout=120
    )
    said: dict[str, str] = {}
    for result in json.loads(done.stdout):
        name = "execute" if result["name"].startswith("execute ") else result["name"]
        if said.get(name) != "FAILED":
            said[name] = result["status"]
    return done.returncode, said, done.stdout + done.stderr


def prices(target: str) -> tuple[float, float]:
    """Returns the µs of a queued launch and of one that is waited for."""
    queued, waited = (costs.builtin(target, TARGETS[target].lnc, queued=q).launch_us for q in (True, False))
    return queued, waited


def test_every_check_passes(
    library: Path, environment: dict[str, str], neuron_target: str, whole: Path, cache: Path
) -> None:
    status, said, log = doctor(library, environment, whole, cache, NEURON_RT_NUM_CORES="2")
    assert (status, set(said.values())) == (0, {"ok"}), log
    assert len(said) == 11 + len(NEW)
    # The simulator has the prices that the checks assume for a device.
    queued, waited = prices(neuron_target)
    assert f"queued: {queued:g} µs (assumed: {queued:g}); waited for: {waited:g} µs (assumed: {waited:g})" in log


@pytest.mark.long
@pytest.mark.parametrize(("target", "launch"), [("inf2", (15, 140)), ("trn2", (70, 133))])
def test_every_check_passes_on_other_targets(
    library: Path,
    environment: dict[str, str],
    machines: Mapping[str, dict[str, str]],
    tmp_path: Path,
    cache: Path,
    target: str,
    launch: tuple[int, int],
) -> None:
    bundle = built(tmp_path, checks.MANIFEST, target)
    status, said, log = doctor(library, environment | machines[target], bundle, cache, NEURON_RT_NUM_CORES="2")
    assert (status, set(said.values())) == (0, {"ok"}), log
    queued, waited = launch
    assert f"queued: {queued} µs (assumed: {queued}); waited for: {waited} µs (assumed: {waited})" in log


@pytest.mark.parametrize(
    "faults", [tuple(COMPILED), *(pytest.param((f,), marks=pytest.mark.long) for f in COMPILED)], ids=",".join
)
def test_what_a_compiler_gets_wrong_is_found(
    library: Path, environment: dict[str, str], whole: Path, cache: Path, faults: tuple[str, ...]
) -> None:
    variables = {"NEURON_SIMULATOR_FAULT": ",".join(faults), "NEURON_RT_NUM_CORES": "2"}
    status, said, log = doctor(library, environment, whole, cache, **variables)
    assert status == 1
    found = {COMPILED[f] for f in faults}
    # The check `execute` also compares an op that reads or writes a single row with the CPU.
    assert {name for name, what in said.items() if what == "FAILED"} == found | (
        {"execute"} if "row" in faults else set()
    )
    for name in found:
        assert MISTAKES[name] in log


@pytest.mark.parametrize(
    "faults", [tuple(RUNNING), *(pytest.param((f,), marks=pytest.mark.long) for f in RUNNING)], ids=",".join
)
def test_what_a_runtime_does_wrong_is_found(
    library: Path,
    environment: dict[str, str],
    neuron_target: str,
    whole: Path,
    cache: Path,
    tmp_path: Path,
    faults: tuple[str, ...],
) -> None:
    locks = str(tmp_path / "machine")
    variables = {
        "NEURON_SIMULATOR_FAULT": ",".join(faults),
        "NEURON_SIMULATOR_LOCKS": locks,
        "NEURON_RT_NUM_CORES": "2",
    }
    status, said, log = doctor(library, environment, whole, cache, **variables)
    expected = {name: what for f in faults for name, what in RUNNING[f].items()}
    assert {name: what for name, what in said.items() if what != "ok"} == {n: what for n, (what, _) in expected.items()}
    assert status == ("FAILED" in said.values())
    for _, text in expected.values():
        assert text.replace("{waited}", f"{prices(neuron_target)[1]:g}") in log


def test_a_bundle_without_a_kernel_is_reported(
    library: Path, environment: dict[str, str], bundle: Path, cache: Path
) -> None:
    status, said, log = doctor(library, environment, bundle, cache)
    assert (status, said["division"], said["layer"]) == (0, "skipped", "skipped")
    assert "the bundle lacks the kernel probe_divide: build" in log


def test_a_process_that_does_not_end_is_stopped_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SimpleNamespace(path=tmp_path, bundle=tmp_path, nrt=SimpleNamespace(close=lambda: None))
    sleeps = tmp_path / "sleeps"
    sleeps.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeps.chmod(0o755)
    monkeypatch.setattr(measured, "fingerprint", lambda bench: {"results": {}, "us": 0.0})
    monkeypatch.setattr(measured, "MAX_WAIT", 0.1)
    monkeypatch.setattr(measured, "CORES_BUSY", 0.1)
    monkeypatch.setattr(measured.sys, "executable", str(sleeps))
    with pytest.raises(CheckError, match=r"process 2 did not end within 0\.2 s, and was stopped"):
        measured.process(bench)


def test_memory_of_one_program_is_not_judged() -> None:
    bench = SimpleNamespace(kernels=[])
    with pytest.raises(MissingKernel, match="the bundle has one program"):
        measured.memory(bench)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if f in ("init", "results") else pytest.mark.long) for f in FAULTS]
)
def test_a_check_fails_when_what_it_looks_at_is_wrong(
    library: Path, environment: dict[str, str], bundle: Path, cache: Path, fault: str
) -> None:
    status, said, log = doctor(library, environment, bundle, cache, NEURON_SIMULATOR_FAULT=fault)
    assert status == 1
    assert {name for name, what in said.items() if what == "FAILED"} == FAULTS[fault], log
    assert SAID.get(fault, "") in log
    # A check does not run if it depends on one that failed.
    made = [what in ("ok", "FAILED") for name, what in said.items() if name not in NEW]
    assert all(made) == (fault not in ("init", "load", "names"))


def test_outputs_of_the_compiler_pass(library: Path, environment: dict[str, str], bundle: Path, cache: Path) -> None:
    status, said, log = doctor(library, environment, bundle, cache, NEURON_SIMULATOR_FAULT="subgraphs")
    assert (status, said["execute"], said["asynchronous"]) == (0, "ok", "ok"), log


@pytest.mark.long
@pytest.mark.parametrize(
    ("variables", "exit_status", "check", "status", "text"),
    [
        ({"NEURON_SIMULATOR_SLICE_ALIGNMENT": "512"}, 1, "odd slices", "FAILED", "nrt_tensor_allocate_slice"),
        ({"NEURON_SIMULATOR_SLICE_ALIGNMENT": "512"}, 1, "slices", "ok", "at multiples of 512"),
        ({"NEURON_SIMULATOR_RELEASE": "2.28"}, 0, "asynchronous", "ok", "nrt_execute is used"),
        ({"NEURON_SIMULATOR_LAUNCH_US": "6000"}, 1, "latency", "FAILED", "expected at most 5000"),
    ],
)
def test_another_runtime_is_reported(
    library: Path,
    environment: dict[str, str],
    bundle: Path,
    cache: Path,
    variables: dict[str, str],
    exit_status: int,
    check: str,
    status: str,
    text: str,
) -> None:
    found, said, log = doctor(library, environment, bundle, cache, **variables)
    assert (found, said[check]) == (exit_status, status), log
    assert text in log


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("rank@1", "NRT_EXEC_UNIT_UNRECOVERABLE"),
        ("load@4", "its call has not returned"),  # the second rank's, after two other programs
        pytest.param("wedged", "nrt_load_collectives returned NRT_TIMEOUT", marks=pytest.mark.long),
        pytest.param("absent@2", "nrt_execute returned NRT_TIMEOUT", marks=pytest.mark.long),
    ],
)
def test_cores_that_do_not_sum_up_are_reported(
    library: Path, environment: dict[str, str], summing: Path, cache: Path, fault: str, text: str
) -> None:
    variables = {"NEURON_SIMULATOR_FAULT": fault, "NEURON_RT_EXEC_TIMEOUT": "2", "NEURON_RT_NUM_CORES": "2"}
    status, said, log = doctor(library, environment, summing, cache, **variables)
    assert (status, {name for name, what in said.items() if what == "FAILED"}) == (1, {"collectives"}), log
    assert text in log


def test_one_core_sums_up_nothing(library: Path, environment: dict[str, str], summing: Path, cache: Path) -> None:
    status, said, log = doctor(library, environment, summing, cache, NEURON_RT_NUM_CORES="1")
    assert (status, said["collectives"]) == (0, "skipped"), log
    assert "it is for 2 cores, and the process has 1" in log


def test_a_file_that_is_not_a_library_is_reported(environment: dict[str, str], bundle: Path, cache: Path) -> None:
    status, said, log = doctor(Path("/bin/true"), environment, bundle, cache)
    assert (status, said["library"], said["init"]) == (1, "FAILED", "skipped"), log
