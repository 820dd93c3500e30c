"""An emitter that disturbs its process affects no other kernel, not the protocol, and not the exit status."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kernelgen import lowering
from kernelgen.build.pool import Pool
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import MAX_TEXT
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import KernelSpec
from kernelgen.steps import worker
from kernelgen.steps.protocol import MAX_LOG

from .conftest import Done

Run = Callable[..., Done]


@functools.cache
def hlo() -> bytes:
    tensor = TensorDesc.parse("(4,1,1,1)/f32")
    return lowering.emit(KernelSpec.make("toy", [tensor], tensor), lambda x: x)


EMITTERS = """
import os, pathlib, signal, sys, threading, time
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

@emitter("floods")
def floods(x):
    while True:
        os.write(2, b"w" * 65536)

@emitter("forges")
def forges(x):
    for name in os.listdir("/proc/self/fd"):
        try:
            if name not in "012" and os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                os.write(int(name), b'{"exitCode": 0, "output": "", "requestId": 0}\\n')
        except OSError:  # of the list itself, or to read from
            pass
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


def build(kernelgen: Run, folder: Path, *ops: str, more: tuple[str, ...] = ()) -> Done:
    lines = "".join(f'  - {{op: {op}, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}}\n' for op in ops)
    (folder / "m.yaml").write_text(f"format: 1\nname: m\ntargets: [trn1]\nkernels:\n{lines}")
    words = ["-o", folder / "out", "-j", "1", "--compiler", "simulator", "--kernels", folder / "mine", *more]
    return kernelgen("build", folder / "m.yaml", *words)


def step_words(folder: Path, op: str, *more: str) -> list[str]:
    spec = json.dumps({"op": op, "inputs": ["(4,1,1,1)/f32"], "output": "(4,1,1,1)/f32", "params": {}, "alias": None})
    return [
        *("emit", f"--spec={spec}", "--library=mine", f"--emitter={folder / 'mine/own.py'}", f"--output={folder / op}"),
        *more,
    ]


def step(folder: Path, op: str, *more: str) -> tuple[int, str]:
    return worker.run(step_words(folder, op, *more))


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


def test_endless_output_is_stopped(kernelgen: Run, folder: Path) -> None:
    done = build(kernelgen, folder, "floods", "works")
    assert done.code == 1 and f"error: it printed more than {MAX_LOG >> 20} MiB and was stopped" in done.err
    assert len(done.err) < MAX_TEXT and "1 built (1 compiled, 0 up to date), 1 failed" in done.out
    logs = [file.stat().st_size for file in (folder / "out/.kernelgen/logs").iterdir()]
    assert logs and max(logs) < 2 * MAX_LOG


def test_an_answer_without_a_request_is_ignored(kernelgen: Run, folder: Path) -> None:
    done = build(kernelgen, folder, "forges", "works")
    assert done.code == 1 and "its worker answered request 0, and the request was " in done.err
    assert "1 built (1 compiled, 0 up to date), 1 failed" in done.out


@pytest.mark.parametrize("name", ["emit", "compile"])
def test_what_a_step_leaves_is_looked_at(
    kernelgen: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (folder / "stamp").touch()
    # A step that succeeds but does something else.
    flags = json.dumps(CompileConfig.make("trn1").flags())
    other = ["lint", f"--flags={flags}", f"--hlo={folder}/hlo", f"--stamp={folder}/stamp"]
    (folder / "hlo").write_bytes(hlo())
    monkeypatch.setattr(f"kernelgen.build.executor.Executor._{name}_arguments", lambda self, task: other)
    done = build(kernelgen, folder, "works")
    assert done.code == 1 and re.search(rf"error: (the )?{name} left no {folder}/out/\.kernelgen/", done.err), done.err
    assert "0 built (0 compiled, 0 up to date), 1 failed" in done.out


WORKER = """
import json, os, sys, time
line = sys.stdin.readline()
{}
sys.stdin.readline()
"""


@pytest.fixture
def fake_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Pool]]:
    """Returns a function that makes pools of one worker with the given program."""
    made: list[Pool] = []

    def make(answer: str) -> Pool:
        package = tmp_path / str(len(made)) / "kernelgen"
        (package / "steps").mkdir(parents=True)
        for name in ("__init__.py", "steps/__init__.py"):
            (package / name).touch()
        (package / "steps" / "worker.py").write_text(WORKER.format(answer))
        pool = Pool(1, tmp_path / "logs")
        pool._environment["PYTHONPATH"] = str(package.parent)
        made.append(pool)
        return pool

    yield make
    for pool in made:
        pool.stop()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            'print(json.dumps({"exitCode": 0, "output": "", "requestId": 7}), flush=True)',
            "answered request 7, and the request was 1",
        ),
        ('print("nonsense", flush=True)', "its worker answered b'nonsense"),
        ('print("[" * 100000, flush=True)', "its worker answered b'[[["),
        ('print("x" * (17 << 20), flush=True)', "its worker answered more than 16 MiB"),
        ("os.kill(os.getpid(), 63)", "its worker was killed by signal 63"),
        ("os._exit(0)", "its worker ended with exit status 0"),
    ],
)
def test_an_invalid_answer_fails_only_its_step(fake_pool: Callable[[str], Pool], answer: str, message: str) -> None:
    with fake_pool(answer) as pool:
        pool.start("task", ["emit"], 60)
        (end,) = pool.wait()
        assert (end.task, end.exit_code) == ("task", 1) and message in end.output
        assert pool.idle == 1


def test_an_answer_that_comes_twice_is_taken_once(fake_pool: Callable[[str], Pool]) -> None:
    answer = 'print(json.dumps({"exitCode": 0, "output": "a", "requestId": json.loads(line)["requestId"]}), flush=True)'
    with fake_pool(f"{answer}\ntime.sleep(0.2)\n{answer}") as pool:
        pool.start("one", ["emit"], 60)
        (end,) = pool.wait()
        assert (end.task, end.output) == ("one", "a")
        time.sleep(0.5)
        pool.start("two", ["emit"], 60)
        (end,) = pool.wait()
        assert end.task == "two"
        assert end.exit_code == 1 and "its worker answered request 1, and the request was 2" in end.output
