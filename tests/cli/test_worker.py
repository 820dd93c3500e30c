"""The worker as Bazel uses it: many requests at once, each in the folder that it names, and a process that dies takes one with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kernelgen
from kernelgen import library
from kernelgen.plan import KernelSpec, TensorDesc, spec_json

WORKER = [sys.executable, "-P", "-m", "kernelgen.worker", "--persistent_worker"]


class Worker:
    """A worker process and its answers, by request."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, number: int, *arguments: str, folder: Path | None = None) -> None:
        assert self.process.stdin
        request = {"arguments": arguments, "requestId": number, "inputs": [{"path": "a", "digest": "b"}]}
        self.process.stdin.write(json.dumps(request | ({"sandboxDir": str(folder)} if folder else {})) + "\n")
        self.process.stdin.flush()

    def answers(self, count: int) -> dict[int, dict[str, Any]]:
        assert self.process.stdout
        read = [json.loads(self.process.stdout.readline()) for _ in range(count)]
        return {answer["requestId"]: answer for answer in read}

    def children(self) -> list[int]:
        """Returns the processes that it runs requests in."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts workers in a folder; none outlives the test."""
    workers = []

    def launch(*more: str) -> Worker:
        process = subprocess.Popen(
            [*WORKER, *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(kernelgen.__file__).resolve().parent.parent)},
        )
        workers.append(process)
        return Worker(process)

    yield launch
    for process in workers:
        process.kill()
        process.communicate()


def emit(output: str, n: int = 8) -> list[str]:
    t = TensorDesc.make((n, 2, 1, 1), "f32")
    source = library.builtin_library()
    spec = spec_json(KernelSpec.make("rms_norm", [t], t, {"eps": 1e-5}))
    return ["emit", f"--spec={spec}", "--library=kernels", f"--emitter={source.root / 'norm.py'}", f"--output={output}"]


@pytest.mark.parametrize("more", [(), ("--singleplex",)])
def test_each_request_gets_its_answer(start: Callable[..., Worker], more: tuple[str, ...]) -> None:
    worker = start(*more)
    for number in range(1, 21):
        worker.ask(number, f"step{number}")
    answers = worker.answers(20)
    assert sorted(answers) == list(range(1, 21))
    for number, answer in answers.items():
        assert answer["exitCode"] == 2
        assert f"unknown step 'step{number}'" in answer["output"]


@pytest.mark.parametrize("more", [(), ("--singleplex",)])
def test_paths_are_relative_to_the_folder_of_the_request(
    start: Callable[..., Worker], more: tuple[str, ...], tmp_path: Path
) -> None:
    worker = start(*more)
    # Bazel names the folders relative to where it started the worker.
    for number in range(1, 7):
        folder = tmp_path / "sandboxes" / str(number)
        folder.mkdir(parents=True)
        (folder / "arguments").write_text("\n".join(emit("out.pb", n=8 * number)) + "\n")
        worker.ask(number, "@arguments", folder=folder.relative_to(tmp_path))
    assert {a["exitCode"] for a in worker.answers(6).values()} == {0}
    assert len({(tmp_path / "sandboxes" / str(number) / "out.pb").read_bytes() for number in range(1, 7)}) == 6
    worker.ask(7, *emit("out.pb"))
    assert worker.answers(1)[7]["exitCode"] == 0
    assert (tmp_path / "out.pb").read_bytes() == (tmp_path / "sandboxes/1/out.pb").read_bytes()


def test_what_was_asked_before_the_input_ended_is_answered(start: Callable[..., Worker]) -> None:
    worker = start()
    for number in range(1, 6):
        worker.ask(number, "none")
    out, _ = worker.process.communicate(timeout=60)
    assert sorted(json.loads(line)["requestId"] for line in out.splitlines()) == [1, 2, 3, 4, 5]
    assert worker.process.returncode == 0


def test_a_process_that_is_killed_fails_its_own_request(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ask(1, *emit("out.pb"))
    deadline = time.monotonic() + 60
    while not worker.children() and time.monotonic() < deadline:
        time.sleep(0.001)
    (victim,) = worker.children()
    os.kill(victim, signal.SIGKILL)  # long before it has imported JAX
    worker.ask(2, *emit("out.pb"))
    answers = worker.answers(2)
    assert answers[1]["exitCode"] == 1
    assert "was killed by SIGKILL: most likely the machine ran out of memory" in answers[1]["output"]
    assert answers[2] == {"exitCode": 0, "output": "", "requestId": 2}


def test_requests_run_at_the_same_time(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ask(1, *emit("1.pb"))
    worker.ask(2, *emit("2.pb"))
    worker.answers(2)
    assert len(worker.children()) == min(2, os.cpu_count() or 1)


def test_its_processes_end_with_it(start: Callable[..., Worker]) -> None:
    worker = start()
    worker.ask(1, "none")
    worker.answers(1)
    (child,) = worker.children()
    worker.process.kill()
    worker.process.wait()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{child}").exists()
