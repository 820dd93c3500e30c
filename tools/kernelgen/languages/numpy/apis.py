"""Functions that kernels need and NumPy lacks: functions of neural networks, and collectives of one rank.

Each also accepts NumPy arrays, and then computes at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy import scope
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import TracedArray, cast, tensor

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "constant",
    "conv2d",
    "conv3d",
    "full",
    "reduce_scatter",
    "rms_norm",
    "softmax",
    "topk",
    "zeros",
]

_FLOAT32 = np.dtype(np.float32)


def _at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function from and to JAX arrays as one of tensors, or of NumPy arrays outside a kernel."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        kind = TracedArray if scope.TRACE.get() else np.array
        return tuple(map(kind, made)) if isinstance(made, tuple) else kind(made)

    return call


@_at_once
def constant(value: Any, dtype: Any = None) -> Any:
    """Returns an array with constant values as a kernel's array."""
    return (tensor(value) if dtype is None else cast(value, dtype)).array


@_at_once
def full(shape: Any, fill_value: Any, dtype: Any = np.float32) -> Any:
    """Returns an array of one value."""
    return jnp.full(shape, cast(fill_value, dtype).array)


def zeros(shape: Any, dtype: Any = np.float32) -> Any:
    """Returns an array of zeros."""
    return full(shape, 0, dtype)


@_at_once
def softmax(x: Any, axis: int = -1) -> Any:
    """Returns `exp(x) / sum(exp(x))` along an axis, computed in float32, in the dtype of `x`."""
    a = cast(x, _FLOAT32).array
    e = jnp.exp(a - a.max(axis=axis, keepdims=True))
    return (e / e.sum(axis=axis, keepdims=True)).astype(tensor(x).dtype)


@_at_once
def rms_norm(x: Any, weight: Any, axis: int = -1, eps: float = 1e-5) -> Any:
    """Returns `x / sqrt(mean(x^2) + eps) * weight` along an axis, computed in float32, in the dtype of `x`."""
    a = cast(x, _FLOAT32).array
    scale = lax.rsqrt((a * a).mean(axis=axis, keepdims=True) + np.float32(eps))
    return (a * scale * cast(weight, _FLOAT32).array).astype(tensor(x).dtype)


@_at_once
def topk(x: Any, k: int, axis: int = -1, is_ascend: bool = False) -> tuple[Any, Any]:
    """Returns the `k` largest elements (smallest with `is_ascend`) along an axis, best first, and their indices (uint32).

    Among equal elements the first comes first.
    """
    a = jnp.moveaxis(tensor(x).array, axis, -1)
    n = a.shape[-1]
    if not 0 < k <= n:
        raise refused(f"topk: k is {k}, and there are {n} elements")
    keys = a.astype(_FLOAT32) if a.dtype.itemsize < 4 or a.dtype == _FLOAT32 else a
    keys = (-keys if keys.dtype == _FLOAT32 else ~keys) if is_ascend else keys
    place = lax.broadcasted_iota(np.int32, a.shape, a.ndim - 1)
    lowest = keys.dtype.type(-np.inf if keys.dtype == _FLOAT32 else np.iinfo(keys.dtype).min)

    def step(i: Any, state: Any) -> Any:
        taken, places = state
        best = ~taken & (keys == jnp.where(taken, lowest, keys).max(-1, keepdims=True))
        at = jnp.where(best, place, np.int32(n)).min(-1)
        at = jnp.minimum(at, np.int32(n - 1))
        taken = taken | (place == at[..., None])
        return taken, lax.dynamic_update_slice_in_dim(places, at[..., None], i, places.ndim - 1)

    start = (jnp.zeros(a.shape, bool), jnp.zeros((*a.shape[:-1], k), np.int32))
    _, places = lax.fori_loop(np.int32(0), np.int32(k), step, start)
    values = jnp.take_along_axis(a, places, axis=-1, mode="clip")
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis).astype(np.uint32)


def _tuple(value: Any, n: int, name: str) -> tuple[int, ...]:
    found = (value,) * n if isinstance(value, int) else tuple(value)
    if len(found) != n:
        raise refused(f"{name}: a number or {n} numbers, not {value}")
    return found


def _convolution(n: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    a, w = (tensor(v).array for v in (x, weight))
    dtype = jnp.result_type(a, w)
    if a.ndim != n + 2 or w.ndim != n + 2:
        raise refused(f"conv{n}d: input and weight have rank {n + 2}, not {a.ndim} and {w.ndim}")
    made = lax.conv_general_dilated(
        a.astype(dtype),
        w.astype(dtype),
        _tuple(stride, n, "stride"),
        [(p, p) for p in _tuple(padding, n, "padding")],
        rhs_dilation=_tuple(dilation, n, "dilation"),
        feature_group_count=groups,
        preferred_element_type=_FLOAT32,
    ).astype(dtype)
    return made if bias is None else made + cast(bias, dtype).array.reshape(1, -1, *[1] * n)


@_at_once
def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    """Returns the convolution of [N, C, H, W] with [K, C / groups, h, w]."""
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups)


@_at_once
def conv3d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    """Returns the convolution of [N, C, D, H, W] with [K, C / groups, d, h, w]."""
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups)


def _of_one_rank(name: str, data: Any, replica_groups: Sequence[Sequence[int]]) -> Any:
    if any(len(group) != 1 for group in replica_groups):
        raise refused(
            f"{name} of several ranks is not supported: a kernel runs on one NeuronCore", "replica_groups has one rank"
        )
    return np.copy(data)


def all_reduce(data: Any, replica_groups: Sequence[Sequence[int]], reduce_op: Any = np.add, **_: Any) -> Any:
    """Returns `data`: there is one rank."""
    return _of_one_rank("all_reduce", data, replica_groups)


def all_gather(data: Any, all_gather_dim: int, replica_groups: Sequence[Sequence[int]], **_: Any) -> Any:
    """Returns `data`: there is one rank."""
    return _of_one_rank("all_gather", data, replica_groups)


def reduce_scatter(
    data: Any, reduce_scatter_dim: int, replica_groups: Sequence[Sequence[int]], reduce_op: Any = np.add, **_: Any
) -> Any:
    """Returns `data`: there is one rank."""
    return _of_one_rank("reduce_scatter", data, replica_groups)


def all_to_all(
    data: Any, split_dimension: int, concat_dimension: int, replica_groups: Sequence[Sequence[int]], **_: Any
) -> Any:
    """Returns `data`: there is one rank."""
    return _of_one_rank("all_to_all", data, replica_groups)
