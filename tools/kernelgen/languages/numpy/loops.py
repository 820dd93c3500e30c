"""`fori_loop`: a loop that stays a loop in the HLO, and its index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from kernelgen.languages.numpy import scope
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import N, TracedArray, tensor


class LoopIndex(TracedArray):
    """The index `i` of a loop times `factor` plus `offset`, an int32 of rank 0; slices may use it as bounds."""

    def __init__(self, loop: Any, factor: int = 1, offset: int = 0) -> None:
        super().__init__(loop * np.int32(factor) + np.int32(offset))
        self._loop = loop
        self.factor = factor
        self.offset = offset

    def runs_with(self, other: LoopIndex) -> bool:
        """Returns whether the difference is constant."""
        return self._loop is other._loop and self.factor == other.factor

    def _moved(self, other: Any, factor: int, sign: int) -> Any:
        """Returns `factor * self + sign * other` for a number or an index of the same loop, else None."""
        if isinstance(other, int | np.integer) and not isinstance(other, bool):
            return LoopIndex(self._loop, factor * self.factor, factor * self.offset + sign * int(other))
        if isinstance(other, LoopIndex) and other._loop is self._loop:
            return LoopIndex(
                self._loop, factor * self.factor + sign * other.factor, factor * self.offset + sign * other.offset
            )
        return None

    def __add__(self, other: Any) -> Any:
        moved = self._moved(other, 1, 1)
        return N.add(self, other) if moved is None else moved

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        moved = self._moved(other, 1, -1)
        return N.subtract(self, other) if moved is None else moved

    def __rsub__(self, other: Any) -> Any:
        moved = self._moved(other, -1, 1)
        return N.subtract(other, self) if moved is None else moved

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, int | np.integer) and not isinstance(other, bool):
            return LoopIndex(self._loop, self.factor * int(other), self.offset * int(other))
        return N.multiply(self, other)

    __rmul__ = __mul__


def fori_loop(lower: int, upper: int, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """Computes `value = body(i, value)` for `lower <= i < upper`, beginning with `init`.

    Args:
        lower: the first index, a number.
        upper: the number after the last index.
        body: a function of the index and the current value; in slices the index may be multiplied by and added to numbers.
        init: an array, a number, or a tuple of those. Shapes and dtypes must not change.
    """
    if isinstance(lower, TracedArray) or isinstance(upper, TracedArray):
        raise refused("fori_loop: how often it runs is not known while the kernel is traced", "both ends are numbers")
    several = isinstance(init, tuple)
    begin = init if several else (init,)
    if not any(isinstance(v, TracedArray) for v in begin) and not scope.is_tracing():
        value = init
        for i in range(lower, upper):
            value = body(i, value)
        return value
    first = [tensor(v) for v in begin]

    def step(i: Any, values: Any) -> Any:
        scope.enter_body()
        try:
            given = tuple(TracedArray(v) for v in values)
            made = body(LoopIndex(i), given if several else given[0])
            new = made if several and isinstance(made, tuple) else (made,)
            if len(new) != len(first):
                raise refused(f"fori_loop: the body returns {len(new)} values, not {len(first)} as init has them")
            found = [
                tensor(v, None if isinstance(v, TracedArray) else f.dtype) for v, f in zip(new, first, strict=True)
            ]
            for k, (n, f) in enumerate(zip(found, first, strict=True)):
                if n.shape != f.shape or n.dtype != f.dtype:
                    one, other = (f"{t.dtype.name}{list(t.shape)}" for t in (f, n))
                    raise refused(
                        f"fori_loop: value {k} is {one} in init, and the body makes it {other}",
                        "a value keeps its shape and dtype: convert one of them with astype",
                    )
            return tuple(n.array for n in found)
        finally:
            scope.leave_body()

    done = lax.fori_loop(np.int32(lower), np.int32(upper), step, tuple(f.array for f in first))
    results = tuple(TracedArray(v) for v in done)
    return results if several else results[0]
