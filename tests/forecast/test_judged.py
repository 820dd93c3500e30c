"""Published measurements compared with the models: the errors, and the programs that count them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import forecast_judged
import nki_judged
from kernelgen.dispatch.modelled_cost import UNHIDDEN
from nki_judged import MeasuredKernel


def test_the_forecast_is_as_far_from_published_figures_as_its_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert forecast_judged.main(["--markdown"]) == 0
    said = capsys.readouterr().out
    page = (Path(__file__).resolve().parents[2] / "docs" / "results" / "forecast-judged.md").read_text()
    table, counts = said.strip().split("\n\n")
    assert table in page and counts in page
    assert sum("| added later |" in line for line in table.splitlines()) == len(forecast_judged.LATER) >= 15


def test_half_of_the_first_figures_judge_and_no_rule_was_chosen_by_them() -> None:
    first = [one for one in forecast_judged.FIGURES if not one.in_table]
    assert len(first) == 29 and not any(one.in_table for one in forecast_judged.LATER)
    errors = [one.modelled() / one.measured - 1 for one in (*first[1::2], *forecast_judged.LATER)]
    assert sum(abs(error) <= 0.3 for error in errors) >= 0.8 * len(errors)  # the goal


def test_the_time_of_the_kernel_for_attention_is_between_those_that_were_measured() -> None:
    assert forecast_judged.flash_ms("trn1", 16, 2048, 0) == pytest.approx(6.184)
    assert forecast_judged.flash_ms("trn1", 32, 2048, 6144) == pytest.approx(2 * 19.740)
    assert forecast_judged.flash_ms("trn2", 8, 2048, 0) == pytest.approx(2.742 / 2)
    assert forecast_judged.flash_ms("trn2", 8, 8192, 0) == pytest.approx(2.742 + 4.411)
    assert 14.045 < forecast_judged.flash_ms("trn2", 8, 4096, 32768) < 17
    assert forecast_judged.in_buckets(8192, 4096) == [(4096, 8192), (4096, 8192)]


def judged(op: str, name: str, measured: float, **engines: float) -> MeasuredKernel:
    none = dict.fromkeys(("vector", "scalar"), 0.0)
    return MeasuredKernel(op, name, measured, dict.fromkeys(nki_judged.ENGINES, 0.0) | engines, none)


def test_the_scale_is_the_one_that_brings_the_times_together() -> None:
    kernels = [judged("a", str(n), 50.0 * n, tensor=100.0 * n) for n in range(1, 5)]
    kernels += [judged("b", str(n), 60.0 * n, vector=100.0 * n, scalar=20.0 / UNHIDDEN * n) for n in range(1, 5)]
    kernels += [judged("c", str(n), 50.0 * n, dma=100.0 * n, vector=99.0 * n) for n in range(1, 5)]
    assert nki_judged.fit(kernels) == pytest.approx(0.5)


def test_pairs_are_ordered_right_or_wrong_or_called_equal() -> None:
    kernels = [judged("a", "1", 100.0, dma=100.0), judged("a", "2", 200.0, dma=101.0)]  # the model calls them equal
    kernels += [judged("b", "1", 100.0, dma=50.0), judged("b", "2", 102.0, dma=99.0)]  # measured as equal: not compared
    kernels += [
        judged("c", "1", 100.0, dma=90.0),
        judged("c", "2", 150.0, dma=80.0),
        judged("c", "3", 300.0, dma=400.0),
    ]
    assert nki_judged.order(kernels) == (2, 1, 1)


KERNEL = """
import neuronxcc.nki.language as nl

def kernel(x):
    result = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range({times}):
        nl.store(result, nl.exp(nl.load(x)))
    return result
"""
REFERENCE = """
import numpy as np
def get_inputs(): return [np.zeros((128, 512), np.float32)]
def transform_to_nki_inputs(inputs): return inputs
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a corpus of two ops. One op has three files: a kernel, a file without a kernel, and a kernel without a
    latency.
    """
    bench, kda = tmp_path / "accelopt" / "NKIBench", tmp_path / "kda"
    (bench / "kernels").mkdir(parents=True)
    (bench / "reference").mkdir()
    summary, baselines = {}, {}
    for op in ("one", "two"):
        (bench / "kernels" / f"{op}_0.py").write_text(KERNEL.format(times=1))
        (bench / "reference" / f"{op}.py").write_text(REFERENCE)
        impls = [{"task": f"./reference/{op}.py", "kernel": f"./kernels/{op}_0.py"}]
        summary[op] = {"cases": {"0": {"impls": impls}}}
        baselines[f"{op}[case=0]"] = {"kernel": f"{op}_0.py", "baseline_latency_ms": 0.01, "op": op}
    (bench / "summary.json").write_text(json.dumps(summary))
    (kda / "workspaces" / "one" / "runs").mkdir(parents=True)
    (kda / "baselines.json").write_text(json.dumps(baselines))
    for name, text in (("twice", KERNEL.format(times=2)), ("none", "x = 1\n"), ("unmeasured", KERNEL.format(times=3))):
        (kda / "workspaces" / "one" / "runs" / f"{name}.py").write_text(text)
    with (kda / "workspaces" / "one" / "benchmark.csv").open("w") as file:
        rows = csv.writer(file)
        rows.writerows([["candidate", "latency_ms"], ["runs/twice.py", "0.5"], ["runs/twice.py", "0.02"]])
        rows.writerows([["runs/none.py", "0.1"], ["runs/unmeasured.py", "N/A"]])
    return tmp_path / "accelopt", kda


def test_a_corpus_is_read_from_its_folders(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.json"
    arguments = [*map(str, folders), "--kept", str(kept)]
    assert nki_judged.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "one none: not recorded" in err
    assert [line.split()[:3] for line in out.splitlines()[:3]] == [
        ["one", "one_0", "0.010"], ["one", "twice", "0.020"], ["two", "two_0", "0.010"],
    ]  # fmt: skip
    assert "fitted on one\n" in out and out.splitlines()[-1].split()[-3:] == ["1", "0", "0"]
    assert sorted(json.loads(kept.read_text())) == ["one one_0", "one twice", "two two_0"]
    assert nki_judged.main([str(tmp_path), str(tmp_path)]) == 1
    assert "summary.json is not there" in capsys.readouterr().err
