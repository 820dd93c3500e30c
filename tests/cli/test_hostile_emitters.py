"""An emitter that ends its process, or prints much, affects no other kernel and not the exit status."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.errors import MAX_TEXT
from kernelgen.steps import worker

from .conftest import Done

Run = Callable[..., Done]


EMITTERS = """
import os, sys, time
from kernelgen.emitters import emitter

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

class Loud(BaseException):
    pass

@emitter("leaves")
def leaves(x):
    sys.exit(0)

@emitter("loud")
def loud(x):
    raise Loud("heard")

@emitter("mute")
def mute(x):
    raise Mute()

@emitter("long")
def long(x):
    raise ValueError("y" * 10_000_000)

@emitter("prints")
def prints(x):
    for _ in range(2000):
        print("z" * 10_000)
    return x - x

@emitter("steers")
def steers(x):
    raise ValueError("\\x1b[2J and \\x07")

@emitter("signals")
def signals(x):
    os.kill(os.getpid(), 37)
    time.sleep(60)

@emitter("works")
def works(x):
    return x * x
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(EMITTERS)
    return tmp_path


def line(text: str) -> int:
    return EMITTERS[: EMITTERS.index(text)].count("\n") + 1


def build(kernelgen: Run, folder: Path, *ops: str) -> Done:
    lines = "".join(f'  - {{op: {op}, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}}\n' for op in ops)
    (folder / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n{lines}")
    words = ["-o", folder / "out", "-j", "1", "--compiler", "simulator", "--kernels", folder / "mine"]
    return kernelgen("build", folder / "m.yaml", *words)


def step(folder: Path, op: str) -> tuple[int, str]:
    spec = json.dumps({"op": op, "inputs": ["(4,1,1,1)/f32"], "output": "(4,1,1,1)/f32", "params": {}, "alias": None})
    words = [f"--spec={spec}", "--library=mine", f"--emitter={folder / 'mine/own.py'}", f"--output={folder / op}"]
    return worker.run(["emit", *words])


def test_bad_manners_cost_the_kernel_that_has_them_and_no_other(
    kernelgen: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    bad = ("leaves", "loud", "mute", "long", "steers", "signals")
    words = ["-o", "out", "-j", "1", "--compiler", "simulator", "--kernels", "mine"]
    done = build(kernelgen, folder, "works", "prints", *bad)
    assert done.code == 1
    assert f"2 built (2 compiled, 0 up to date), {len(bad)} failed" in done.out, done.err[-5000:]
    for op, text in (
        ("leaves", "sys.exit(0)"),
        ("loud", "raise Loud"),
        ("mute", "raise Mute"),
    ):
        assert re.search(rf"own\.py:{line(text)}:1: error: kernel {op}-4-f32-\w+: ", done.err), done.err[-5000:]
    assert (
        "SystemExit: 0" in done.err and "Loud: heard" in done.err and "Mute, whose message can't be printed" in done.err
    )
    assert "its worker was killed by signal 37" in done.err
    assert "\x1b" not in done.err and "\\x1b[2J and \\x07" in done.err
    assert re.search(r"yyy\n *… and 99\d{5} characters more\n", done.err) and len(done.err) < 20_000
    # Again with relative paths, from the folder.
    assert kernelgen("build", "m.yaml", *words, "--only", "works").code == 0
    assert list(folder.glob("out/.kernelgen/hlo/works-*.hlo.pb"))


def test_a_step_says_a_limited_amount(folder: Path) -> None:
    code, said = step(folder, "prints")
    assert code == 0 and len(said) < MAX_TEXT + 100 and said.endswith("characters more\n")
    assert said.count("z") + int(re.findall(r"and (\d+) characters", said)[0]) >= 2000 * 10_000
    code, said = step(folder, "long")
    assert code == 1 and len(said) < 10_000


def test_emit_in_this_process_is_not_ended_by_an_emitter(
    kernelgen: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    specs = []
    for op in ("leaves", "works", "prints"):
        value = {"op": op, "inputs": ["(4,1,1,1)/f32"], "output": "(4,1,1,1)/f32", "params": {}, "alias": None}
        specs += ["--spec", json.dumps(value)]
    done = kernelgen("emit", *specs, "-o", "hlo", "--kernels", "mine")
    assert done.code == 1 and "SystemExit: 0" in done.err
    assert [path.split("-")[0] for path in done.out.splitlines()] == ["hlo/prints", "hlo/works"]
    assert sorted(p.name.split("-")[0] for p in (folder / "hlo").iterdir()) == ["prints", "works"]
