"""Worker processes that run build steps: each imports JAX once, and a worker that dies fails only its own step.

A worker is `kernelgen.steps.worker` with Bazel's worker protocol. It leads its own process group: Ctrl-C reaches only this
process, and stopping the worker stops the compiler that it started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kernelgen.errors import signal_name

GRACE = 2.0
"""Seconds between the request to stop a worker and the kill."""

MAX_ANSWER = 1 << 24
"""Maximum bytes of an answer; steps keep their output far shorter."""

_CHUNK = 1 << 16
_TAIL = 20
_TAIL_BYTES = 8192
"""Maximum lines, and bytes, shown of a dead worker's log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a step.

    Attributes:
        task: the task that `Pool.start` received.
        exit_code: 0 on success.
        output: the step's text for the user.
        seconds: its duration.
    """

    task: Any
    exit_code: int
    output: str
    seconds: float


class Pool:
    """A pool of workers that start on first use. Use it as a context manager: leaving it stops them all.

    Args:
        size: maximum number of workers.
        logs: a folder for the workers' other output (XLA prints before it aborts).
        environment: environment variables to set for the workers.
    """

    def __init__(self, size: int, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        # Not the file that a link leads to: bytecode is beside the link.
        package = Path(__file__).absolute().parent.parent.parent
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        self._size = size
        self._logs = logs
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def idle(self) -> int:
        """The number of steps that can start now."""
        return self._size - sum(worker.busy for worker in self._workers)

    def start(self, task: Any, arguments: Sequence[str], timeout: float | None = None) -> None:
        """Starts a step in an idle worker.

        Args:
            task: any value that names the step to the caller; the `Answer` returns it.
            arguments: arguments of `kernelgen.steps.worker`.
            timeout: seconds until the worker is killed.

        Raises:
            ValueError: no worker is idle.
        """
        if self.idle <= 0:
            raise ValueError("every worker is busy")
        worker = next((w for w in self._workers if not w.busy), None)
        if worker is None:
            used = {w.number for w in self._workers}
            number = next(number for number in itertools.count() if number not in used)
            worker = _Worker.launch(number, self._logs, self._environment)
            self._workers.append(worker)
            self._selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        worker.begin(task, arguments, timeout)

    def wait(self) -> list[Answer]:
        """Waits for steps to end and returns their answers: at least one, unless no step is running."""
        while any(worker.busy for worker in self._workers):
            deadlines = [w.deadline for w in self._workers if w.busy and w.deadline is not None]
            pause = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            answers = []
            for key, _ in self._selector.select(pause):
                answers += self._read(key.data)
            for worker in [w for w in self._workers if w.busy and w.deadline is not None]:
                if time.monotonic() >= worker.deadline:  # type: ignore[operator]
                    answers.append(
                        self._bury(
                            worker, f"it took longer than its time limit and was stopped after {worker.limit:g} s"
                        )
                    )
            if answers:
                return answers
        return []

    def stop(self) -> None:
        """Stops every worker and its child processes; running steps give no answer."""
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.kill(time.monotonic() + GRACE)
        self._workers.clear()
        self._selector.close()
        self._selector = selectors.DefaultSelector()

    def _read(self, worker: _Worker) -> list[Answer]:
        chunk = os.read(worker.process.stdout.fileno(), _CHUNK)  # type: ignore[union-attr]
        if not chunk:
            if worker.busy:
                return [self._bury(worker, "")]
            self._forget(worker)
            return []
        if not worker.busy:
            self._forget(worker)  # an answer without a request
            return []
        worker.buffer += chunk
        if len(worker.buffer) > MAX_ANSWER:
            return [self._bury(worker, f"its worker answered more than {MAX_ANSWER >> 20} MiB")]
        # A worker has one request at a time, so a line end is the end of the answer.
        if not worker.buffer.endswith(b"\n"):
            return []
        line, worker.buffer = worker.buffer, b""
        try:
            response = json.loads(line)
            code, output, number = int(response["exitCode"]), str(response["output"]), int(response["requestId"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return [self._bury(worker, f"its worker answered {line[:200]!r}")]
        if number != worker.request:
            return [self._bury(worker, f"its worker answered request {number}, and the request was {worker.request}")]
        return [worker.end(code, output)]

    def _forget(self, worker: _Worker) -> None:
        """Drops a worker that ended between two steps; the next step starts a new one."""
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        worker.kill(0)
        self._workers.remove(worker)

    def _bury(self, worker: _Worker, reason: str) -> Answer:
        """Removes a worker that died or must die, and returns the answer of its step."""
        reason = reason or worker.fate()
        self._forget(worker)
        log = _end(worker.log).decode(errors="replace").splitlines()[-_TAIL:]
        return worker.end(1, "\n".join([f"error: {reason}", *(f"    {line}" for line in log)]))


def _oom_kills() -> int | None:
    """Returns the number of processes that Linux killed for lack of memory, over all control groups; None if unavailable."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _end(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES)


@dataclass(eq=False)
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    log: Path
    buffer: bytes = b""
    busy: bool = False
    task: Any = None
    begun: float = 0.0
    deadline: float | None = None
    limit: float = 0.0
    request: int = 0
    oom_kills: int | None = None
    log_file: IO[bytes] | None = field(default=None, repr=False)

    @staticmethod
    def launch(number: int, logs: Path, environment: Mapping[str, str]) -> _Worker:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"worker-{number}.log"
        log_file = log.open("wb", buffering=0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kernelgen.steps.worker", "--persistent_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log_file,
            env=environment,
            start_new_session=True,
        )
        return _Worker(number, process, log, log_file=log_file)

    def begin(self, task: Any, arguments: Sequence[str], timeout: float | None) -> None:
        self.busy, self.task, self.begun = True, task, time.monotonic()
        self.deadline = None if timeout is None else self.begun + timeout
        self.limit = timeout or 0.0
        self.oom_kills = _oom_kills()  # to find out later whether the system killed a process meanwhile
        self.request += 1
        if self.log_file:
            self.log_file.seek(0)
            self.log_file.truncate()  # so that its last lines are about this step
        request = json.dumps({"arguments": list(arguments), "requestId": self.request}) + "\n"
        # A closed pipe means that the worker ended.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request.encode())  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def end(self, code: int, output: str) -> Answer:
        self.busy, self.deadline = False, None
        return Answer(self.task, code, output.strip(), time.monotonic() - self.begun)

    def fate(self) -> str:
        """Returns how the worker ended. Its output closes a moment before it ends."""
        try:
            status = self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return "its worker closed its standard output, which answers go to: a source closes only what it opened"
        if status >= 0:
            return f"its worker ended with exit status {status}"
        reason = f"its worker was killed by {signal_name(-status)}"
        if -status != signal.SIGKILL:
            return reason
        kills = _oom_kills()
        if kills is None or self.oom_kills is None:
            return f"{reason}: most likely the machine ran out of memory; fewer jobs (-j) need less"
        if kills > self.oom_kills:
            return f"{reason}: the machine ran out of memory; fewer jobs (-j) need less"
        return f"{reason}, and not because memory ran out: what it ran killed it, or another process did"

    def ask_to_stop(self) -> None:
        """Closes its input, which ends an idle worker; a busy one gets a signal."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        if self.busy:
            self._signal(signal.SIGTERM)

    def kill(self, deadline: float) -> None:
        """Waits until `deadline` (monotonic) for its end, then kills its whole process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        # Also after a normal end: its group may have other processes, such as a compiler.
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log_file):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
