"""Which layout of weights a token is quickest with, on each target: `kernelgen model --weights auto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelgen.dispatch.chips import Chip
from kernelgen.forecast.call import CallForecast
from kernelgen.forecast.kernels import Kernels
from kernelgen.ggml.weight_layouts import BF16, PLANES
from kernelgen.model.graphs import Graph

Layouts = tuple[str, ...]

COMPARED: tuple[Layouts, ...] = ((), (PLANES,), (BF16,))
"""What is compared, what is preferred first. Of `transposed` the forecast counts no difference."""

EQUAL = 1.01
"""Times whose ratio is less are equal."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a target takes for a token.

    Attributes:
        chip: its figures.
        calls: by layouts, in order of preference.
    """

    chip: Chip
    calls: Mapping[Layouts, CallForecast]

    @property
    def chosen(self) -> Layouts:
        """The layouts of the quickest that fits a core, of equals the first; as ggml has them, where nothing fits."""
        fitting = {layouts: call.ms for layouts, call in self.calls.items() if call.memory.fits}
        least = min(fitting.values(), default=0.0)
        return next((layouts for layouts, ms in fitting.items() if ms <= EQUAL * least), ())

    @property
    def text(self) -> str:
        """The choice and what others give, in a line."""
        first = self.chosen
        rest = [layouts for layouts in self.calls if layouts != first]
        n = self.calls[first].n_tokens
        return (
            f"{self.chip.target}: weights {name(first)}, by a forecast of a call of {n} token{'s' * (n > 1)} on one core: "
            f"{'; '.join(map(self._one, [first, *rest]))}; modelled, not measured"
        )

    def _one(self, layouts: Layouts) -> str:
        call = self.calls[layouts]
        taken = (call.memory.weights + call.memory.cache) / (1 << 30)
        fits = "" if call.memory.fits else ", does not fit"
        return f"{name(layouts)} {call.ms:.1f} ms ({taken:.1f} of {call.memory.device >> 30} GiB{fits})"


def name(layouts: Layouts) -> str:
    """Returns layouts in words."""
    return " and ".join(layouts) or "as ggml has them"


def choose(graph: Graph, kernels: Mapping[Layouts, Kernels], chips: Sequence[Chip], layers: int) -> list[Choice]:
    """Returns what each target takes.

    Args:
        graph: what a call of one token computes.
        kernels: those of each of `COMPARED`.
        chips: of the targets.
        layers: how many the model has.
    """
    return [
        Choice(chip, {one: those.forecast(graph, chip, layers=layers) for one, those in kernels.items()})
        for chip in chips
    ]
