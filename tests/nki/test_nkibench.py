"""The survey of NKIBench's kernels: on a folder that is made here, and on the public kernels if this machine has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nkibench
import pytest

BENCH, SOLUTIONS = "KERNELGEN_NKIBENCH", "KERNELGEN_NKIBENCH_SOLUTIONS"
"""The environment variables that name NKIBench and a folder of its solutions."""

REFERENCE = """
import numpy as np

def get_inputs():
    return [np.random.normal(size=(64, 32)).astype(np.float32)]

def forward(x):
    return x * 2

def transform_to_nki_inputs(inputs):
    return [np.reshape(inputs[0], (2, 32, 32))]

def transform_nki_outputs(got, wanted):
    return [np.reshape(got, wanted.shape)]
"""
KERNEL = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(2):
        tile = nl.load(x[i])
        {line}
        nl.store(out[i], value=tile * {factor})
    return out
"""
CSV = """timestamp,op,candidate,parent,passed,latency_ms,speedup,notes
t,double,runs/good.py,base,false,,,first try
t,double,runs/good.py,base,true,0.5,1.0,"PASS, worked around NCC_IBCG901"
t,double,runs/wrong.py,base,false,0.4,,error by design
t,double,runs/refused.py,base,false,,,exit 70 [NCC_IBCG901] no broadcast
t,double,runs/asked.py,base,false,,,a plan only
"""
BROADCAST = "row = nl.ndarray((32, 32), x.dtype, buffer=nl.sbuf); nisa.dma_copy(dst=row, src=x[i, nl.arange(32)[:, None] * 0, nl.arange(32)])"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    bench, solutions = tmp_path / "NKIBench", tmp_path / "workspaces"
    runs = solutions / "double" / "runs"
    runs.mkdir(parents=True)
    bench.mkdir()
    implementation = {"task": "reference.py", "kernel": "base.py"}
    (bench / "summary.json").write_text(json.dumps({"double": {"cases": {"1": {"impls": [implementation]}}}}))
    (bench / "reference.py").write_text(REFERENCE)
    (solutions / "double" / "benchmark.csv").write_text(CSV)
    for path, line, factor in (
        (bench / "base.py", "", 2),
        (runs / "good.py", "", 2),
        (runs / "wrong.py", "", 3),
        (runs / "refused.py", BROADCAST, 2),
        (runs / "asked.py", "undefined()", 2),
    ):
        path.write_text(KERNEL.format(line=line, factor=factor))
    (runs / "offline.py").write_text("print('a study')\n")
    return bench, solutions


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, nkibench.__file__, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_fate_of_each_kernel_is_its_last_row(folders: tuple[Path, Path]) -> None:
    found = {case.path.name: (case.fate, case.codes, case.right) for case in nkibench.cases(*folders)}
    assert found == {
        "base.py": (nkibench.RAN, (), True),
        "good.py": (nkibench.RAN, (), True),
        "wrong.py": (nkibench.RAN, (), False),
        "refused.py": (nkibench.REFUSED, ("NCC_IBCG901",), None),
        "asked.py": (nkibench.UNKNOWN, (), None),
    }


def test_the_table_and_what_is_wrong(folders: tuple[Path, Path]) -> None:
    bench, solutions = folders
    (solutions / "double" / "runs" / "good.py").unlink()
    done = run(bench, solutions, "--execute")
    row = next(line for line in done.stdout.splitlines() if line.startswith("double"))
    assert row.split()[1:-2] == "4 2 of 2 1 of 1 0 of 1".split(), done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert found == ["wrong: double/asked.py: NameError: name 'undefined' is not defined"]
    assert done.returncode == 1, "an exception that is not a diagnostic is wrong, whatever became of the kernel"


def case(fate: str, right: bool | None = None) -> nkibench.SurveyedKernel:
    return nkibench.SurveyedKernel("double", Path(), Path("k.py"), fate, ("NCC_IBCG901",), right)


@pytest.mark.parametrize(
    ("case", "what", "message", "error", "said"),
    [
        (case(nkibench.RAN, True), nkibench.ACCEPTED, "", 1e-5, ""),
        (case(nkibench.RAN, True), nkibench.ACCEPTED, "", 3e-5, "right on a device, and have an error of 3e-05"),
        (case(nkibench.RAN, False), nkibench.ACCEPTED, "", 2e-3, ""),
        (case(nkibench.RAN, False), nkibench.ACCEPTED, "", 0.0, "wrong on a device, and have an error of 0"),
        (case(nkibench.RAN, True), nkibench.REFUSED, "k.py:1: err_x", None, "is refused: k.py:1: err_x"),
        (case(nkibench.REFUSED), nkibench.REFUSED, "k.py:1: err_x (NCC_IBCG901)", None, ""),
        (case(nkibench.REFUSED), nkibench.REFUSED, "k.py:1: err_x", None, "the interpreter otherwise: k.py:1: err_x"),
        (case(nkibench.REFUSED), nkibench.ACCEPTED, "", None, "refused it (NCC_IBCG901), and it is accepted"),
        (case(nkibench.UNKNOWN), nkibench.REFUSED, "k.py:1: err_x", None, ""),
        (case(nkibench.UNKNOWN), nkibench.FAILED, "not recorded within 120 s", None, "not recorded within 120 s"),
    ],
)  # fmt: skip
def test_what_is_not_as_on_a_device(
    case: nkibench.SurveyedKernel, what: str, message: str, error: float | None, said: str
) -> None:
    found = nkibench.wrong(case, nkibench.Interpreted(what, message, 0.1, error))
    assert said in found and bool(said) == bool(found)


def test_a_kernel_that_does_not_end_is_stopped(folders: tuple[Path, Path]) -> None:
    bench, _ = folders
    (bench / "base.py").write_text(KERNEL.format(line="while True: pass", factor=2))
    (case,) = nkibench.cases(bench, None)
    outcome = nkibench.judge(case, 0.2, False)
    assert (outcome.what, outcome.message) == (nkibench.FAILED, "_TooLongError: not recorded within 0.2 CPU seconds")


def test_a_folder_that_is_not_nkibench(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2 and "it has no summary.json" in done.stderr


def test_public_kernels() -> None:
    """docs/results/nki-suites.md has the figures of these kernels; their files have no licence that allows copies here."""
    folders = [os.environ[name] for name in (BENCH, SOLUTIONS) if os.environ.get(name)]
    if not os.environ.get(BENCH):
        pytest.skip(f"{BENCH} does not name NKIBench (docs/results/nki-suites.md says how to get it)")
    done = run(*folders)
    assert done.returncode == 0, done.stdout + done.stderr
