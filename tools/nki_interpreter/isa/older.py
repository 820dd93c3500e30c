"""nki.isa of `neuronxcc.nki`, on the instructions of `newer`: these return tiles and take `mask` and `dtype`.

A mask restricts the views that an instruction gets, so the instructions themselves know nothing of masks.
"""

# ruff: noqa: F401  # kernels import these names

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from nki_interpreter import checks, tensors
from nki_interpreter.dtypes import boolean, dtype_of, float32, int32, is_float, promoted, uint32
from nki_interpreter.elementwise import COMPARISONS, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.indices import affine, box, whole_array
from nki_interpreter.isa import constants, dma, gpsimd, scalar, tensor, vector, vector_reductions, vector_searches
from nki_interpreter.isa.constants import engine, matmul_perf_mode, nc_version, reduce_cmd
from nki_interpreter.isa.newer import get_nc_version
from nki_interpreter.operators import copied, emit, result
from nki_interpreter.program import PSUM, SBUF, current
from nki_interpreter.tensors import NkiTensor

dge_mode, oob_mode = constants.older_dge_mode, constants.oob_mode
tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine, dma_engine = engine.gpsimd, engine.unknown, engine.dma


def _returning(
    function: Callable[..., None],
    tiles: str = "data",
    dtype: Callable[..., Any] | None = None,
    shape: Callable[..., tuple[int, ...]] | None = None,
    defaults: dict[str, Any] | None = None,
) -> Callable[..., NkiTensor]:
    """Returns an instruction without `dst`, with `mask` and `dtype`, which returns its result as a new tile.

    Args:
        function: the instruction of the newer generation.
        tiles: its operands that the mask restricts; the result has the first one's shape and dtype.
        dtype: a function of the instruction's arguments that returns the result's dtype, if it is another.
        shape: a function of the arguments that returns the result's shape, if it is another. Such a result has no mask.
        defaults: other defaults than the newer generation's.
    """
    kinds = inspect.Parameter
    parameters = [
        p.replace(default=(defaults or {}).get(n, p.default)) for n, p in inspect.signature(function).parameters.items()
    ]
    more = [kinds(name, kinds.KEYWORD_ONLY, default=None, annotation=Any) for name in ("mask", "dtype")]
    signature = inspect.Signature([*parameters[1:], *more], return_annotation=NkiTensor)

    @functools.wraps(function)
    def older(*args: Any, **kwargs: Any) -> NkiTensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        mask, wanted = given.pop("mask"), given.pop("dtype")
        names = tiles.split()
        for name in names:
            given[name] = checks.on_chip(given[name], name).with_mask(mask)
        first = given[names[0]]
        out = wanted or (dtype(**given) if dtype else first.dtype)
        target = result(first.shape, out, [given[n] for n in names]) if shape is None else result(shape(**given), out)
        function(target, **given)
        return target

    older.__signature__ = signature  # type: ignore[attr-defined]
    return older


def _float_dtype(data: NkiTensor, **_: Any) -> Any:
    return data.dtype if is_float(data.dtype) else float32


def _step_dtype(data: NkiTensor, op0: Any, op1: Any = None, **_: Any) -> Any:
    return boolean if op_name(op0 if op1 is None else op1) in COMPARISONS else data.dtype


def _pair_dtype(data1: NkiTensor, data2: NkiTensor, op: Any, **_: Any) -> Any:
    return boolean if op_name(op) in COMPARISONS else promoted(data1.dtype, data2.dtype)


def _scan_dtype(data0: NkiTensor, data1: NkiTensor, **_: Any) -> Any:
    return promoted(data0.dtype, data1.dtype)


activation = _returning(scalar.activation, dtype=_float_dtype)
activation_reduce = _returning(scalar.activation_reduce, dtype=_float_dtype)
dropout = _returning(vector.dropout)
max8 = _returning(vector_searches.max8, "src", shape=lambda src, **_: (src.shape[0], 8))
nc_find_index8 = _returning(
    vector_searches.nc_find_index8, dtype=lambda **_: uint32, shape=lambda data, **_: (data.shape[0], 8)
)
_gather_flattened = _returning(gpsimd.nc_n_gather, "indices", dtype=lambda data, **_: data.dtype)
range_select = _returning(vector.range_select, "on_true_tile", defaults={"reduce_cmd": reduce_cmd.idle})
scalar_tensor_tensor = _returning(vector.scalar_tensor_tensor, dtype=_step_dtype)
sequence_bounds = _returning(
    vector_searches.sequence_bounds,
    "segment_ids",
    shape=lambda segment_ids, **_: (segment_ids.shape[0], 2, segment_ids.size // segment_ids.shape[0]),
)
tensor_partition_reduce = _returning(
    vector_reductions.tensor_partition_reduce, shape=lambda data, **_: (1, *data.shape[1:])
)
tensor_scalar = _returning(vector.tensor_scalar, dtype=_step_dtype)
tensor_tensor = _returning(vector.tensor_tensor, "data1 data2", dtype=_pair_dtype)
tensor_tensor_scan = _returning(vector_reductions.tensor_tensor_scan, "data0 data1", dtype=_scan_dtype)
tensor_scalar_cumulative = vector_reductions.tensor_scalar_cumulative


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None) -> NkiTensor:
    checks.engine("reciprocal", engine, "vector", "scalar")
    return activation("reciprocal", data, dtype=dtype, mask=mask)


def tensor_scalar_reduce(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any,
    reverse0: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    function = _returning(vector.tensor_scalar_reduce, dtype=_step_dtype)
    return function(data, op0, operand0, reduce_op, reduce_res, reverse0, dtype=dtype, mask=mask)


# Results with another shape or another mask than an operand


def tensor_reduce(
    op: Any, data: Any, axis: Any, *, mask: Any = None, dtype: Any = None, negate: bool = False, keepdims: bool = False
) -> NkiTensor:
    data = checks.on_chip(data, "data").with_mask(mask)
    axes, shape = vector_reductions.reduced_shape(data, axis, keepdims)
    target = result(shape, dtype or data.dtype)
    if data.mask is not None:
        rows = np.broadcast_to(data.mask, data.shape).any(axis=axes, keepdims=True)
        target = target.with_mask(rows.reshape(shape))
    vector_reductions.tensor_reduce(target, op, data, axis, negate, keepdims)
    return target


def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    data = _trimmed(checks.on_chip(data, "data"), mask)
    target = result((data.shape[0], 6), dtype or data.dtype)
    vector_reductions.bn_stats(target, data)
    return target


def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    data = _trimmed(checks.on_chip(data, "data"), mask)
    target = result((data.shape[0], 2), dtype or data.dtype)
    vector_reductions.bn_aggr(target, data)
    return target


def _trimmed(data: NkiTensor, mask: Any) -> NkiTensor:
    """Returns the box of a tile's elements that a mask selects."""
    if mask is None:
        return data
    bounds = box(np.broadcast_to(np.asarray(mask, np.bool_), data.shape))
    if bounds is None:
        raise NkiValueError("err_mask_shape", "the mask of this instruction has to show a box")
    return data[tuple(slice(a, b) for a, b in bounds)]


def local_gather(
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    *,
    mask: Any = None,
) -> NkiTensor:
    data, index = checks.on_chip(src_buffer, "src_buffer"), checks.on_chip(index, "index")
    shape = gpsimd.gathered_shape(data, index, num_elem_per_idx, num_valid_indices)
    target = result(shape, data.dtype, mask=mask)
    gpsimd.local_gather(target, data, index, num_elem_per_idx, num_valid_indices)
    return target


def nc_match_replace8(
    *, data: Any, vals: Any, imm: Any, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> NkiTensor:
    data = checks.on_chip(data, "data")
    if dst_idx is not None and mask is not None:
        rows = np.broadcast_to(np.asarray(mask, np.bool_), data.shape).reshape(data.shape[0], -1).any(1)
        dst_idx = dst_idx.with_mask(rows.reshape(-1, *(1,) * (dst_idx.ndim - 1)))
    target = result(data.shape, dtype or data.dtype)
    vector_searches.nc_match_replace8(target, data.with_mask(mask), vals, imm, dst_idx)
    return target


def nc_matmul(
    stationary: Any,
    moving: Any,
    *,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    tile_position: Any = (),
    tile_size: Any = (),
    mask: Any = None,
    perf_mode: Any = None,
) -> NkiTensor:
    a, b = checks.on_chip(stationary, "stationary"), checks.on_chip(moving, "moving")
    shape = tensor.product_shape(a, b, perf_mode)
    target = result(shape, a.dtype if is_transpose else float32, mask=_product_mask(mask, a, b, shape), buffer=PSUM)
    tensor.nc_matmul(
        target,
        _masked_operand(a, mask),
        _masked_operand(b, mask),
        is_stationary_onezero,
        is_moving_onezero,
        is_transpose,
        False,
        tile_position,
        tile_size,
        perf_mode,
    )
    return target


def _masked_operand(operand: NkiTensor, mask: Any) -> NkiTensor:
    try:
        return operand.with_mask(mask)
    except NkiValueError:
        return operand


def _product_mask(mask: Any, a: NkiTensor, b: NkiTensor, shape: tuple[int, int]) -> Any:
    """Returns the part of a product's mask that fits the product or one of its operands."""
    if mask is None:
        return None
    shown = np.asarray(mask, np.bool_)
    for wanted, rows in ((a.shape, True), (b.shape, False)):
        if shown.ndim == len(wanted) and all(n in (1, w) for n, w in zip(shown.shape, wanted, strict=True)):
            full = np.broadcast_to(shown, wanted).any(axis=0).reshape(-1)
            return full[:, None] if rows else full[None, :]
    try:
        return np.broadcast_to(shown, shape)
    except ValueError:
        raise NkiValueError(
            "err_mask_shape",
            f"a mask of shape {shown.shape} fits neither stationary {a.shape}, nor moving {b.shape}, nor the product {shape}",
        ) from None


def nc_transpose(data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> NkiTensor:
    data = checks.on_chip(data, "data")
    rows, shown = data.shape[0], data.with_mask(mask).mask
    if shown is not None:
        shown = np.broadcast_to(shown, data.shape).reshape(rows, -1).T
    buffer = SBUF if getattr(engine, "name", engine) == "vector" else PSUM
    target = result((data.size // rows, rows), dtype or data.dtype, mask=shown, buffer=buffer)
    tensor.nc_transpose(target, data, engine)
    return target


def dma_transpose(
    src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None, dge_mode: Any = None, oob_mode: Any = None
) -> NkiTensor:
    _, shape = dma.transposed_shape(src, axes)
    target = result(shape, dtype or src.dtype, mask=mask)
    dma.dma_transpose(target, src, axes, dge_mode=dge_mode, oob_mode=oob_mode)
    return target


def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = None) -> NkiTensor:
    target = result(tuple(shape), dtype, mask=mask)
    vector.memset(target, value, engine)
    return target


def iota(expr: Any, dtype: Any, *, mask: Any = None) -> NkiTensor:
    """Returns a tile with the values of an index expression."""
    values = np.asarray(whole_array(expr), np.int64)
    if values.ndim < 2:
        raise NkiValueError(
            "err_1d_arange_not_supported", "an index expression of one dimension; add an axis: nl.arange(n)[:, None]"
        )
    target = result(values.shape, dtype or int32, mask=mask)
    found = affine(values)
    if found is None:
        constant = tensors.whole(current().constant(values.astype(np.int32), int32))
        emit("assign", [constant], [target], False)
    else:
        emit("iota", [], [target], (values.shape, found[1]), (found[0],))
    return target


def affine_select(
    pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None
) -> NkiTensor:
    """Keeps the elements for which a comparison of index expressions is true."""
    data = checks.on_chip(on_true_tile, "on_true_tile")
    shown = np.broadcast_to(np.asarray(whole_array(pred), np.bool_), data.shape)
    target = result(data.shape, dtype or data.dtype, [data], mask)
    constant = tensors.whole(current().constant(np.ascontiguousarray(shown), boolean))
    fixed = gpsimd.fixed_number(on_false_value)
    emit("select", [constant, data], [target], (None, float(fixed) if is_float(data.dtype) else fixed, False, None))
    return target


def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> NkiTensor:
    vector.copies(engine, src, src)
    return copied(src, dtype, mask=mask)


def tensor_copy_dynamic_src(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> NkiTensor:
    target = result(src.shape, dtype or src.dtype, [src], mask)
    vector.tensor_copy(target, src, engine)
    return target


# Results with a destination


def _masked(dst: NkiTensor, mask: Any, dtype: Any) -> NkiTensor:
    """Returns a destination with a mask; refuses a dtype that differs from the destination's."""
    if dtype is not None and dtype_of(dtype) != dst.dtype:
        raise NkiTypeError("err_unsupported_dtype", f"dtype is {dtype_of(dtype)}, and the destination {dst.dtype}")
    return dst.with_mask(mask)


def dma_copy(
    *,
    dst: Any,
    src: Any,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = None,
    dge_mode: Any = None,
    engine: Any = None,
    unique_indices: bool = True,
) -> None:
    dst, src = checks.as_tile(dst, "dst"), checks.as_tile(src, "src")
    if mask is not None:
        src = src.with_mask(mask) if src.shape == dst.shape else src
        dst = dst.with_mask(mask)
    dma.dma_copy(dst, src, None, oob_mode, dge_mode, engine, dst_rmw_op, unique_indices)


def nc_stream_shuffle(src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None) -> None:
    gpsimd.nc_stream_shuffle(_masked(dst, mask, dtype), src, shuffle_mask)


def select_reduce(
    *,
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_op: Any = np.amax,
    reverse_pred: bool = False,
    mask: Any = None,
    dtype: Any = None,
) -> None:
    target, predicate = _masked(dst, mask, dtype), predicate.with_mask(mask)
    vector.select_reduce(target, predicate, on_true, on_false, reduce_res, reduce_cmd, reduce_op, reverse_pred)


def tensor_copy_dynamic_dst(*, dst: Any, src: Any, mask: Any = None, dtype: Any = None, engine: Any = None) -> None:
    vector.tensor_copy(_masked(dst, mask, dtype), src, engine)


def tensor_copy_predicated(
    *, src: Any, dst: Any, predicate: Any, reverse_pred: bool = False, mask: Any = None, dtype: Any = None
) -> None:
    vector.tensor_copy_predicated(_masked(dst, mask, dtype), src, predicate, reverse_pred)
