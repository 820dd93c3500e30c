"""Estimates the time of compiles from the times of earlier ones.

The estimate is rough. A kernel's time is the time of the recorded kernels of the same op that are nearest in size (elements of the
result); for an op without records it is the typical time of a recorded kernel. Machines and compilers differ.
"""

from __future__ import annotations

import heapq
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_ID = re.compile(r"(?P<op>\w+)-(?P<shape>[0-9]+(?:x[0-9]+)*)-.*")
_NEAREST = 5
"""Number of records of an op that an estimate uses."""


@dataclass(frozen=True, slots=True)
class Record:
    """One finished compile.

    Attributes:
        kernel: the kernel's id.
        seconds: its duration.
    """

    kernel: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Estimated time of some compiles.

    Attributes:
        compiles: number of compiles.
        seconds: time for all of them, some in parallel; None without records.
        records: number of records that the estimate uses.
        guessed: number of compiles of ops without a record.
    """

    compiles: int
    seconds: float | None
    records: int
    guessed: int


def forecast(kernels: Sequence[str], records: Sequence[Record], at_once: int) -> Forecast:
    """Returns the estimated time to compile some kernels.

    Args:
        kernels: the ids of the kernels, one for each compile.
        records: finished compiles.
        at_once: number of parallel compiles.
    """
    by_op: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        op, size = _op_and_size(record.kernel)
        by_op.setdefault(op, []).append((size, record.seconds))
    if not records:
        return Forecast(len(kernels), None, 0, len(kernels))
    usual = statistics.median(record.seconds for record in records)
    seconds, guessed = [], 0
    for kernel in kernels:
        op, size = _op_and_size(kernel)
        known = by_op.get(op, [])
        guessed += not known
        nearest = sorted(known, key=lambda one: abs(one[0] - size))[:_NEAREST]
        seconds.append(statistics.median(s for _, s in nearest) if nearest else usual)
    return Forecast(len(kernels), _makespan(seconds, at_once), len(records), guessed)


def _op_and_size(kernel: str) -> tuple[str, float]:
    """Returns the op in a kernel's id, and the logarithm of the number of elements of its result."""
    match = _ID.fullmatch(kernel)
    if match is None:
        return kernel.partition("-")[0], 0.0
    return match["op"], sum(math.log2(max(int(n), 1)) for n in match["shape"].split("x"))


def _makespan(seconds: Sequence[float], at_once: int) -> float:
    """Returns the end time of the last job if jobs start in order and `at_once` of them run in parallel."""
    ends = [0.0] * min(max(at_once, 1), max(len(seconds), 1))
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def described(found: Forecast, at_most: bool, jobs: int) -> str:
    """Returns a forecast as text, with its basis.

    Args:
        found: the forecast.
        at_most: whether some of the compiles may turn out to be unnecessary.
        jobs: the value of `-j`.
    """
    count = f"{'at most ' if at_most else ''}{found.compiles} {'compile' if found.compiles == 1 else 'compiles'} ahead"
    if found.seconds is None:
        return f"{count}; how long they take is not known: the cache has no record of a compile"
    basis = f"{found.records} recorded {'compile' if found.records == 1 else 'compiles'}"
    if found.guessed:
        basis += f", none of them of the op of {found.guessed}"
    return f"{count}, about {_duration(found.seconds)} with -j {jobs} (from {basis})"


def _duration(seconds: float) -> str:
    """Returns a time with as few digits as an estimate deserves: "40 s", "25 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
