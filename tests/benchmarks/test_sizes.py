"""The benchmarks' own logic, at tiny sizes: counts and judgements are right; times are not checked."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import against_scripts
import scale
import synthetic_kernels
import usage
from against_scripts import BAZEL, BUILD, GENERATOR, LOOP, Timed
from scale import Cost


def test_a_manifest_of_any_size_has_as_many_kernels() -> None:
    assert scale.text(7).count("op: add") == 7
    assert len(set(scale.text(1000).split("  - "))) == 1001
    with pytest.raises(ValueError, match="at most 40000"):
        scale.text(40_001)


def test_growth_is_judged_by_cpu_time_per_kernel() -> None:
    before = Cost("plan", 0.1, 0.1, 50)

    def missed(cost: Cost, *, largest: bool = False, before: tuple[int, Cost] | None = (100, before)) -> list[str]:
        return [f.what for f in scale.judge(1000, cost, before, largest) if not f.met]

    assert missed(Cost("plan", 1.4, 1.4, 60)) == []
    assert missed(Cost("plan", 9.0, 1.4, 60)) == []
    assert missed(Cost("plan", 1.4, 1.6, 60)) == ["plan: CPU time"]
    assert missed(Cost("plan", 1.4, 9.9, 60), before=None) == []
    assert missed(Cost("plan", 2.1, 1.4, 60), largest=True) == ["plan"]
    assert missed(Cost("plan", 1.4, 1.4, 1501)) == ["plan: peak memory"]
    # The memory of Bazel's server has no limit.
    assert missed(Cost("plan", 1.4, 1.4, 1501, own=False)) == []


@pytest.mark.long
def test_scale_measures_every_step_and_exits_with_1_on_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    arguments = ["scale", "--without", "bazel", "--json", str(path), "--sizes"]
    monkeypatch.setattr(sys, "argv", [*arguments, "3", "6"])
    monkeypatch.setattr(scale, "GROWTH", 1000.0)
    assert scale.main() == 0
    figures = json.loads(path.read_text())["figures"]
    steps = {"plan", "render for Bazel", "write the pack", "write the tree", "open the pack"}
    steps |= {"CMake: configure", "Ninja: null build"}
    assert {f["what"] for f in figures} == {s + what for s in steps for what in ("", ": CPU time", ": peak memory")}
    assert [f["kernels"] for f in figures if f["what"] == "plan"] == [3, 6]
    assert all(f["value"] > 0 for f in figures)
    monkeypatch.setattr(scale, "PEAK_MB", 1.0)
    monkeypatch.setattr(sys, "argv", [*arguments, "3", "--without", "ninja"])
    assert scale.main() == 1


def test_usage_is_of_the_command_and_what_it_waited_for() -> None:
    grow = "x = bytearray(80_000_000); import sys; sys.stdout.write(sys.stdin.read())"
    words = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}])"]
    used = usage.run(words, stdin="given")
    assert used.output == "given"
    assert used.peak_mb > 80
    assert used.cpu_seconds > 0
    with pytest.raises(usage.CommandFailed, match=r"exit status 3[\s\S]*said"):
        usage.run([sys.executable, "-c", "print('said'); raise SystemExit(3)"])
    now, peak = usage.process_memory_mb(os.getpid())
    assert 1 < now <= peak


def test_made_up_kernels_differ_and_the_stand_in_writes_one_for_all(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    copy = tmp_path / "copy"
    for folder in ("tools/kernelgen", "tools/nki_interpreter", "kernels", "rules/cmake"):
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    sample = synthetic_kernels.sample(copy, tmp_path / "sample")
    assert sample.hlo and b"kernelgen-simulator" in sample.neff
    synthetic_kernels.stand_in(copy, sample, tmp_path)
    python = [sys.executable, "-P", "-m"]
    env = {**os.environ, "PYTHONPATH": str(copy / "tools"), "PYTHONDONTWRITEBYTECODE": "1"}
    for step, wanted in (("emit", sample.hlo), ("compile", sample.neff)):
        usage.run([*python, "kernelgen.steps.worker", step, f"--output={tmp_path / step}"], env=env)
        assert (tmp_path / step).read_bytes() == wanted
    assert json.loads(sample.origin)["source"] == "compiled"


def test_the_kernels_of_the_comparison_have_one_rope() -> None:
    kernels = [
        {"id": f"{op}{n}", "emitters": [["kernelgen", op]], "spec": {"op": op, "alias": None}}
        for op in ("add", "mul", "rope")
        for n in range(4)
    ]
    for count in (2, 5, 9):
        chosen = against_scripts.choose(kernels, count)
        assert len({k["id"] for k in chosen}) == count
        assert sum(k["emitters"][0][1] == "rope" for k in chosen) == 1
    assert "alias" not in json.loads(against_scripts.manifest(chosen))["kernels"][0]
    for count in (1, 10):
        with pytest.raises(ValueError, match="not enough"):
            against_scripts.choose(kernels, count)


def test_cases_are_judged_against_the_run_that_they_stand_for() -> None:
    ours = [Timed(10, 6, 6), Timed(1, 0, 0), Timed(2, 1, 1), Timed(3, 0, 0), Timed(4, 0, 0)]
    times = {
        LOOP: [Timed(100, 6, 6), Timed(90, 6, 6)],
        GENERATOR: [Timed(20, 6, 6), Timed(18, 6, 6)],
        BUILD: ours,
        BAZEL: ours,
    }
    found = list(against_scripts.judge(times))
    assert all(f.met for f in found)
    ratios = {(f.what, f.peer.what): f.ratio for f in found if f.peer and f.unit == "s"}
    assert ratios[f"{BUILD}: cold", LOOP] == 10
    assert ratios[f"{BUILD}: cold", GENERATOR] == 2
    assert ratios[f"{BAZEL}: nothing changed", LOOP] == 90
    assert ratios[f"{BAZEL}: a second machine", GENERATOR] == 4.5
    assert ratios[f"{GENERATOR}: cold", LOOP] == 5
    # A compile that was not necessary.
    times[BAZEL] = [*ours[:3], Timed(3, 1, 0), ours[4]]
    assert [f.what for f in against_scripts.judge(times) if not f.met] == [
        f"{BAZEL}: a comment in every emitter: compiles"
    ]


@pytest.mark.long
def test_every_way_makes_the_same_neffs_and_ours_compiles_what_changed() -> None:
    found = list(against_scripts.measure(2, bazel=False))
    assert [f.what for f in found if not f.met] == []
    compiles = [f.value for f in found if f.what.startswith(BUILD) and f.what.endswith("compiles")]
    assert compiles == [2, 0, 1, 0, 0]
    assert [f.value for f in found if "NEFFs equal" in f.what] == [2, 2, 2]
