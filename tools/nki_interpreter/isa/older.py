"""nki.isa of `neuronxcc.nki`: instructions return tiles and take `mask` and `dtype`. `modules` adds a parameter for the name."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import dtype_of
from nki_interpreter.errors import NkiTypeError
from nki_interpreter.isa import (
    constants,
    dma,
    gpsimd,
    scalar,
    tensor,
    vector,
    vector_reductions,
    vector_searches,
)
from nki_interpreter.isa.constants import GENERATIONS, engine, nc_version, oob_mode, reduce_cmd
from nki_interpreter.operators import copied
from nki_interpreter.program import current, recording
from nki_interpreter.tensors import NkiTensor

dge_mode = constants.older_dge_mode
matmul_perf_mode = constants.matmul_perf_mode
tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine, dma_engine = engine.gpsimd, engine.unknown, engine.dma
_FP32_MIN = float(np.finfo(np.float32).min)


def get_nc_version() -> nc_version:
    """Returns the oldest generation among the kernel's targets."""
    return min(GENERATIONS[t] for t in current().targets) if recording() else nc_version.gen3


def _as_destination(dst: NkiTensor, dtype: Any) -> None:
    """Refuses a dtype that differs from the destination's."""
    if dtype is not None and dtype_of(dtype) != dst.dtype and current().check:
        raise NkiTypeError("err_unsupported_dtype", f"dtype is {dtype_of(dtype)}, and the destination {dst.dtype}")


def activation(
    op: Any,
    data: Any,
    *,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = reduce_cmd.idle,
    mask: Any = None,
    dtype: Any = None,
) -> NkiTensor:
    return scalar.activation(None, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd, dtype=dtype, mask=mask)


def activation_reduce(
    op: Any,
    data: Any,
    *,
    reduce_op: Any,
    reduce_res: Any,
    bias: Any = None,
    scale: Any = 1.0,
    mask: Any = None,
    dtype: Any = None,
) -> NkiTensor:
    command = constants.reduce_cmd.reset_reduce
    return scalar.activation(None, op, data, bias, scale, reduce_op, reduce_res, command, dtype=dtype, mask=mask)


def affine_select(
    pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None
) -> NkiTensor:
    return gpsimd.affine_select_predicate(pred, on_true_tile, on_false_value, dtype, mask)


def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    return vector_reductions.bn_aggr(None, data, dtype=dtype, mask=mask)


def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    return vector_reductions.bn_stats(None, data, dtype=dtype, mask=mask)


def dma_copy(
    *,
    dst: Any,
    src: Any,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = None,
    engine: Any = None,
    unique_indices: bool = True,
) -> None:
    dma.dma_copy(
        dst,
        src,
        mask=mask,
        dst_rmw_op=dst_rmw_op,
        oob_mode=oob_mode,
        dge_mode=dge_mode,
        engine=engine,
        unique_indices=unique_indices,
    )


def dma_transpose(
    src: Any,
    *,
    axes: Any = None,
    mask: Any = None,
    dtype: Any = None,
    dge_mode: Any = None,
    oob_mode: Any = None,
) -> NkiTensor:
    return dma.dma_transpose(None, src, axes, dtype=dtype, mask=mask, dge_mode=dge_mode, oob_mode=oob_mode)


def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    return vector.dropout(None, data, prob, dtype=dtype, mask=mask)


def iota(expr: Any, dtype: Any, *, mask: Any = None) -> NkiTensor:
    return gpsimd.iota_expression(expr, dtype, mask)


def local_gather(
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    *,
    mask: Any = None,
) -> NkiTensor:
    return gpsimd.local_gather(None, src_buffer, index, num_elem_per_idx, num_valid_indices, mask=mask)


def max8(*, src: Any, mask: Any = None, dtype: Any = None) -> NkiTensor:
    return vector_searches.max8(None, src, dtype=dtype, mask=mask)


def memset(shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = None) -> NkiTensor:
    return vector.memset(None, value, shape=shape, dtype=dtype, mask=mask, engine=engine)


def nc_find_index8(*, data: Any, vals: Any, mask: Any = None, dtype: Any = None) -> NkiTensor:
    return vector_searches.nc_find_index8(None, data, vals, dtype=dtype, mask=mask)


def nc_match_replace8(
    *, data: Any, vals: Any, imm: Any, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> NkiTensor:
    return vector_searches.nc_match_replace8(None, data, vals, imm, dst_idx, dtype=dtype, mask=mask)


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
    return tensor.nc_matmul(
        None,
        stationary,
        moving,
        is_stationary_onezero=is_stationary_onezero,
        is_moving_onezero=is_moving_onezero,
        is_transpose=is_transpose,
        accumulate=False,
        perf_mode=perf_mode,
        tile_position=tile_position,
        tile_size=tile_size,
        mask=mask,
    )


def nc_stream_shuffle(src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None) -> None:
    _as_destination(dst, dtype)
    gpsimd.nc_stream_shuffle(src, dst, shuffle_mask, mask=mask)


def nc_transpose(data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> NkiTensor:
    return tensor.nc_transpose(None, data, dtype=dtype, mask=mask, engine=engine)


def range_select(
    *,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = reduce_cmd.idle,
    reduce_res: Any = None,
    reduce_op: Any = np.amax,
    range_start: Any = 0,
    on_false_value: Any = _FP32_MIN,
    mask: Any = None,
    dtype: Any = None,
) -> NkiTensor:
    return vector.range_select(
        None,
        on_true_tile,
        comp_op0,
        comp_op1,
        bound0,
        bound1,
        reduce_cmd,
        reduce_res,
        reduce_op,
        range_start,
        on_false_value,
        dtype=dtype,
        mask=mask,
    )


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None) -> NkiTensor:
    checks.engine("reciprocal", engine, "vector", "scalar")
    return scalar.activation(None, "reciprocal", data, dtype=dtype, mask=mask)


def scalar_tensor_tensor(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    return vector.scalar_tensor_tensor(
        None, data, op0, operand0, op1, operand1, reverse0, reverse1, dtype=dtype, mask=mask
    )


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
    _as_destination(dst, dtype)
    vector.select_reduce(dst, predicate, on_true, on_false, reduce_res, reduce_cmd, reduce_op, reverse_pred, mask=mask)


def sequence_bounds(*, segment_ids: Any, dtype: Any = None) -> NkiTensor:
    return vector_searches.sequence_bounds(None, segment_ids, dtype=dtype)


def tensor_copy(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> NkiTensor:
    vector.copies(engine, src, src)
    return copied(src, dtype, mask=mask)


def tensor_copy_dynamic_src(src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = None) -> NkiTensor:
    return vector.tensor_copy(None, src, dtype=dtype, mask=mask, engine=engine)


def tensor_copy_dynamic_dst(*, dst: Any, src: Any, mask: Any = None, dtype: Any = None, engine: Any = None) -> None:
    _as_destination(dst, dtype)
    vector.tensor_copy(dst, src, mask=mask, engine=engine)


def tensor_copy_predicated(
    *, src: Any, dst: Any, predicate: Any, reverse_pred: bool = False, mask: Any = None, dtype: Any = None
) -> None:
    _as_destination(dst, dtype)
    vector.tensor_copy_predicated(dst, src, predicate, reverse_pred, mask=mask)


def tensor_partition_reduce(op: Any, data: Any, *, mask: Any = None, dtype: Any = None) -> NkiTensor:
    return vector_reductions.tensor_partition_reduce(None, op, data, dtype=dtype, mask=mask)


def tensor_reduce(
    op: Any,
    data: Any,
    axis: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
    negate: bool = False,
    keepdims: bool = False,
) -> NkiTensor:
    return vector_reductions.tensor_reduce(None, op, data, axis, negate, keepdims, dtype=dtype, mask=mask)


def tensor_scalar(
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
    engine: Any = None,
) -> NkiTensor:
    return vector.tensor_scalar(
        None, data, op0, operand0, reverse0, op1, operand1, reverse1, dtype=dtype, mask=mask, engine=engine
    )


def tensor_scalar_cumulative(
    *,
    src: Any,
    dst: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = reduce_cmd.reset_reduce,
) -> None:
    vector_reductions.tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1, reduce_cmd)


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
    return vector.tensor_scalar_reduce(
        None, data, op0, operand0, reduce_op, reduce_res, reverse0, dtype=dtype, mask=mask
    )


def tensor_tensor(
    data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = None
) -> NkiTensor:
    return vector.tensor_tensor(None, data1, data2, op, dtype=dtype, mask=mask, engine=engine)


def tensor_tensor_scan(
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    return vector_reductions.tensor_tensor_scan(
        None, data0, data1, initial, op0, op1, reverse0, reverse1, dtype=dtype, mask=mask
    )
