"""NumPy's functions that select elements by arrays of indices. Indices that are not constant are clamped to the array."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.reductions import axes
from kernelgen.languages.numpy.tensor import TracedArray, implements, tensor


@implements(np.take)
def take(a: Any, indices: Any, axis: Any = None, out: Any = None, mode: str = "raise") -> TracedArray:
    x = tensor(a)
    if axis is None:
        x, axis = TracedArray(x.array.reshape(-1)), 0
    (along,) = axes(axis, x.ndim)
    if mode != "raise":
        raise refused(f"np.take: mode='{mode}' is not supported", "clip the indices: np.clip(indices, 0, n - 1)")
    chosen: Any = indices if isinstance(indices, TracedArray) else np.asarray(indices)
    if chosen.ndim == 0:
        chosen = chosen if isinstance(chosen, TracedArray) else int(chosen)
    return x[(*[slice(None)] * along, chosen)]  # type: ignore[no-any-return]


def _places(x: TracedArray, indices: Any, axis: int) -> tuple[Any, ...]:
    """Returns an index for each dimension: the given one along an axis, and each element's own along the others."""
    chosen = indices.array if isinstance(indices, TracedArray) else jnp.asarray(np.asarray(indices).astype(np.int32))
    if chosen.ndim != x.ndim:
        raise ValueError(f"indices of rank {chosen.ndim} for an array of rank {x.ndim}")
    shape = np.broadcast_shapes(chosen.shape, tuple(1 if k == axis else n for k, n in enumerate(x.shape)))
    chosen = jnp.broadcast_to(chosen.astype(np.int32), shape)
    chosen = jnp.where(chosen < 0, chosen + np.int32(x.shape[axis]), chosen)
    return tuple(chosen if k == axis else lax.broadcasted_iota(np.int32, shape, k) for k in range(x.ndim))


@implements(np.take_along_axis)
def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> TracedArray:
    x = tensor(arr)
    if axis is None:
        x, axis = TracedArray(x.array.reshape(-1)), 0
    (along,) = axes(axis, x.ndim)
    return TracedArray(x.array.at[_places(x, indices, along)].get(mode="clip"))


@implements(np.put_along_axis)
def put_along_axis(arr: Any, indices: Any, values: Any, axis: Any) -> None:
    if not isinstance(arr, TracedArray):
        raise refused("np.put_along_axis writes to an array of the kernel", "make it with np.zeros in the kernel")
    if axis is None:
        flat = TracedArray(arr.array.reshape(-1))
        places = _places(flat, indices, 0)
        arr.replace(flat.array.at[places].set(_shaped(values, arr, places), mode="clip").reshape(arr.shape))
        return
    (along,) = axes(axis, arr.ndim)
    places = _places(arr, indices, along)
    arr.replace(arr.array.at[places].set(_shaped(values, arr, places), mode="clip"))


def _shaped(values: Any, arr: TracedArray, places: tuple[Any, ...]) -> Any:
    return jnp.broadcast_to(tensor(values, arr.dtype).array, places[0].shape)
