"""The cost of a kernel's launch: used to choose and judge kernels for other numbers of tokens than a node has.

The figures are the target's (`kernelgen.dispatch.chips`), or the user's. The backend computes the same
(`backend/ggml-neuron/select/costs.cpp`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from kernelgen.dispatch import chips

MAX_ROWS = 1_000_000_000
"""Maximum number of rows in a pair of `rows_ms`, here and in the backend."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Figures of one machine.

    Attributes:
        launch_us: microseconds of any launch, independent of its work.
        gb_per_s: memory bandwidth for reads, in 10⁹ bytes per second.
        rows_ms: pairs of a number of rows, ascending, and the milliseconds of one layer with them.
    """

    launch_us: float
    gb_per_s: float
    rows_ms: tuple[tuple[int, float], ...]

    def factor(self, rows: int) -> float:
        """Returns the time for this many rows relative to that for few rows, which is bound by memory."""
        (least, unit), *_ = self.rows_ms
        if rows <= least:
            return 1.0
        for (a, a_ms), (b, b_ms) in zip(self.rows_ms, self.rows_ms[1:], strict=False):
            if rows <= b:
                return (a_ms + (b_ms - a_ms) * (rows - a) / (b - a)) / unit
        last, last_ms = self.rows_ms[-1]
        return last_ms * rows / last / unit

    def launch(self, whole: float, row: float, tokens: int) -> float:
        """Returns the microseconds of a launch.

        Args:
            whole: bytes read for any number of tokens: weights.
            row: bytes read and written for each token.
            tokens: number of tokens of the kernel.
        """
        return self.launch_us + (whole * self.factor(tokens) + row * tokens) / (self.gb_per_s * 1e3)


def read(text: str, *, queued: bool = True) -> Costs:
    """Returns the figures in a user's text: `launch_us` (`queued` and `waited`, or one number for both), `gb_per_s`, `rows_ms`.

    Args:
        text: JSON; docs/reference/kernel-selection.md has an example.
        queued: whether launches are queued, rather than waited for one by one.

    Raises:
        ValueError: it is not such a text; the message gives the problem.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("costs are a JSON object")
    rows = found.get("rows_ms")
    if not isinstance(rows, list) or not rows or not all(isinstance(r, list) and len(r) == 2 for r in rows):
        raise ValueError("rows_ms is a list of pairs of rows and milliseconds")
    launch = found.get("launch_us")
    if isinstance(launch, dict):
        pair = [_positive(name, launch.get(name)) for name in ("queued", "waited")]
    else:
        pair = [_positive("launch_us", launch)] * 2
    rate = _positive("gb_per_s", found.get("gb_per_s"))
    curve = tuple((_rows(n), _positive("rows_ms", ms)) for n, ms in rows)
    counts = [n for n, _ in curve]
    if counts != sorted(set(counts)):
        raise ValueError("the rows of rows_ms do not ascend")
    return Costs(pair[not queued], rate, curve)


def _rows(value: Any) -> int:
    found = _positive("rows_ms", value)
    if found > MAX_ROWS or found != int(found):
        raise ValueError(f"rows_ms: rows are a whole number from 1 to {MAX_ROWS}, not {value!r}")
    return int(found)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is a number above 0, not {value!r}")
    return float(value)


def builtin(target: str = "trn1", lnc: int | None = None, *, queued: bool = True) -> Costs:
    """Returns the figures of a target.

    Args:
        target: its name.
        lnc: physical cores of a logical core; None for the target's default.
        queued: whether launches are queued, as by the backend with a runtime that has queues, rather than waited for one by one.

    Raises:
        KeyError: the target does not exist, or does not support the LNC.
    """
    chip = chips.of(target, lnc)
    launch = chip.by("launch_us", "queued" if queued else "waited")
    return Costs(launch, chip.number("gb_per_s"), chip.pairs("rows_ms"))
