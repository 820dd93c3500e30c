"""The one table of the chips' rates and prices, from which choices and forecasts are computed (`chips.json`).

Each figure of the table has a value for each target and logical NeuronCore configuration (LNC), its kind of evidence (`MARKS`), and
its source. This project measured none of them. `kernelgen.targets` has the limits of a target (memory, shapes, dtypes). The
backend's figures are generated from here (`backend/ggml-neuron/select/costs.inc`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from kernelgen.targets import TARGETS

MARKS = {
    "documented": "by AWS",
    "measured": "by others, on the device",
    "derived": "computed from what is documented or measured",
    "guessed": "taken from another target, or from nothing",
}
"""The kinds of evidence of a figure."""

T = TypeVar("T")
Number = Annotated[float, Meta(ge=0)]
BySize = Annotated[list[tuple[Number, Number]], Meta(min_length=1)]
"""Pairs of a size and a number, by ascending size."""


class Figure(Struct, Generic[T], forbid_unknown_fields=True, frozen=True):
    """A figure of some targets.

    Attributes:
        targets: the targets.
        value: in the form and unit of `Figures`.
        mark: its kind of evidence, one of `MARKS`.
        source: its source, in words.
        lnc: the configurations; empty for all that the targets have.
    """

    targets: list[str]
    value: T
    mark: Literal["documented", "measured", "derived", "guessed"]
    source: Annotated[str, Meta(min_length=1)]
    lnc: list[int] = []


_Number = list[Figure[Number]]
_Named = list[Figure[dict[str, Number]]]
_BySize = list[Figure[BySize]]


class Figures(Struct, forbid_unknown_fields=True):
    """The table: what each figure is for.

    Attributes:
        launch_us: µs that a launch takes beside its work, `queued` behind another or `waited` for.
        gb_per_s: GB/s at which a compiled graph streams weights.
        dma_gb_per_s: GB/s of DMA, by bytes in one run of a partition.
        rows_ms: ms of a feed-forward layer of 4,096 x 14,336 in BF16, by rows.
        rows_ms_of_one_compile: ms of the same layer in a compile that is doubted; nothing is computed from it.
        clock_ghz: GHz of a physical core's engines.
        tensor_ns_per_column: ns of a column that moves through a tile of 128 x 128, by dtype.
        vector_ns_per_element: ns of an element of a partition, with `one` or `two` operands in SBUF.
        scalar_ns_per_element, gpsimd_ns_per_element: ns of an element of a partition.
        instruction_ns: ns of an instruction beside its elements, by engine.
        dependent_ns: ns of an instruction that waits for the result of the one before, beside its elements.
        nki_call_us: µs of a call of an NKI kernel within a graph, beside its work.
        descriptor_ns: ns of a descriptor of DMA whose address the program computes, for a `row` or an `element`.
        collectives_us: µs of an execution with any all-reduce, by ranks.
        all_reduce_us: µs of each small all-reduce, beside that.
        all_reduce_gb_per_s: GB/s of an all-reduce's bytes, beside that.
        host_gb_per_s: GB/s of one core, `to_device` and `from_device`.
        host_transfer_us: µs of a transfer beside its bytes.
    """

    launch_us: _Named
    gb_per_s: _Number
    dma_gb_per_s: _BySize
    rows_ms: _BySize
    rows_ms_of_one_compile: _BySize
    clock_ghz: _Named
    tensor_ns_per_column: _Named
    vector_ns_per_element: _Named
    scalar_ns_per_element: _Number
    gpsimd_ns_per_element: _Number
    instruction_ns: _Named
    dependent_ns: _Number
    nki_call_us: _Number
    descriptor_ns: _Named
    collectives_us: _BySize
    all_reduce_us: _Number
    all_reduce_gb_per_s: _Number
    host_gb_per_s: _Named
    host_transfer_us: _Number


@dataclass(frozen=True, slots=True)
class Chip:
    """The figures of a target's NeuronCores: for engines per physical core, otherwise per logical core.

    Attributes:
        target: value of neuronx-cc's `--target`.
        lnc: physical cores of a logical core.
        figures: by name, all of `Figures`.
    """

    target: str
    lnc: int
    figures: Mapping[str, Figure[Any]]

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


def read(text: str) -> dict[tuple[str, int], Chip]:
    """Returns the chips of a text in the form of chips.json, by target and LNC.

    A target without figures has the first target's, marked as guessed.

    Raises:
        msgspec.ValidationError: the text has another form; the message gives the place.
        ValueError: a target lacks a figure, or has two.
    """
    table = msgspec.json.decode(text, type=Figures)
    found: dict[tuple[str, int], dict[str, Figure[Any]]] = {
        (target.name, lnc): {} for target in TARGETS.values() for lnc in target.lnc_choices
    }
    for name in Figures.__struct_fields__:
        for figure in getattr(table, name):
            for target in figure.targets:
                for lnc in figure.lnc or TARGETS[target].lnc_choices:
                    if found[target, lnc].setdefault(name, figure) is not figure:
                        raise ValueError(f"{name}: {target} with LNC {lnc} has two")
    known = next(row for row in found.values() if row)
    for (target, lnc), row in found.items():
        if not row:
            guessed = {"mark": "guessed", "source": "nothing is known"}
            row |= {name: msgspec.structs.replace(one, **guessed) for name, one in known.items()}
        if lacking := set(Figures.__struct_fields__) - row.keys():
            raise ValueError(f"{target} with LNC {lnc} lacks {', '.join(sorted(lacking))}")
    return {key: Chip(*key, row) for key, row in found.items()}


@cache
def builtin() -> dict[tuple[str, int], Chip]:
    """Returns the chips of chips.json."""
    return read(resources.files("kernelgen.dispatch").joinpath("chips.json").read_text(encoding="utf-8"))


def of(target: str, lnc: int | None = None) -> Chip:
    """Returns a target's chip.

    Args:
        target: its name.
        lnc: physical cores of a logical core; None for the target's default.

    Raises:
        KeyError: the target does not exist, or does not support the LNC.
    """
    return builtin()[target, TARGETS[target].lnc if lnc is None else lnc]
