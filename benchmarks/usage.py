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
    """A command exited with another status than 0; the message is its output."""


@dataclass(frozen=True)
class Usage:
    """The resources that a command used.

    Attributes:
        seconds: wall time.
        cpu_seconds: the CPU time of the process and of the descendants for which it waited.
        peak_mb: the peak memory of one of these processes, in MB. It counts from the fork, so it is at least the memory
            of the measuring process, which must stay small.
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
    # Files instead of pipes: the process is awaited with wait4, during which this process would not drain a pipe.
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
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait again
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            raise CommandFailed(f"exit status {process.returncode}: {' '.join(words)}\n{output.read()}{errors.read()}")
        return Usage(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, output.read())


def process_cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a running process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def process_memory_mb(pid: int) -> tuple[float, float]:
    """Returns a running process's current and peak resident memory, in MB."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, peak = (int(lines[key].split()[0]) * 1024 / 1e6 for key in ("VmRSS", "VmHWM"))
    return now, peak
