"""Fits formulas of sizes to integers; a formula is right for all the values.

A formula is a constant, a multiple of one size or of the product of two, or the sum of a constant and such a multiple. Shapes and
strides of attention models have these forms. Other values get no formula.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """`constant + factor * names[0] * names[1] … // divisor`.

    Attributes:
        constant: the summand; the value if `names` is empty.
        factor, divisor: factor and divisor of the product; the division has no remainder at the fitted sizes.
        names: the sizes that are multiplied.
    """

    constant: int
    factor: int = 0
    divisor: int = 1
    names: tuple[str, ...] = ()

    def value(self, sizes: Mapping[str, int]) -> int:
        """Returns the value at these sizes."""
        if not self.names:
            return self.constant
        return self.constant + self.factor * _product(self.names, sizes) // self.divisor

    def __str__(self) -> str:
        if not self.names:
            return str(self.constant)
        text = " * ".join((*([str(self.factor)] if self.factor != 1 else []), *self.names))
        text += f" // {self.divisor}" if self.divisor != 1 else ""
        return text + (f" + {self.constant}" if self.constant > 0 else f" - {-self.constant}" if self.constant else "")


class Fitter:
    """Finds formulas from values at some sizes.

    Args:
        names: the sizes that formulas may have; if several formulas fit, the one of the first size is taken.
        points: the sizes of the values.
    """

    def __init__(self, names: Sequence[str], points: Sequence[Mapping[str, int]]) -> None:
        # A size with one value at all points can't explain differences.
        varying = [name for name in names if len({point[name] for point in points}) > 1]
        products = [(name,) for name in varying] + list(itertools.combinations(varying, 2))
        self._columns = {product: [_product(product, point) for point in points] for product in products}
        self._count = len(points)
        self._known: dict[tuple[int | None, ...], Formula | None] = {}

    def fit(self, values: Sequence[int | None]) -> Formula | None:
        """Returns the simplest formula of the values; None if there is none.

        Args:
            values: one for each point; None if any value is right.
        """
        key = tuple(values)
        if len(key) != self._count:
            raise ValueError(f"{len(key)} values at {self._count} points")
        if key not in self._known:
            self._known[key] = self._find(key)
        return self._known[key]

    def _find(self, values: tuple[int | None, ...]) -> Formula | None:
        given = [i for i, value in enumerate(values) if value is not None]
        wanted = [value for value in values if value is not None]
        if len(set(wanted)) <= 1:
            return Formula(wanted[0] if wanted else 1)
        columns = {names: [column[i] for i in given] for names, column in self._columns.items()}
        # Formulas without a constant come first: a multiple is likelier, and one point fewer confirms it.
        for with_constant in (False, True):
            for names, column in columns.items():
                found = _line(column, wanted, with_constant)
                if found is not None:
                    return Formula(*found, names)
        return None


def _product(names: tuple[str, ...], point: Mapping[str, int]) -> int:
    return math.prod(point[name] for name in names)


def _line(column: list[int], wanted: list[int], with_constant: bool) -> tuple[int, int, int] | None:
    """Returns (constant, factor, divisor) of the line through all points, or None. Two points do not confirm a line."""
    distinct = sorted(dict(zip(column, wanted, strict=True)).items())
    if len(distinct) < 2 or (with_constant and len(distinct) < 3):
        return None
    # The line through the first point (or the origin) and the last; the check of all other points is below.
    (x0, y0), (x1, y1) = distinct[0], distinct[-1]
    factor, divisor = (y1 - y0, x1 - x0) if with_constant else (y1, x1)
    common = math.gcd(factor, divisor)
    factor, divisor = factor // common, divisor // common
    # Shapes are divided by small numbers, such as a block's size; a line with a large divisor fits by chance.
    if divisor > 64 or factor == 0 or (divisor != 1 and any(factor * x % divisor for x in column)):
        return None
    constant = y0 - factor * x0 // divisor
    if (constant and not with_constant) or any(
        constant + factor * x // divisor != y for x, y in zip(column, wanted, strict=True)
    ):
        return None
    return constant, factor, divisor
