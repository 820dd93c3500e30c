"""Runs a command and returns its wall time, its CPU time, and the peak memory of a process."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


class CommandFailed(Exception):
    """A command exited with another status than 0; the message is what it printed."""


@dataclass(frozen=True)
class Usage:
    """What one command took.

    Attributes:
        seconds: wall time.
        cpu_seconds: of the process and of those that it started and waited for.
        peak_mb: the most that one of these processes had in memory, in MB. It counts from the fork, so it is never less than what
            the process that measures has itself: that must stay small.
        output: standard output; standard error is part of a failure's message.
    """

    seconds: float
    cpu_seconds: float
    peak_mb: float
    output: str


def run(
    command: Sequence[object], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, stdin: str = ""
) -> Usage:
    """Runs a command to its end.

    Raises:
        CommandFailed: it failed.
    """
    words = [str(word) for word in command]
    # Files, because a process is waited for with wait4, beside which this process would not empty a pipe.
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        given.write(stdin)
        given.seek(0)
        begun = time.perf_counter()
        process = subprocess.Popen(words, env=env, cwd=cwd, stdin=given, stdout=output, stderr=errors)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for it too
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise CommandFailed(f"exit status {process.returncode}: {' '.join(words)}\n{output.read()}{errors.read()}")
        return Usage(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, output.read())


def process_cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a running process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_memory_mb(pid: int) -> tuple[float, float]:
    """Returns a running process's resident memory and the most that it ever was, in MB."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, peak = (int(lines[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "VmHWM"))
    return now, peak
