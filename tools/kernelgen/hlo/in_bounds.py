"""JAX's gathers and scatters with indices that are inside the array.

By HLO's rules a gather reads the nearest element for an index out of bounds, and a scatter omits the update. JAX's modes `clip`,
`fill` (the default of jnp.take) and `drop` (the default of `.at[i].set(…)`) rely on these rules. A device ends an execution with
such an index (NRT_EXEC_OOB). So these modes become clamped indices, and updates of memory behind the array. `x[i]` has the mode
`promise_in_bounds`, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy import array  # itself: tracing of kernels in NumPy replaces np.array

_ORIGINAL = "kernelgen_bind"
"""An attribute of a changed primitive: its own `bind`."""


def keep_in_bounds(jax: Any) -> None:
    """Changes JAX's primitives in this process; results do not change. Safe to call again."""
    lax = jax.lax
    if hasattr(lax.gather_p, _ORIGINAL):
        return
    scatters = ("scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max")
    changes: dict[str, Callable[..., Any]] = {"gather": _gather, **dict.fromkeys(scatters, _scatter)}
    for name, bind in changes.items():
        primitive = getattr(lax, f"{name}_p")
        setattr(primitive, _ORIGINAL, primitive.bind)
        primitive.bind = _bound(jax, primitive.bind, bind)
    jax.clear_caches()  # jitted functions of JAX that were traced before


def _bound(jax: Any, original: Callable[..., Any], bind: Callable[..., Any]) -> Callable[..., Any]:
    def bound(*operands: Any, **params: Any) -> Any:
        if jax.dtypes.issubdtype(operands[0].dtype, jax.dtypes.extended):  # keys of random generators
            return original(*operands, **params)
        return bind(jax, original, *operands, **params)

    return bound


def _gather(jax: Any, bind: Callable[..., Any], operand: Any, indices: Any, **params: Any) -> Any:
    """Binds a gather. Elements out of bounds are the nearest ones, or a value."""
    lax, mode = jax.lax, params["mode"]
    dnums = params["dimension_numbers"]
    limits = [operand.shape[d] - params["slice_sizes"][d] for d in dnums.start_index_map]
    params["mode"] = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    if mode is params["mode"] or not limits or _is_inside(jax, indices, limits):
        return bind(operand, indices, **params)
    clamped = lax.clamp(indices.dtype.type(0), indices, _spread(lax, limits, indices))
    result = bind(operand, clamped, **params)
    if mode is lax.GatherScatterMode.CLIP:
        return result
    inside = lax.reduce_and(clamped == indices, axes=(indices.ndim - 1,))
    batch = [d for d in range(result.ndim) if d not in dnums.offset_dims]
    mask = lax.broadcast_in_dim(inside, result.shape, batch)
    return lax.select(mask, result, lax.full_like(result, params["fill_value"]))


def _scatter(jax: Any, bind: Callable[..., Any], operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
    """Binds a scatter. Updates out of bounds go behind the end of the array, which is cut off."""
    lax, modes = jax.lax, jax.lax.GatherScatterMode
    dnums = params["dimension_numbers"]
    dims = dnums.scatter_dims_to_operand_dims
    if params["mode"] is not modes.FILL_OR_DROP or not dims or 0 in (*indices.shape, *updates.shape):
        return bind(operand, indices, updates, **params)
    window = iter([updates.shape[d] for d in dnums.update_window_dims])
    single = {*dnums.inserted_window_dims, *dnums.operand_batching_dims}
    sizes = [1 if d in single else next(window) for d in range(operand.ndim)]
    limits = [operand.shape[d] - sizes[d] for d in dims]
    if _is_inside(jax, indices, limits):
        return bind(operand, indices, updates, **(params | {"mode": modes.PROMISE_IN_BOUNDS}))
    highest = _spread(lax, limits, indices)
    clamped = lax.clamp(indices.dtype.type(0), indices, highest)
    inside = lax.reduce_and(clamped == indices, axes=(indices.ndim - 1,))
    behind = array([operand.shape[dims[0]], *[0] * (len(dims) - 1)], np.int32)
    padded_indices = lax.select(
        lax.broadcast_in_dim(inside, indices.shape, range(indices.ndim - 1)),
        lax.convert_element_type(clamped, np.int32),
        lax.broadcast_in_dim(behind, indices.shape, (indices.ndim - 1,)),
    )
    edges = [(0, sizes[d] if d == dims[0] else 0, 0) for d in range(operand.ndim)]
    longer = lax.pad(operand, operand.dtype.type(0), edges)
    params.update(mode=modes.PROMISE_IN_BOUNDS, unique_indices=False, indices_are_sorted=False)
    return lax.slice(bind(longer, padded_indices, updates, **params), [0] * operand.ndim, operand.shape)


def _is_inside(jax: Any, indices: Any, limits: Sequence[int]) -> bool:
    """Returns whether indices are constants, and inside."""
    constant = _constant(jax, indices)
    return constant is not None and bool(((constant >= 0) & (constant <= array(limits))).all())


def _constant(jax: Any, value: Any) -> np.ndarray[Any, Any] | None:
    """Returns the value of an array of a trace that depends on no input; None for any other."""
    lowered = value.full_lower() if isinstance(value, jax.core.Tracer) else value
    if not isinstance(lowered, jax.core.Tracer):
        return array(lowered)
    if (equation := getattr(lowered, "parent", None)) is None:
        return None
    operands = [_constant(jax, operand) for operand in equation.in_tracers]
    if any(operand is None for operand in operands) or equation.primitive.multiple_results:
        return None
    with jax.ensure_compile_time_eval():
        return array(equation.primitive.bind(*operands, **equation.params))


def _spread(lax: Any, limits: Sequence[int], indices: Any) -> Any:
    """Returns the largest valid index of each dimension, in the shape and dtype of the indices."""
    largest = array([min(limit, np.iinfo(indices.dtype).max) for limit in limits], indices.dtype)
    return lax.broadcast_in_dim(largest, indices.shape, (indices.ndim - 1,))
