"""NumPy's products of matrices and vectors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from kernelgen.languages.numpy.dtypes import BOOL, FLOAT32, floating
from kernelgen.languages.numpy.layout import diagonal
from kernelgen.languages.numpy.places import refused
from kernelgen.languages.numpy.reductions import axes
from kernelgen.languages.numpy.tensor import N, TracedArray, implements, tensor, together


def _operands(x: Any, y: Any, dtype: Any = None) -> tuple[Any, Any]:
    a, b = together(x, y, dtype=dtype)
    return (a.astype(np.int32), b.astype(np.int32)) if a.dtype == BOOL else (a, b)


def _multiplied(a: Any, b: Any, numbers: Any) -> Any:
    # Products of 16-bit floats are summed in float32, as on the tensor engine, and rounded once.
    wide = FLOAT32 if floating(a.dtype) == a.dtype else a.dtype
    return lax.dot_general(a, b, numbers, preferred_element_type=wide).astype(a.dtype)


def product(x: TracedArray, y: TracedArray) -> TracedArray:
    """Returns the elementwise product."""
    found: TracedArray = N.multiply(x, y)
    return found


@implements(np.matmul)
def matmul(x: Any, y: Any, /, *, dtype: Any = None, **_: Any) -> TracedArray:
    a, b = _operands(x, y, dtype)
    if not a.ndim or not b.ndim:
        raise ValueError("operands of rank 0 have no product: use *")
    left, right = a.ndim == 1, b.ndim == 1
    a, b = (a[None, :] if left else a), (b[:, None] if right else b)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"shapes {tensor(x).shape} and {tensor(y).shape} do not match: {a.shape[-1]} columns, {b.shape[-2]} rows"
        )
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    n = len(batch)
    if b.ndim == 2:  # one matrix for all: no batch dimension
        made = _multiplied(a, b, (((a.ndim - 1,), (0,)), ((), ())))
    else:
        a, b = jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
        made = _multiplied(a, b, (((n + 1,), (n,)), (tuple(range(n)), tuple(range(n)))))
    result = TracedArray(lax.squeeze(made, [made.ndim - 2] * left + [made.ndim - 1] * right))
    result.iterations = ("matmul", (*batch, made.shape[-2], made.shape[-1], a.shape[-1]))
    return result


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> TracedArray:
    x, y = tensor(a), tensor(b)
    if not x.ndim or not y.ndim:
        return product(x, y)
    if y.ndim <= 2:
        return matmul(a, b)
    p, q = _operands(x, y)
    return TracedArray(_multiplied(p, q, (((p.ndim - 1,), (q.ndim - 2,)), ((), ()))))


@implements(np.outer)
def outer(a: Any, b: Any, out: Any = None) -> TracedArray:
    x, y = tensor(a), tensor(b)
    return product(TracedArray(x.array.reshape(-1, 1)), TracedArray(y.array.reshape(1, -1)))


@implements(np.trace)
def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> TracedArray:
    found: TracedArray = N.sum(diagonal(a, offset, axis1, axis2), axis=-1, dtype=dtype)
    return found


@implements(np.einsum)
def einsum(*operands: Any, **_: Any) -> TracedArray:
    subscripts, *arrays = operands
    if not isinstance(subscripts, str):
        raise refused("np.einsum takes its subscripts as text", "write np.einsum('ij,jk->ik', a, b)")
    return TracedArray(jnp.einsum(subscripts, *together(*arrays)))


@implements(np.linalg.norm)
def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> TracedArray:
    array = tensor(x).array
    wanted = floating(array.dtype)
    array = array.astype(FLOAT32)
    if ord is not None and ((axis is None and array.ndim > 1) or isinstance(axis, tuple)):
        if ord != "fro":
            raise refused(f"np.linalg.norm: ord={ord!r} of a matrix is not supported", "use ord=None or 'fro'")
        ord = None
    elif ord == "fro":
        raise ValueError("Invalid norm order 'fro' for vectors")
    over = axes(axis, array.ndim)
    size = lax.abs(array)
    if ord in (None, 2):
        found = lax.sqrt(jnp.sum(array * array, axis=over))
    elif ord == 1:
        found = jnp.sum(size, axis=over)
    elif ord in (np.inf, -np.inf):
        found = (jnp.max if ord > 0 else jnp.min)(size, axis=over)
    else:
        raise refused(f"np.linalg.norm: ord={ord!r} is not supported", "use ord=None, 1, 2, np.inf or -np.inf")
    return TracedArray((lax.expand_dims(found, over) if keepdims else found).astype(wanted))
