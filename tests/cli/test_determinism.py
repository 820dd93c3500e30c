"""`--check-determinism` finds emitters whose results vary, and only these."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Done

Run = Callable[..., Done]

EMITTERS = """
import os, random
from kernelgen.emitters import emitter

COUNT = 0

@emitter("chance")
def chance(x):
    return x * random.random()

@emitter("hashed")
def hashed(x):
    for name in {"sin", "cos", "tan", "exp", "log", "abs"}:
        x = getattr(__import__("jax.numpy").numpy, name)(x)
    return x

@emitter("counted")
def counted(x):
    global COUNT
    COUNT += 1
    return x * COUNT

@emitter("sometimes")
def sometimes(x):
    if os.environ["PYTHONHASHSEED"] == "2":
        raise ValueError("not this time")
    return x

@emitter("told")
def told(x):
    return x * float(os.environ["FACTOR"])

@emitter("steady")
def steady(x):
    return x + x
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(EMITTERS)
    return tmp_path


def manifest(folder: Path, *ops: str) -> Path:
    lines = "".join(
        f'  - {{op: {op}, inputs: ["({n},1,1,1)/f32"], output: "({n},1,1,1)/f32"}}\n' for op in ops for n in (4, 5)
    )
    (folder / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n{lines}")
    return folder / "m.yaml"


def build(kernelgen: Run, folder: Path, *more: str | Path) -> Done:
    return kernelgen("build", *more, "-o", folder / "out", "--kernels", folder / "mine", "--compiler", "simulator")


def line(function: str) -> int:
    return EMITTERS.splitlines().index(f'@emitter("{function}")') + 2


def test_what_is_not_the_same_every_time_fails_and_costs_no_other_kernel(kernelgen: Run, folder: Path) -> None:
    path = manifest(folder, "chance", "hashed", "counted", "sometimes", "steady")
    done = build(kernelgen, folder, path, "--check-determinism", "-j", "1")  # in one process, so the order matters
    assert done.code == 1
    assert "2 built (2 compiled, 0 up to date), 8 failed" in done.out
    for op in ("chance", "hashed", "counted", "sometimes"):
        found = re.findall(
            rf"{folder}/mine/own\.py:{line(op)}:1: error: kernel {op}-[45]-f32-\w+: two processes emit", done.err
        )
        assert len(found) == 2, done.err
    assert re.search(r"%\d+ = f32\[\] constant\(\), then %\d+ = f32\[\] constant\(\) \(differs in literal\)", done.err)
    assert re.search(r"kernel hashed-4-.* HLO: instruction \d of computation kernel: %\d+ = .*, then %\d+ = ", done.err)
    assert "one of them fails:" in done.err and "ValueError: not this time" in done.err
    assert not (folder / "out/m_trn1.kernels.gguf").exists()
    assert not (folder / "out/.kernelgen/tmp").exists()


def test_an_undeclared_input_is_found_where_the_kernel_counted_as_up_to_date(
    kernelgen: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manifest(folder, "told")
    monkeypatch.setenv("FACTOR", "2")
    assert "2 compiled" in build(kernelgen, folder, path, "-j", "1").out
    monkeypatch.setenv("FACTOR", "3")
    assert "2 built (0 compiled, 2 up to date)" in build(kernelgen, folder, path, "-j", "1").out
    done = build(kernelgen, folder, path, "--check-determinism", "-j", "1")
    assert done.code == 1 and done.err.count("emitting it again gives another HLO than there is: instruction") == 2
    done = build(kernelgen, folder, path, "--check-determinism", "-j", "1")
    assert done.code == 0 and "2 built (2 compiled, 0 up to date)" in done.out


def test_emit_checks_too(kernelgen: Run, folder: Path) -> None:
    words = ["--kernels", folder / "mine", "-o", folder / "hlo", "--check-determinism"]
    done = kernelgen("emit", manifest(folder, "chance", "steady"), *words)
    assert done.code == 1 and done.err.count("two processes emit different HLO") == 2
    assert [Path(path).name.split("-")[0] for path in done.out.splitlines()] == ["steady", "steady"]


def test_kernelgens_own_emitters_give_the_same_every_time(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    done = kernelgen("emit", basic, "-o", tmp_path / "hlo", "--check-determinism")
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 10
