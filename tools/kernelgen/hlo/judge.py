"""Arrays to run a kernel with, and differences between two kernels' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def random(shape: Sequence[int], dtype: str, seed: int) -> Array:
    """Returns random values: floats from the normal distribution, integers 0 or 1.

    Args:
        shape: shape of the array.
        dtype: the dtype's name in NumPy or ml_dtypes.
        seed: equal seeds give equal values.
    """
    rng = np.random.default_rng(seed)
    kind = dtype_of(dtype)
    values: Array = rng.integers(0, 2, shape) if kind.kind in "iub" else rng.normal(size=shape)
    return values.astype(kind)


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns the dtype with a name of NumPy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, None) or name)


def difference(have: Array, want: Array, rtol: float, atol: float) -> str | None:
    """Returns the difference between a result and the expected one: how many elements, how large, and the first; None if equal.

    Args:
        have: the result.
        want: the expected result; `nan` equals itself.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
    """
    if have.shape != want.shape:
        return f"it is {list(have.shape)}, not {list(want.shape)}"
    a, b = have.astype(np.float64), want.astype(np.float64)
    close = np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return None
    with np.errstate(invalid="ignore"):
        off = np.abs(a - b)[~close]
    worst = np.max(off, where=~np.isnan(off), initial=-1)
    by = f", by up to {worst:.3g}" if worst >= 0 else ""  # NaN has no distance
    first = tuple(int(i) for i in np.argwhere(~close)[0])
    where = f"first {list(first)}: {a[first]:g}, not {b[first]:g}"
    return f"{(~close).sum()} of {close.size} differ{by}; {where}"
