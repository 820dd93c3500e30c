"""The forecast of a build's time, and its basis."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.build.estimates import Forecast, Record, described, forecast
from kernelgen.cache import Folder

from .conftest import ROOT, Done

pytestmark = pytest.mark.usefixtures("kept_workers")

Kernelgen = Callable[..., Done]


def kernel(op: str, shape: str) -> str:
    return f"{op}-{shape}-f32-0123456789ab"


def test_without_records_only_the_number_is_known() -> None:
    assert forecast([kernel("add", "8")], [], 4) == Forecast(1, None, 0, 1)
    assert forecast([], [], 4).compiles == 0


def test_records_of_the_same_op_and_the_nearest_size_decide() -> None:
    records = [Record(kernel("mul_mat", f"{64 << n}x8"), 10.0 * n) for n in range(1, 11)]
    records += [Record(kernel("add", "4096x512"), 1000.0)]
    # The five nearest of ten take 30 to 70 s.
    assert forecast([kernel("mul_mat", f"{64 << 5}x8")], records, 1) == Forecast(1, 50.0, 11, 0)
    assert forecast([kernel("mul_mat", "1")], records, 1).seconds == 30.0
    assert forecast([kernel("add", "1x1x1")], records, 1).seconds == 1000.0


def test_an_op_without_records_takes_what_is_usual() -> None:
    records = [Record(kernel("add", "8"), seconds) for seconds in (10.0, 20.0, 90.0)]
    assert forecast([kernel("rope", "8"), kernel("add", "8"), "named"], records, 1) == Forecast(3, 60.0, 3, 2)


def test_some_run_at_once() -> None:
    records = [Record(kernel("add", "8"), 10.0), Record(kernel("mul", "8"), 35.0)]
    kernels = [kernel("add", "8")] * 4 + [kernel("mul", "8")]
    assert [forecast(kernels, records, n).seconds for n in (1, 2, 5, 100)] == [75.0, 55.0, 35.0, 35.0]


@pytest.mark.parametrize(
    ("found", "at_most", "text"),
    [
        (Forecast(14, 1512.0, 120, 0), False, "14 compiles ahead, about 25 min with -j 2 (from 120 recorded compiles)"),
        (Forecast(1, 40.2, 1, 0), True, "at most 1 compile ahead, about 40 s with -j 2 (from 1 recorded compile)"),
        (
            Forecast(9, 12600.0, 7, 3),
            False,
            "9 compiles ahead, about 3.5 h with -j 2 (from 7 recorded compiles, none of them of the op of 3)",
        ),
        (
            Forecast(5, None, 0, 5),
            False,
            "5 compiles ahead; how long they take is not known: the cache has no record of a compile",
        ),
        (Forecast(2, 0.0, 2, 0), False, "2 compiles ahead, about 1 s with -j 2 (from 2 recorded compiles)"),
    ],
)
def test_a_forecast_says_what_it_is_based_on(found: Forecast, at_most: bool, text: str) -> None:
    assert described(found, at_most, 2) == text


@pytest.fixture
def neuronx_cc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the double of neuronx-cc, which takes a second."""
    program = tmp_path / "sdk" / "bin" / "neuronx-cc"
    program.parent.mkdir(parents=True)
    double = ROOT / "tests" / "compilers" / "fake_neuronx_cc"
    program.write_text("\n".join([f"#!{sys.executable}", *double.read_text().splitlines()[1:], ""]))
    shutil.copymode(double, program)
    program.with_name("neuronx-cc.json").write_text(json.dumps({"seconds": 1.0}))
    monkeypatch.setenv("NEURON_SDK", str(tmp_path / "sdk"))


def manifest(tmp_path: Path, *ops: str) -> Path:
    lines = "".join(f'  - {{op: {op}, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}}\n' for op in ops)
    path = tmp_path / "m.yaml"
    path.write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n{lines}")
    return path


@pytest.mark.usefixtures("neuronx_cc")
def test_a_build_says_what_is_ahead(kernelgen: Kernelgen, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def build(out: str, *more: str, ops: tuple[str, ...] = ("relu", "silu")) -> Done:
        words = ["-o", tmp_path / out, "-j", "1", "--cache", cache, "--compiler", "neuronx-cc", "--memory", "99999"]
        done = kernelgen("build", manifest(tmp_path, *ops), *words, *more)
        assert done.code == 0, done
        return done

    unknown = "at most 2 compiles ahead; how long they take is not known: the cache has no record of a compile"
    assert build("out", "--dry-run").out.splitlines()[-1] == unknown
    assert unknown in build("out").err.splitlines()
    (one, two) = [Folder(cache).head(stored.name) for stored in Folder(cache).entries()]
    assert one and two and one.seconds and two.seconds
    # Both are up to date, and their records give a forecast for a third.
    assert "ahead" not in build("out", "--dry-run").out + build("out").err
    text = build("out", "--dry-run", ops=("relu", "silu", "gelu")).out.splitlines()[-1]
    assert text.startswith("at most 1 compile ahead, about ")
    assert text.endswith(" s with -j 1 (from 2 recorded compiles, none of them of the op of 1)")
    # The forecast skips compiles that are in the cache, and NEFFs that the output folder has lost.
    build("other")
    shutil.rmtree(tmp_path / "other/.kernelgen/neff")
    assert "ahead" not in build("other", "--dry-run").out
    for stored in list(Folder(cache).entries())[:1]:
        Folder(cache).drop(stored.name)
    text = build("other", "--dry-run").out.splitlines()[-1]
    assert text.startswith("1 compile ahead, about ") and "(from 1 recorded compile" in text


def test_the_simulator_takes_no_time_worth_saying(kernelgen: Kernelgen, tmp_path: Path) -> None:
    words = ["-o", tmp_path / "out", "--cache", tmp_path / "cache", "--compiler", "simulator"]
    done = kernelgen("build", manifest(tmp_path, "relu"), *words)
    assert done.code == 0 and "ahead" not in done.err
    (stored,) = Folder(tmp_path / "cache").entries()
    head = Folder(tmp_path / "cache").head(stored.name)
    assert head is not None and head.seconds is None
