"""A benchmark's results as values: a figure, its baseline and its limit; their table and JSON.

Every benchmark yields `Figure`s. `main` runs it, or `report` if it has its own arguments.
This module does not depend on kernelgen.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Direction = Literal["value / peer", "peer / value"]

UNITS = tuple(
    "s ms µs ns MB MiB KiB bytes kernels nodes ops launches splits lines instructions descriptors errors times 1/s".split()
)
"""The allowed units of a figure."""


@dataclass(frozen=True)
class Peer:
    """The baseline of a figure, measured in the same run.

    Attributes:
        what: a description.
        value: its value, in the figure's unit.
        kernels: the number of kernels, if it differs from the figure's.
    """

    what: str
    value: float
    kernels: int | None = None


@dataclass(frozen=True)
class Limit:
    """The limit of a figure, or of its ratio to the baseline."""

    of: Literal["value", "ratio"]
    at_least: float | None = None
    at_most: float | None = None

    def __str__(self) -> str:
        if self.at_least == self.at_most:
            return f"{self.at_least:g}"
        words = [f"≥ {self.at_least:g}"] if self.at_least is not None else []
        return " ".join([*words, *([f"≤ {self.at_most:g}"] if self.at_most is not None else [])])

    def met(self, number: float) -> bool:
        return (self.at_least is None or number >= self.at_least) and (self.at_most is None or number <= self.at_most)


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        what: a description.
        value: its value, in `unit`.
        unit: one of `UNITS`.
        kernels: the number of kernels that it covers; None if that does not apply.
        peer: its baseline.
        direction: the direction of the ratio. If figure and baseline cover different numbers of kernels, it is the
            ratio of the costs per kernel.
        limit: its limit, if any.

    Raises:
        ValueError: the unit is not in `UNITS`.
    """

    what: str
    value: float
    unit: str
    kernels: int | None = None
    peer: Peer | None = None
    direction: Direction = "value / peer"
    limit: Limit | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"{self.what}: {self.unit!r} is not a unit ({', '.join(UNITS)})")

    @property
    def ratio(self) -> float | None:
        """The ratio to the baseline; None if there is none, or if the divisor is 0."""
        if self.peer is None:
            return None
        value, peer = self.value, self.peer.value
        if self.kernels and self.peer.kernels and self.kernels != self.peer.kernels:
            value, peer = value / self.kernels, peer / self.peer.kernels
        above, below = (value, peer) if self.direction == "value / peer" else (peer, value)
        return above / below if below else None

    @property
    def met(self) -> bool:
        """Whether the limit is met; a limit on a missing ratio is missed."""
        if self.limit is None:
            return True
        number = self.value if self.limit.of == "value" else self.ratio
        return number is not None and self.limit.met(number)

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "kernels": self.kernels,
            "peer": None if self.peer is None else vars(self.peer),
            "ratio": self.ratio,
            "ratio_is": self.direction if self.peer else None,
            "limit": None if self.limit is None else vars(self.limit),
            "met": self.met,
        }


HEADER = ("figure", "kernels", "value", "peer", "ratio", "limit", "")
_WIDTHS = (50, 8, 14, 46, 8, 14, 0)


def exactly(what: str, value: int, wanted: int | range, peer: Peer | None = None) -> Figure:
    """Returns a figure for a count of kernels that must equal a number, or lie in a range."""
    low, high = (wanted.start, wanted.stop - 1) if isinstance(wanted, range) else (wanted, wanted)
    return Figure(what, value, "kernels", peer=peer, limit=Limit("value", low, high))


def number(value: float) -> str:
    """Returns a number as text, with three significant digits; numbers from 100 on and integers without decimals."""
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def row(figure: Figure) -> tuple[str, ...]:
    """Returns a figure's cells, under `HEADER`."""
    peer = figure.peer
    of = f" of {peer.kernels}" if peer and peer.kernels and peer.kernels != figure.kernels else ""
    limit = ""
    if figure.limit:
        limit = f"{figure.limit} {figure.unit}" if figure.limit.of == "value" else f"ratio {figure.limit}"
    return (
        figure.what,
        "" if figure.kernels is None else str(figure.kernels),
        f"{number(figure.value)} {figure.unit}",
        f"{peer.what}{of}: {number(peer.value)} {figure.unit}" if peer else "",
        "" if figure.ratio is None else number(figure.ratio),
        limit,
        "" if figure.met else "MISSED",
    )


def line(cells: Sequence[str]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark; the description is the benchmark's docstring."""
    parser = argparse.ArgumentParser(
        description=(doc or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Use small sizes, to check that the benchmark works; its figures then mean nothing.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Also write the figures to this file, as JSON.")
    return parser


def report(args: argparse.Namespace, measure: Callable[[], Iterable[Figure]]) -> int:
    """Prints figures as they arrive, and writes them to `args.json`; returns the exit status, 1 if a limit is missed."""
    print(line(HEADER))
    figures: list[Figure] = []
    for figure in measure():
        figures.append(figure)
        print(line(row(figure)), flush=True)
    if args.json:
        value = {"figures": [figure.to_json() for figure in figures]}
        args.json.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    return 0 if all(figure.met for figure in figures) else 1


def main(doc: str | None, measure: Callable[[bool], Iterable[Figure]]) -> int:
    """Runs a benchmark that has no arguments of its own, and returns the exit status.

    Args:
        doc: the benchmark's docstring.
        measure: yields its figures; receives whether `--quick` was given.
    """
    args = arguments(doc).parse_args()
    return report(args, lambda: measure(args.quick))
