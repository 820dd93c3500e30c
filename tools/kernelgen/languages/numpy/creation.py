"""Creates arrays inside a kernel."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kernelgen.languages.numpy.dtypes import narrowed
from kernelgen.languages.numpy.tensor import TracedArray, implements, tensor


def filled(shape: Any, value: Any, dtype: Any) -> TracedArray:
    """Returns a tensor of one value."""
    size = shape.shape if isinstance(shape, TracedArray) else shape
    if isinstance(value, TracedArray):
        return TracedArray(jnp.broadcast_to(value.array.astype(narrowed(dtype)), size))
    return TracedArray(jnp.full(size, np.asarray(value).astype(narrowed(dtype))))


def _like(value: Any) -> Any:
    def compute(
        a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, **_: Any
    ) -> TracedArray:
        x = tensor(a)
        return filled(x.shape if shape is None else shape, value, x.dtype if dtype is None else dtype)

    return compute


implements(np.zeros_like, np.empty_like)(_like(0))
implements(np.ones_like)(_like(1))


@implements(np.full_like)
def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, **_: Any
) -> TracedArray:
    x = tensor(a)
    return filled(x.shape if shape is None else shape, fill_value, x.dtype if dtype is None else dtype)
