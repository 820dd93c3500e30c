"""Worker processes that answer requests, one per job. All of them end with the pool, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import harness


def serve(make: Callable[[dict[str, Any]], Callable[[Any, harness.Progress], Any]]) -> None:
    """Answers requests, one per line, until standard input ends.

    `make` receives the first line and returns the function that answers.

    Messages and answers go to standard output as JSON: `{"stage": …, "count": …}`, and then `{"done": …}` or `{"error":
    …}`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output to stdout goes to the log
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os.killpg(0, signal.SIGKILL)  # also kills the running program: nobody is left to read an answer

    setup = json.loads(sys.stdin.readline())
    threading.Thread(target=read, daemon=True).start()
    do = make(setup)
    said = 0.0

    def progress(stage: str, count: int) -> None:
        nonlocal said
        if time.monotonic() - said > 0.5:
            said = time.monotonic()
            answer({"stage": stage, "count": count})

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    while True:
        try:
            answer({"done": do(json.loads(requests.get()), progress)})
        except Exception:
            answer({"error": traceback.format_exc()})


class Worker:
    """A process that serves requests.

    Args:
        script: a script that calls `serve` if it is run with `--worker`.
        setup: the first line.
        programs: the programs that it uses.
    """

    def __init__(self, script: Path, setup: dict[str, Any], programs: harness.Programs) -> None:
        environment = os.environ | {
            "LLAMA_CPP_PROGRAMS": str(programs.llama_cpp),
            "GGML_NEURON_PLUGIN": str(programs.plugin),
            "GGML_NEURON_LIBNRT": str(programs.libnrt),
            "LLAMA_LOAD_BACKENDS": str(programs.load_backends),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._say(setup)

    def _say(self, value: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def do(self, request: object, progress: harness.Progress) -> Any:
        """Returns the answer to a request.

        Raises:
            RuntimeError: there is no answer.
        """
        self._say(request)
        assert self.process.stdout
        for line in self.process.stdout:
            said = json.loads(line)
            if "done" in said:
                return said["done"]
            if "error" in said:
                raise RuntimeError(said["error"])
            progress(said["stage"], said["count"])
        raise RuntimeError(f"its process ended with status {self.process.wait()}")

    def stop(self) -> None:
        """Kills the process and the programs that it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Answer = TypeVar("Answer")


def answers(
    script: Path,
    setup: dict[str, Any],
    programs: harness.Programs,
    names: Sequence[str],
    jobs: int | None,
    read: Callable[[dict[str, Any]], Answer],
    line: Callable[[str, Answer], str],
    say: harness.Say,
) -> dict[str, Answer]:
    """Returns `share_out`'s answer to each name, in their order, and reports each answer in a line as it arrives.

    Args:
        script: as for `share_out`.
        setup: the first line for the script's processes.
        programs: llama.cpp's programs, and the backend.
        names: the requests.
        jobs: the number of processes; None for one per CPU.
        read: creates an answer from its JSON.
        line: describes an answer in a line.
        say: called with the line.

    Raises:
        RuntimeError: a request has no answer.
    """
    found: dict[str, Answer] = {}

    def done(name: str, answer: dict[str, Any]) -> None:
        found[name] = read(answer)
        say(f"{len(found)}/{len(names)} {line(name, found[name])}")

    share_out(
        script,
        setup,
        programs,
        names,
        jobs or len(os.sched_getaffinity(0)),
        stage=lambda name, stage, count: None,
        done=done,
    )
    return {name: found[name] for name in names}


def share_out(
    script: Path,
    setup: dict[str, Any],
    programs: harness.Programs,
    requests: Sequence[Any],
    jobs: int,
    *,
    stage: Callable[[Any, str, int], None],
    done: Callable[[Any, Any], None],
) -> None:
    """Distributes requests to as many processes as there are jobs, in this order. Whatever happens, all processes end.

    Args:
        script: see `Worker`.
        setup: see `Worker`; adds `threads`, the number of threads for each process.
        programs: see `Worker`.
        requests: the arguments of `serve`'s function.
        jobs: the number of processes.
        stage: called with the progress of a request.
        done: called with a request and its answer, never by two threads at once.

    Raises:
        RuntimeError: a request has no answer.
    """
    setup = {**setup, "threads": max(1, len(os.sched_getaffinity(0)) // max(1, jobs))}
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def take(worker: Worker) -> None:
        try:
            while not errors:
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    return
                answer = worker.do(request, lambda what, count, request=request: stage(request, what, count))
                with lock:
                    done(request, answer)
        except BaseException as error:
            errors.append(error)

    workers = [Worker(script, setup, programs) for _ in range(min(jobs, len(requests)))]
    threads = [threading.Thread(target=take, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for worker in workers:
            worker.stop()
    if errors:
        raise errors[0]
