"""`fori_loop`: a loop that stays a loop in the HLO, and its index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax

from kernelgen.languages.numpy import scope
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import TracedArray, holds_tensor, tensor


class LoopIndex(TracedArray):
    """The index `i` of a loop times a number plus a number, an int32 of rank 0; slices may use it as bounds.

    Attributes:
        affine: id of the loop, the factor, the summand.
    """

    __slots__ = ("_loop", "affine")

    def __init__(self, loop: Any, factor: int = 1, offset: int = 0) -> None:
        super().__init__(loop * np.int32(factor) + np.int32(offset))
        self._loop = loop
        self.affine = (id(loop), factor, offset)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        forms = [self._form(i) for i in inputs]
        if method == "__call__" and not kwargs and None not in forms and len(forms) == 2:
            (a, b), (c, d) = forms  # type: ignore[misc]
            if ufunc is np.add:
                return LoopIndex(self._loop, a + c, b + d)
            if ufunc is np.subtract:
                return LoopIndex(self._loop, a - c, b - d)
            if ufunc is np.multiply and not (a and c):
                return LoopIndex(self._loop, a * d + b * c, b * d)
        return super().__array_ufunc__(ufunc, method, *inputs, **kwargs)

    def _form(self, operand: Any) -> tuple[int, int] | None:
        """Returns the factor and the summand of a number or an index of the same loop, else None."""
        if isinstance(operand, LoopIndex) and operand._loop is self._loop:
            return operand.affine[1:]
        is_number = isinstance(operand, int | np.integer) and not isinstance(operand, bool)
        return (0, int(operand)) if is_number else None


def fori_loop(lower: int, upper: int, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """Computes `value = body(i, value)` for `lower <= i < upper`, beginning with `init`.

    Args:
        lower: the first index, a number.
        upper: the number after the last index.
        body: a function of the index and the current value; in slices the index may be multiplied by and added to numbers.
        init: an array, a number, or a tuple of those. Shapes and dtypes must not change.
    """
    if holds_tensor((lower, upper)):
        raise refused("fori_loop: how often it runs is not known while the kernel is traced", "both ends are numbers")
    is_tuple = isinstance(init, tuple)
    begin = init if is_tuple else (init,)
    if not holds_tensor(begin) and scope.TRACE.get() is None:
        value = init
        for i in range(lower, upper):
            value = body(i, value)
        return value
    first = [tensor(v) for v in begin]

    def step(i: Any, values: Any) -> Any:
        with scope.loop_body():
            state = tuple(TracedArray(v) for v in values)
            returned = body(LoopIndex(i), state if is_tuple else state[0])
        new = returned if is_tuple and isinstance(returned, tuple) else (returned,)
        if len(new) != len(first):
            raise refused(f"fori_loop: the body returns {len(new)} values, not {len(first)} as init has them")
        results = [tensor(v, None if isinstance(v, TracedArray) else f.dtype) for v, f in zip(new, first, strict=True)]
        for k, (n, f) in enumerate(zip(results, first, strict=True)):
            if n.shape != f.shape or n.dtype != f.dtype:
                one, other = (f"{t.dtype.name}{list(t.shape)}" for t in (f, n))
                raise refused(
                    f"fori_loop: value {k} is {one} in init, and the body makes it {other}",
                    "a value keeps its shape and dtype: convert one of them with astype",
                )
        return tuple(n.array for n in results)

    done = lax.fori_loop(np.int32(lower), np.int32(upper), step, tuple(f.array for f in first))
    results = tuple(TracedArray(v) for v in done)
    return results if is_tuple else results[0]
