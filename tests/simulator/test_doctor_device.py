"""`kernelgen doctor --device` on the simulator: every check passes, and fails when the simulator does wrong what it looks at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kernelgen import cli
from kernelgen.device import checks

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
"""Checks that fail, by what is done wrong (NEURON_SIMULATOR_FAULT)."""


SAID = {
    "aliases": "the memory that input and result share is as it was before",
    "slices": "what is written to a slice at",
    "execute": "nrta_execute_schedule returned NRT_EXEC_COMPLETED_WITH_ERR",
    "order": "execution 1 of 3 is not done, and the last one is",
}
"""What the report says, where a check finds in more than one way that something is wrong."""


@pytest.fixture(scope="module")
def bundle(neuron_target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the tree of those of the kernels that add and that write in place, which are what the checks need."""
    folder = tmp_path_factory.mktemp("doctor")
    lines = checks.MANIFEST.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(" ") or "op: add" in line or "op: set_rows" in line]
    (folder / "doctor.yaml").write_text("".join(kept))
    words = [
        "build",
        str(folder / "doctor.yaml"),
        f"--target={neuron_target}",
        "--compiler=simulator",
        "-o",
        str(folder / "out"),
    ]
    assert cli.run(words) == 0
    return folder / "out" / f"doctor_{neuron_target}"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


def doctor(
    library: Path, environment: dict[str, str], bundle: Path, cache: Path, **variables: str
) -> tuple[int, dict[str, str], str]:
    """Returns the exit status, the status of each check by its first word, and what was printed."""
    command = [sys.executable, "-m", "kernelgen", "doctor", "--device", "--format=json", f"--libnrt={library}"]
    cache.chmod(0o700)
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


def test_every_check_passes(library: Path, environment: dict[str, str], bundle: Path, cache: Path) -> None:
    status, said, log = doctor(library, environment, bundle, cache)
    assert (status, set(said.values())) == (0, {"ok"}), log
    assert len(said) == 11


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
    # What needs a check that failed is not made.
    assert all(what in ("ok", "FAILED") for what in said.values()) == (fault not in ("init", "load", "names"))


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
def test_another_runtime_is_said(
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


def test_a_library_that_is_none_is_said(environment: dict[str, str], bundle: Path, cache: Path) -> None:
    status, said, log = doctor(Path("/bin/true"), environment, bundle, cache)
    assert (status, said["library"], said["init"]) == (1, "FAILED", "skipped"), log
