"""The one table of the chips' rates and prices, from which choices and forecasts are computed (`chips.json`).

Each figure of the table has a value for each target and logical NeuronCore configuration (LNC), its kind of evidence (`MARKS`), and
its source. This project measured none of them. `kernelgen.targets` has the limits of a target (memory, shapes, dtypes). The
backend's figures are generated from here (`backend/ggml-neuron/select/costs.inc`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kernelgen.targets import TARGETS

MARKS = {
    "documented": "by AWS",
    "measured": "by others, on the device",
    "derived": "computed from what is documented or measured",
    "guessed": "taken from another target, or from nothing",
}
"""The kinds of evidence of a figure."""

_ENGINES = ("tensor", "vector", "scalar", "gpsimd")

FIGURES: Mapping[str, tuple[str, tuple[str, ...] | type, str]] = {
    "launch_us": ("µs", ("queued", "waited"), "a launch takes beside its work, behind another in a queue or waited for"),
    "gb_per_s": ("GB/s", float, "weights are streamed at by a compiled graph"),
    "dma_gb_per_s": ("GB/s", list, "of DMA, by bytes in one run of a partition"),
    "rows_ms": ("ms", list, "a feed-forward layer of 4,096 x 14,336 in BF16, by rows"),
    "rows_ms_of_one_compile": ("ms", list, "the same layer in a compile that is doubted; nothing is computed from it"),
    "clock_ghz": ("GHz", _ENGINES, "of a physical core's engines"),
    "tensor_ns_per_column": (
        "ns", ("bfloat16", "float16", "float8", "float32"), "a column that moves through a tile of 128 x 128, by dtype"
    ),
    "vector_ns_per_element": ("ns", ("one", "two"), "an element of a partition, by operands in SBUF"),
    "scalar_ns_per_element": ("ns", float, "an element of a partition"),
    "gpsimd_ns_per_element": ("ns", float, "an element of a partition"),
    "instruction_ns": ("ns", _ENGINES, "an instruction beside its elements"),
    "dependent_ns": ("ns", float, "an instruction that waits for the result of the one before, beside its elements"),
    "nki_call_us": ("µs", float, "a call of an NKI kernel within a graph, beside its work"),
    "descriptor_ns": ("ns", ("row", "element"), "a descriptor of DMA whose address the program computes"),
    "collectives_us": ("µs", list, "an execution with any all-reduce, by ranks"),
    "all_reduce_us": ("µs", float, "each small all-reduce, beside that"),
    "all_reduce_gb_per_s": ("GB/s", float, "of an all-reduce's bytes, beside that"),
    "host_gb_per_s": ("GB/s", ("to_device", "from_device"), "of one core"),
    "host_transfer_us": ("µs", float, "a transfer beside its bytes"),
}  # fmt: skip
"""Each figure's unit, form (a number, numbers by these names, or ascending pairs of a size and a number), and meaning."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of one target.

    Attributes:
        value: in the form and unit of `FIGURES`.
        mark: its kind of evidence, one of `MARKS`.
        source: its source, in words.
    """

    value: Any
    mark: str
    source: str


@dataclass(frozen=True, slots=True)
class Chip:
    """The figures of a target's NeuronCores: for engines per physical core, otherwise per logical core.

    Attributes:
        target: value of neuronx-cc's `--target`.
        lnc: physical cores of a logical core.
        figures: by name, all of `FIGURES`.
    """

    target: str
    lnc: int
    figures: Mapping[str, Figure]

    def number(self, name: str) -> float:
        """Returns a figure with a single number."""
        return float(self.figures[name].value)

    def by(self, name: str, key: str) -> float:
        """Returns one number of a figure with several named numbers."""
        return float(self.figures[name].value[key])

    def pairs(self, name: str) -> tuple[tuple[int, float], ...]:
        """Returns a figure by size, in ascending order."""
        return tuple((int(size), float(value)) for size, value in self.figures[name].value)

    def at(self, name: str, size: float) -> float:
        """Returns a figure at a size: linear in the sizes' logarithm between two sizes, and constant outside."""
        pairs = self.pairs(name)
        before = pairs[0]
        for pair in pairs:
            if size <= pair[0]:
                if pair[0] == before[0]:
                    break
                part = math.log(size / before[0]) / math.log(pair[0] / before[0])
                return before[1] + (pair[1] - before[1]) * part
            before = pair
        return before[1]


@cache
def builtin() -> dict[tuple[str, int], Chip]:
    """Returns the chips of chips.json by target and LNC. A target without figures has the first target's, marked as guessed."""
    table = json.loads(resources.files("kernelgen.dispatch").joinpath("chips.json").read_text(encoding="utf-8"))
    found: dict[tuple[str, int], dict[str, Figure]] = {
        (target.name, lnc): {} for target in TARGETS.values() for lnc in target.lnc_choices
    }
    for name, entries in table.items():
        for entry in entries:
            for target in entry["targets"]:
                for lnc in entry.get("lnc", TARGETS[target].lnc_choices):
                    found[target, lnc][name] = Figure(entry["value"], entry["mark"], entry["source"])
    known = next(row for row in found.values() if row)
    guessed = {name: Figure(one.value, "guessed", "nothing is known") for name, one in known.items()}
    return {key: Chip(*key, row or guessed) for key, row in found.items()}


def of(target: str, lnc: int | None = None) -> Chip:
    """Returns a target's chip.

    Args:
        target: its name.
        lnc: physical cores of a logical core; None for the target's default.

    Raises:
        KeyError: the target does not exist, or does not support the LNC.
    """
    return builtin()[target, TARGETS[target].lnc if lnc is None else lnc]
