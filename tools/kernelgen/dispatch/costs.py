"""The cost of a kernel's launch: used to choose and judge kernels for other numbers of tokens than a node has.

The figures are the target's (`kernelgen.dispatch.chips`). The backend computes the same
(`backend/ggml-neuron/select/costs.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelgen.dispatch import chips


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
