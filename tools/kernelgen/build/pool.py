"""Worker processes that run build steps: each imports JAX once, and one that dies takes only its own step with it.

A worker is `kernelgen.steps.worker` with the protocol that Bazel speaks to it. It leads a process group of its own, so that Ctrl-C
reaches this process alone, and stopping it stops the compiler it may have started.
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

from kernelgen.errors import TookTooLong, signal_name

GRACE = 2.0
"""Seconds between asking a worker to stop and killing it."""

MAX_ANSWER = 1 << 24
"""Bytes of an answer at most; steps keep what they say far shorter."""

_CHUNK = 1 << 16
_TAIL = 20
_TAIL_BYTES = 8192
"""Lines, and bytes at most, of a dead worker's log that are shown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a step ended.

    Attributes:
        task: what `Pool.start` was given.
        exit_code: 0 when it succeeded.
        output: what it had to say.
        seconds: how long it took.
    """

    task: Any
    exit_code: int
    output: str
    seconds: float


class Pool:
    """Some workers, started when they are first needed. Use it as a context manager: leaving it stops them all.

    Args:
        size: how many workers there may be.
        logs: a folder for what workers print beside their answers (XLA does, before it aborts).
        environment: variables to set for the workers.
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
        """How many steps can be started now."""
        return self._size - sum(worker.busy for worker in self._workers)

    def start(self, task: Any, arguments: Sequence[str], timeout: float | None = None) -> None:
        """Starts a step in an idle worker.

        Args:
            task: whatever names the step to the caller; it comes back in the `Answer`.
            arguments: as `kernelgen.steps.worker` takes them.
            timeout: seconds after which the worker is killed.

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
        """Returns the answers of the next steps that end; at least one, unless no step is running."""
        while any(worker.busy for worker in self._workers):
            deadlines = [w.deadline for w in self._workers if w.busy and w.deadline is not None]
            pause = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            answers = []
            for key, _ in self._selector.select(pause):
                answers += self._read(key.data)
            for worker in [w for w in self._workers if w.busy and w.deadline is not None]:
                if time.monotonic() >= worker.deadline:  # type: ignore[operator]
                    answers.append(self._bury(worker, str(TookTooLong(worker.limit))))
            if answers:
                return answers
        return []

    def stop(self) -> None:
        """Stops every worker and what it started; steps that were running leave no answer."""
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
            self._forget(worker)  # it answers what was not asked
            return []
        worker.buffer += chunk
        if len(worker.buffer) > MAX_ANSWER:
            return [self._bury(worker, f"its worker answered more than {MAX_ANSWER >> 20} MiB")]
        # A worker is asked one thing at a time, so an end of a line is the end of the answer.
        if not worker.buffer.endswith(b"\n"):
            return []
        line, worker.buffer = worker.buffer, b""
        try:
            response = json.loads(line)
            code, output, number = int(response["exitCode"]), str(response["output"]), int(response["requestId"])
        except (ValueError, TypeError, KeyError, RecursionError):
            return [self._bury(worker, f"its worker answered {line[:200]!r}")]
        if number != worker.request:
            return [self._bury(worker, f"its worker answered request {number}, and was asked {worker.request}")]
        return [worker.end(code, output)]

    def _forget(self, worker: _Worker) -> None:
        """Drops a worker that ended between two steps; the next step gets a new one."""
        self._selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        worker.kill(0)
        self._workers.remove(worker)

    def _bury(self, worker: _Worker, reason: str) -> Answer:
        """Removes a worker that died or must die, and answers for the step that it was at."""
        reason = reason or worker.fate()
        self._forget(worker)
        log = _end(worker.log).decode(errors="replace").splitlines()[-_TAIL:]
        return worker.end(1, "\n".join([f"error: {reason}", *(f"    {line}" for line in log)]))


def _oom_kills() -> int | None:
    """Returns how many processes Linux has killed because memory ran out, in any control group; None where it does not tell."""
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
        self.oom_kills = _oom_kills()  # to tell afterwards whether the system killed one meanwhile
        self.request += 1
        if self.log_file:
            self.log_file.seek(0)
            self.log_file.truncate()  # so that its last lines are about this step
        request = json.dumps({"arguments": list(arguments), "requestId": self.request}) + "\n"
        # When a worker's output ends, the worker is gone.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request.encode())  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def end(self, code: int, output: str) -> Answer:
        self.busy, self.deadline = False, None
        return Answer(self.task, code, output.strip(), time.monotonic() - self.begun)

    def fate(self) -> str:
        """Returns how the worker ended. Its output has ended, which happens a moment before it ends."""
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
        """Ends its input, which an idle worker takes as the end; a busy one gets a signal."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        if self.busy:
            self._signal(signal.SIGTERM)

    def kill(self, deadline: float) -> None:
        """Waits for its end until `deadline` (monotonic), then kills it with everything in its process group."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        # Also when it has ended: its group may have others, such as a compiler.
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log_file):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
