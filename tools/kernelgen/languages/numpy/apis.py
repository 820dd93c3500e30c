"""Functions that kernels need and NumPy lacks: functions of neural networks, and collectives of one rank.

Each also accepts NumPy arrays, and then computes at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kernelgen.languages.numpy import functions, scope  # noqa: F401  # `functions` fills the table that arrays ask
from kernelgen.languages.numpy.dtypes import FLOAT32
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.tensor import TracedArray, tensor

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


def _at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose results are NumPy arrays outside a kernel."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if scope.is_tracing():
            return made
        return tuple(np.array(t.array) for t in made) if isinstance(made, tuple) else np.array(made.array)

    return call


@_at_once
def constant(value: Any, dtype: Any = None) -> Any:
    """Returns an array with constant values as a kernel's array."""
    return tensor(value, None if dtype is None else np.dtype(dtype))


def zeros(shape: Any, dtype: Any = np.float32) -> Any:
    """Returns an array of zeros."""
    return full(shape, 0, dtype)


@_at_once
def full(shape: Any, fill_value: Any, dtype: Any = np.float32) -> Any:
    """Returns an array of one value."""
    from kernelgen.languages.numpy.creation import filled

    return filled(shape, fill_value, dtype)


@_at_once
def softmax(x: Any, axis: int = -1) -> Any:
    """Returns `exp(x) / sum(exp(x))` along an axis, computed in float32, in the dtype of `x`."""
    from jax import lax

    wide = tensor(x, None)
    a = wide.array.astype(FLOAT32)
    top = a.max(axis=axis, keepdims=True)
    e = lax.exp(a - top)
    return TracedArray((e / e.sum(axis=axis, keepdims=True)).astype(wide.dtype))


@_at_once
def rms_norm(x: Any, weight: Any, axis: int = -1, eps: float = 1e-5) -> Any:
    """Returns `x / sqrt(mean(x^2) + eps) * weight` along an axis, computed in float32, in the dtype of `x`."""
    from jax import lax

    a = tensor(x).array.astype(FLOAT32)
    scale = lax.rsqrt((a * a).mean(axis=axis, keepdims=True) + np.float32(eps))
    return TracedArray((a * scale * tensor(weight).array.astype(FLOAT32)).astype(tensor(x).dtype))


@_at_once
def topk(x: Any, k: int, axis: int = -1, is_ascend: bool = False) -> tuple[Any, Any]:
    """Returns the `k` largest elements (smallest with `is_ascend`) along an axis, best first, and their indices (uint32).

    Among equal elements the first comes first.
    """
    import jax.numpy as jnp
    from jax import lax

    source = tensor(x)
    a = jnp.moveaxis(source.array, axis, -1)
    n = a.shape[-1]
    if not 0 < k <= n:
        raise refused(f"topk: k is {k}, and there are {n} elements")
    keys = a.astype(FLOAT32) if source.dtype.itemsize < 4 or source.dtype == FLOAT32 else a
    keys = (-keys if keys.dtype == FLOAT32 else ~keys) if is_ascend else keys
    place = lax.broadcasted_iota(np.int32, a.shape, a.ndim - 1)
    lowest = keys.dtype.type(-np.inf if keys.dtype == FLOAT32 else np.iinfo(keys.dtype).min)

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
    return TracedArray(jnp.moveaxis(values, -1, axis)), TracedArray(jnp.moveaxis(places, -1, axis).astype(np.uint32))


def _tuple(value: Any, n: int, name: str) -> tuple[int, ...]:
    found = (value,) * n if isinstance(value, int) else tuple(value)
    if len(found) != n:
        raise refused(f"{name}: a number or {n} numbers, not {value}")
    return found


def _convolution(n: int, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    from jax import lax

    from kernelgen.languages.numpy.tensor import together

    a, w = together(x, weight)
    if a.ndim != n + 2 or w.ndim != n + 2:
        raise refused(f"conv{n}d: input and weight have rank {n + 2}, not {a.ndim} and {w.ndim}")
    made = lax.conv_general_dilated(
        a,
        w,
        _tuple(stride, n, "stride"),
        [(p, p) for p in _tuple(padding, n, "padding")],
        rhs_dilation=_tuple(dilation, n, "dilation"),
        feature_group_count=groups,
        preferred_element_type=FLOAT32,
    ).astype(a.dtype)
    if bias is not None:
        made = made + tensor(bias, a.dtype).array.reshape(1, -1, *[1] * n)
    return TracedArray(made)


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


def _one_rank(name: str, replica_groups: Sequence[Sequence[int]]) -> None:
    if any(len(group) != 1 for group in replica_groups):
        raise refused(
            f"{name} of several ranks is not supported: a kernel runs on one NeuronCore", "replica_groups has one rank"
        )


def all_reduce(data: Any, replica_groups: Sequence[Sequence[int]], reduce_op: Any = np.add, **_: Any) -> Any:
    """Returns `data`: there is one rank."""
    _one_rank("all_reduce", replica_groups)
    return np.copy(data)


def all_gather(data: Any, all_gather_dim: int, replica_groups: Sequence[Sequence[int]], **_: Any) -> Any:
    """Returns `data`: there is one rank."""
    _one_rank("all_gather", replica_groups)
    return np.copy(data)


def reduce_scatter(
    data: Any, reduce_scatter_dim: int, replica_groups: Sequence[Sequence[int]], reduce_op: Any = np.add, **_: Any
) -> Any:
    """Returns `data`: there is one rank."""
    _one_rank("reduce_scatter", replica_groups)
    return np.copy(data)


def all_to_all(
    data: Any, split_dimension: int, concat_dimension: int, replica_groups: Sequence[Sequence[int]], **_: Any
) -> Any:
    """Returns `data`: there is one rank."""
    _one_rank("all_to_all", replica_groups)
    return np.copy(data)
