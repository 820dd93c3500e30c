"""Estimates how long compiles take, from the times of earlier ones.

A guess, and no more: a kernel counts as long as the recorded ones of the same op that are nearest in size (the elements of
the result); where its op was never compiled, for as long as a recorded kernel takes usually. Machines differ, and so do compilers.
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
"""How many records of an op decide."""


@dataclass(frozen=True, slots=True)
class Record:
    """One compile that was done.

    Attributes:
        kernel: the kernel's id.
        seconds: how long it took.
    """

    kernel: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """What compiles may take.

    Attributes:
        compiles: how many there are.
        seconds: all of them, some at once; None without records.
        records: how many compiles this is known from.
        guessed: how many are of ops without a record.
    """

    compiles: int
    seconds: float | None
    records: int
    guessed: int


def forecast(kernels: Sequence[str], records: Sequence[Record], at_once: int) -> Forecast:
    """Returns how long it may take to compile some kernels.

    Args:
        kernels: the ids of the kernels, one for each compile.
        records: compiles that were done.
        at_once: how many run at once.
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
    """Returns the op of a kernel's id, and the logarithm of how many elements its result has."""
    match = _ID.fullmatch(kernel)
    if match is None:
        return kernel.partition("-")[0], 0.0
    return match["op"], sum(math.log2(max(int(n), 1)) for n in match["shape"].split("x"))


def _makespan(seconds: Sequence[float], at_once: int) -> float:
    """Returns when the last of some jobs ends that are started one after another, some at once."""
    ends = [0.0] * min(max(at_once, 1), max(len(seconds), 1))
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def described(found: Forecast, at_most: bool, jobs: int) -> str:
    """Returns a forecast in words, and what it is based on.

    Args:
        found: the forecast.
        at_most: whether some of the compiles may turn out not to be needed.
        jobs: what `-j` is.
    """
    count = f"{'at most ' if at_most else ''}{found.compiles} {'compile' if found.compiles == 1 else 'compiles'} ahead"
    if found.seconds is None:
        return f"{count}; how long they take is not known: the cache has no record of a compile"
    basis = f"{found.records} recorded {'compile' if found.records == 1 else 'compiles'}"
    if found.guessed:
        basis += f", none of them of the op of {found.guessed}"
    return f"{count}, about {_duration(found.seconds)} with -j {jobs} (from {basis})"


def _duration(seconds: float) -> str:
    """Returns a time, no more exact than a guess is: "40 s", "25 min", "3.5 h"."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"
