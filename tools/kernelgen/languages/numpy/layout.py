"""NumPy's functions that only move elements."""

from __future__ import annotations

import builtins
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.lib.array_utils import normalize_axis_index

from kernelgen.languages.numpy.dtypes import promoted
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.reductions import axes
from kernelgen.languages.numpy.tensor import N, TracedArray, implements, tensor, together


@implements(np.reshape)
def reshape(a: Any, /, shape: Any = None, order: str = "C", *, newshape: Any = None, copy: Any = None) -> TracedArray:
    if order != "C":
        raise refused(f"np.reshape: order='{order}' is not supported", "use np.transpose before np.reshape")
    x = tensor(a).array
    try:
        return TracedArray(jnp.reshape(x, newshape if shape is None else shape))
    except (TypeError, ValueError, ZeroDivisionError):
        raise ValueError(
            f"can't reshape an array of shape {x.shape} into {newshape if shape is None else shape}"
        ) from None


@implements(np.ravel)
def ravel(a: Any, order: str = "C") -> TracedArray:
    return reshape(a, (-1,), order)


@implements(np.transpose)
def transpose(a: Any, axes: Any = None) -> TracedArray:
    x = tensor(a).array
    if axes is None:
        return TracedArray(jnp.transpose(x))
    if len(axes) != x.ndim:
        raise ValueError(f"axes don't match array: {len(axes)} axes for an array of rank {x.ndim}")
    order = [normalize_axis_index(axis, x.ndim) for axis in axes]
    if len({*order}) != len(order):
        raise ValueError(f"repeated axis in transpose: {tuple(axes)}")
    return TracedArray(lax.transpose(x, order))


@implements(np.swapaxes)
def swapaxes(a: Any, axis1: int, axis2: int) -> TracedArray:
    return TracedArray(jnp.swapaxes(tensor(a).array, axis1, axis2))


@implements(np.moveaxis)
def moveaxis(a: Any, source: Any, destination: Any) -> TracedArray:
    return TracedArray(jnp.moveaxis(tensor(a).array, source, destination))


@implements(np.expand_dims)
def expand_dims(a: Any, axis: Any) -> TracedArray:
    return TracedArray(jnp.expand_dims(tensor(a).array, tuple(axis) if isinstance(axis, list) else axis))


@implements(np.squeeze)
def squeeze(a: Any, axis: Any = None) -> TracedArray:
    return TracedArray(jnp.squeeze(tensor(a).array, tuple(axis) if isinstance(axis, list) else axis))


@implements(np.broadcast_to)
def broadcast_to(array: Any, shape: Any, subok: bool = False) -> TracedArray:
    return TracedArray(jnp.broadcast_to(tensor(array).array, shape))


@implements(np.copy)
def copy(a: Any, order: str = "K", subok: bool = False) -> TracedArray:
    return TracedArray(tensor(a).array)


@implements(np.concatenate)
def concatenate(
    arrays: Any, axis: Any = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind"
) -> TracedArray:
    parts = together(*arrays, dtype=promoted(*map(tensor, arrays)) if dtype is None else dtype)
    if axis is None:
        return TracedArray(lax.concatenate([p.reshape(-1) for p in parts], 0))
    (along,) = axes(axis, parts[0].ndim)
    return TracedArray(lax.concatenate(parts, along))


@implements(np.stack)
def stack(arrays: Any, axis: int = 0, out: Any = None, *, dtype: Any = None, casting: str = "same_kind") -> TracedArray:
    return concatenate([expand_dims(a, axis) for a in arrays], axis, dtype=dtype)


@implements(np.vstack)
def vstack(tup: Any, *, dtype: Any = None, casting: str = "same_kind") -> TracedArray:
    return concatenate([TracedArray(jnp.atleast_2d(tensor(a).array)) for a in tup], 0, dtype=dtype)


@implements(np.hstack)
def hstack(tup: Any, *, dtype: Any = None, casting: str = "same_kind") -> TracedArray:
    parts = [TracedArray(jnp.atleast_1d(tensor(a).array)) for a in tup]
    return concatenate(parts, 0 if parts[0].ndim == 1 else 1, dtype=dtype)


@implements(np.split)
def split(ary: Any, indices_or_sections: Any, axis: int = 0) -> list[TracedArray]:
    (along,) = axes(axis, tensor(ary).ndim)
    return [TracedArray(part) for part in jnp.split(tensor(ary).array, indices_or_sections, along)]


@implements(np.repeat)
def repeat(a: Any, repeats: Any, axis: Any = None) -> TracedArray:
    if isinstance(repeats, TracedArray):
        raise refused("np.repeat: how often is not known while the kernel is traced", "repeats is a number")
    x = tensor(a).array
    x = x.reshape(-1) if axis is None else x
    (along,) = axes(0 if axis is None else axis, x.ndim)
    counts = np.broadcast_to(np.asarray(repeats), (x.shape[along],))
    if (counts == counts[:1]).all() and counts.size:
        wide = jnp.broadcast_to(
            lax.expand_dims(x, (along + 1,)), (*x.shape[: along + 1], int(counts[0]), *x.shape[along + 1 :])
        )
        return TracedArray(wide.reshape(*x.shape[:along], x.shape[along] * int(counts[0]), *x.shape[along + 1 :]))
    parts = [lax.slice_in_dim(x, i, i + 1, axis=along) for i, n in enumerate(counts) for _ in builtins.range(int(n))]
    return TracedArray(lax.concatenate(parts, along))


@implements(np.tile)
def tile(A: Any, reps: Any) -> TracedArray:
    return TracedArray(jnp.tile(tensor(A).array, reps))


@implements(np.flip)
def flip(m: Any, axis: Any = None) -> TracedArray:
    x = tensor(m).array
    return TracedArray(lax.rev(x, axes(axis, x.ndim)))


@implements(np.roll)
def roll(a: Any, shift: Any, axis: Any = None) -> TracedArray:
    if isinstance(shift, TracedArray):
        raise refused("np.roll: how far is not known while the kernel is traced", "shift is a number")
    x = tensor(a).array
    if axis is None:
        return TracedArray(_rolled(x.reshape(-1), int(np.sum(shift)), 0).reshape(x.shape))
    far: dict[int, int] = {}
    for by, along in np.broadcast(np.asarray(shift), np.asarray(axis)):
        (one,) = axes(int(along), x.ndim)
        far[one] = far.get(one, 0) + int(by)
    for one, by in far.items():
        x = _rolled(x, by, one)
    return TracedArray(x)


def _rolled(x: Any, by: int, axis: int) -> Any:
    n = x.shape[axis]
    by = by % n if n else 0
    if not by:
        return x
    ends = lax.slice_in_dim(x, n - by, n, axis=axis), lax.slice_in_dim(x, 0, n - by, axis=axis)
    return lax.concatenate(ends, axis)


@implements(np.pad)
def pad(array: Any, pad_width: Any, mode: Any = "constant", **kwargs: Any) -> TracedArray:
    if mode not in ("constant", "edge", "reflect", "symmetric", "wrap"):
        raise refused(
            f"np.pad: mode={mode!r} is not supported", "modes are constant, edge, reflect, symmetric and wrap"
        )
    return TracedArray(jnp.pad(tensor(array).array, pad_width, mode, **kwargs))


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> TracedArray:
    x = tensor(a)
    (along,) = axes(axis, x.ndim)
    edge = tuple(1 if k == along else m for k, m in enumerate(x.shape))
    # A Python number takes the array's dtype; other values keep their own.
    ends = [
        None if e is None or e is np._NoValue else tensor(e, None if hasattr(e, "dtype") else x.dtype)
        for e in (prepend, append)
    ]
    ends = [e if e is None or e.ndim else broadcast_to(e, edge) for e in ends]
    whole: Any = [e for e in (ends[0], x, ends[1]) if e is not None]
    result: Any = concatenate(whole, along) if len(whole) > 1 else x
    for _ in builtins.range(n):
        size = result.shape[along]
        later, earlier = tuple[Any, ...](
            TracedArray(lax.slice_in_dim(result.array, lo, hi, axis=along)) for lo, hi in ((1, size), (0, size - 1))
        )
        result = N.not_equal(later, earlier) if result.dtype == np.bool_ else later - earlier
    return result  # type: ignore[no-any-return]


def _triangle(m: Any, k: int, lower: bool) -> TracedArray:
    x = tensor(m).array
    rows, columns = (lax.broadcasted_iota(np.int32, x.shape[-2:], d) for d in (0, 1))
    keep = columns - rows <= np.int32(k) if lower else columns - rows >= np.int32(k)
    return TracedArray(jnp.where(keep, x, x.dtype.type(0)))


@implements(np.tril)
def tril(m: Any, k: int = 0) -> TracedArray:
    return _triangle(m, k, True)


@implements(np.triu)
def triu(m: Any, k: int = 0) -> TracedArray:
    return _triangle(m, k, False)


@implements(np.diag)
def diag(v: Any, k: int = 0) -> TracedArray:
    x = tensor(v)
    if x.ndim == 2:
        return diagonal(x, k)
    if x.ndim != 1:
        raise ValueError(f"an array of rank 1 or 2 is needed, not {x.ndim}")
    n = x.shape[0] + abs(k)
    moved = lax.pad(x.array, x.dtype.type(0), [(max(k, 0), max(-k, 0), 0)])
    rows, columns = (lax.broadcasted_iota(np.int32, (n, n), d) for d in (0, 1))
    return TracedArray(jnp.where(columns - rows == np.int32(k), moved[None, :], x.dtype.type(0)))


@implements(np.diagonal)
def diagonal(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> TracedArray:
    x = jnp.moveaxis(tensor(a).array, (axis1, axis2), (-2, -1))
    rows, columns = x.shape[-2:]
    n = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    x = x[..., max(-offset, 0) : max(-offset, 0) + n, max(offset, 0) : max(offset, 0) + n]
    if not n:
        return TracedArray(x[..., 0])
    # Read with a stride of one row plus one element.
    flat = x.reshape(*x.shape[:-2], n * n)
    return TracedArray(lax.slice_in_dim(flat, 0, n * n, n + 1, axis=flat.ndim - 1))


@implements(np.copyto)
def copyto(dst: Any, src: Any, casting: str = "same_kind", where: Any = True) -> None:
    if not isinstance(dst, TracedArray):
        raise refused("np.copyto writes to an array of the kernel", "make it with np.zeros in the kernel")
    value = tensor(src, dst.dtype)
    dst[...] = value if where is True else np.where(where, value, dst)
