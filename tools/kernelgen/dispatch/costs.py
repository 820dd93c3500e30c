"""What a kernel's launch takes, by measurements: how kernels for other numbers of tokens than a node has are chosen and judged.

The figures are data (`costs.json`), which names their sources; a user's own can take their place. The backend computes the same
(`backend/ggml-neuron/select/costs.cpp`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources

TEXT = resources.files("kernelgen.dispatch").joinpath("costs.json").read_text(encoding="utf-8")
"""costs.json."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Figures of one machine.

    Attributes:
        launch_us: microseconds of any launch, whatever it computes.
        gb_per_s: 10⁹ bytes per second at which memory is read.
        rows_ms: pairs of rows, ascending, and the milliseconds that one layer takes with them.
    """

    launch_us: float
    gb_per_s: float
    rows_ms: tuple[tuple[int, float], ...]

    def factor(self, rows: int) -> float:
        """Returns how many times as long as few rows this many take where memory bounds few."""
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
            whole: bytes that are read for any number of tokens: weights.
            row: bytes that are read and written for each token.
            tokens: how many the kernel is for.
        """
        return self.launch_us + (whole * self.factor(tokens) + row * tokens) / (self.gb_per_s * 1e3)


def read(text: str) -> Costs:
    """Returns the figures in a text like that of costs.json.

    Raises:
        ValueError: it is not such a text; says what is wrong.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("costs are a JSON object")
    rows = found.get("rows_ms")
    if not isinstance(rows, list) or not rows or not all(isinstance(r, list) and len(r) == 2 for r in rows):
        raise ValueError("rows_ms is a list of pairs of rows and milliseconds")
    for name, value in (
        ("launch_us", found.get("launch_us")),
        ("gb_per_s", found.get("gb_per_s")),
        *(("rows_ms", v) for row in rows for v in row),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name} is a number above 0, not {value!r}")
    counts = [int(n) for n, _ in rows]
    if counts != sorted(set(counts)):
        raise ValueError("the rows of rows_ms do not ascend")
    return Costs(float(found["launch_us"]), float(found["gb_per_s"]), tuple((int(n), float(ms)) for n, ms in rows))


@cache
def builtin() -> Costs:
    """Returns the figures of costs.json."""
    return read(TEXT)
