"""nki.isa of `nki`: instructions write to `dst`. `modules` adds a parameter for the instruction's name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import int32, is_float, uint32
from nki_interpreter.elementwise import op_name
from nki_interpreter.errors import NkiError
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
from nki_interpreter.isa.constants import GENERATIONS, engine, nc_version, needs, oob_mode
from nki_interpreter.isa.constants import reduce_cmd as _command
from nki_interpreter.operators import assign, number
from nki_interpreter.program import REGISTERS, Exchange, current, recording
from nki_interpreter.tensors import NkiTensor, new

dge_mode = constants.newer_dge_mode
matmul_perf_mode = constants.matmul_perf_mode
reduce_cmd = _command
tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown


class NkiValidationError(NkiError):
    """A rule of an instruction is broken."""


class VirtualRegister:
    """A number that is known at run time."""

    def __init__(self, state: Any = None) -> None:
        self._tensor = new((1, 1), int32, REGISTERS, name="register")
        register_move(self, 0 if state is None else state)

    def register_tensor(self) -> NkiTensor:
        return self._tensor


def get_nc_version() -> nc_version:
    """Returns the oldest generation among the kernel's targets."""
    return min(GENERATIONS[t] for t in current().targets) if recording() else nc_version.gen3


def get_nc_sub_version() -> int:
    return 0


def register_alloc(x: Any = None) -> VirtualRegister:
    if isinstance(x, NkiTensor):
        made = VirtualRegister()
        register_load(made, x)
        return made
    return VirtualRegister(x)


def register_move(dst: VirtualRegister, src: Any) -> None:
    assign(dst.register_tensor(), src.register_tensor() if isinstance(src, VirtualRegister) else src)


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    if src.dynamic:
        checks.static_address("register_load")
    assign(dst.register_tensor(), _bits(src))


def register_store(dst: NkiTensor, src: Any) -> None:
    if dst.on_chip:
        needs(nc_version.gen3, f"register_store to {dst.buffer}")
    if isinstance(src, VirtualRegister):
        assign(_bits(dst), src.register_tensor())
    else:
        assign(dst, src)


def _bits(tensor: NkiTensor) -> NkiTensor:
    """Returns a u32 tensor's bits as i32: a register holds 32 bits."""
    return tensor.view(int32) if tensor.dtype == uint32 else tensor


def dma_copy(
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: Any = oob_mode.error,
    dge_mode: Any = None,
    engine: Any = None,
    dst_rmw_op: Any = None,
    unique_indices: bool = True,
) -> None:
    checks.priority(priority)
    dma.dma_copy(
        dst,
        src,
        oob_mode=oob_mode,
        dge_mode=dge_mode,
        engine=engine,
        dst_rmw_op=dst_rmw_op,
        unique_indices=unique_indices,
    )


def tensor_copy(dst: Any, src: Any, engine: Any = None) -> None:
    vector.tensor_copy(dst, src, engine=engine)


def memset(dst: Any, value: Any, engine: Any = None) -> None:
    vector.memset(dst, value, engine=engine)


def tensor_copy_predicated(dst: Any, src: Any, predicate: Any, reverse_pred: bool = False) -> None:
    vector.tensor_copy_predicated(dst, src, predicate, reverse_pred)
    checks.dtype(predicate, "predicate", np.uint8, np.uint16, np.uint32, np.bool_)
    checks.equal_dtypes(dst, src, "dst of tensor_copy_predicated")


def nc_matmul(
    dst: Any,
    stationary: Any,
    moving: Any,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: Any = None,
) -> None:
    tensor.nc_matmul(
        dst,
        stationary,
        moving,
        is_stationary_onezero=is_stationary_onezero,
        is_moving_onezero=is_moving_onezero,
        is_transpose=is_transpose,
        accumulate=accumulate,
        perf_mode=perf_mode,
        tile_position=tile_position,
        tile_size=tile_size,
    )


def nc_transpose(dst: Any, data: Any, engine: Any = None) -> None:
    tensor.nc_transpose(dst, data, engine=engine)
    if dst.buffer.kind != "psum":  # PSUM has rules by target
        checks.equal_dtypes(dst, data, "dst of nc_transpose")


def dma_transpose(
    dst: Any,
    src: Any,
    axes: Any = None,
    priority: Any = None,
    dge_mode: Any = None,
    oob_mode: Any = None,
) -> None:
    checks.priority(priority)
    dma.dma_transpose(dst, src, axes, dge_mode=dge_mode, oob_mode=oob_mode)
    checks.equal_dtypes(dst, src, "dst of dma_transpose")


def tensor_tensor(dst: Any, data1: Any, data2: Any, op: Any, engine: Any = None) -> None:
    vector.tensor_tensor(dst, data1, data2, op, engine=engine)


def tensor_scalar(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: bool = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Any = None,
) -> None:
    vector.tensor_scalar(dst, data, op0, operand0, reverse0, op1, operand1, reverse1, engine=engine)


def tensor_reduce(dst: Any, op: Any, data: Any, axis: Any, negate: bool = False, keepdims: bool = False) -> None:
    vector_reductions.tensor_reduce(dst, op, data, axis, negate, keepdims)


def tensor_partition_reduce(dst: Any, op: Any, data: Any) -> None:
    vector_reductions.tensor_partition_reduce(dst, op, data)


def tensor_scalar_cumulative(
    dst: Any,
    src: Any,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: Any = _command.reset_reduce,
) -> None:
    vector_reductions.tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1, reduce_cmd)
    vector.arithmetic_only("tensor_scalar_cumulative", op0, op1)


def activation(
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = _command.idle,
) -> None:
    _bias(bias)
    checks.one_per_partition(reduce_res, "reduce_res")
    scalar.activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: Any, op: Any, data: Any, reduce_op: Any, reduce_res: Any, bias: Any = None, scale: Any = 1.0
) -> None:
    _bias(bias)
    checks.one_per_partition(reduce_res, "reduce_res")
    scalar.activation(dst, op, data, bias, scale, reduce_op, reduce_res, _command.reset_reduce)


def _bias(bias: Any) -> None:
    """Requires a vector as bias on gen2, or 0."""
    if bias is not None and number(bias):
        needs(nc_version.gen3, "a number as bias of activation")


def activate2(
    dst: Any,
    op: Any,
    data: Any,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = _command.idle,
) -> None:
    needs(nc_version.gen4, "activate2")
    scalar.activate2(
        dst, op, data, imm0, imm1, op0, op1, relu_param, reverse0, reverse1, reduce_op, reduce_res, reduce_cmd
    )


def exponential(
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = _command.idle,
    reduce_init: Any = 0.0,
) -> None:
    needs(nc_version.gen4, "exponential")
    scalar.exponential(dst, src, max_value, reduce_res, reduce_cmd, reduce_init)


def reciprocal(dst: Any, data: Any) -> None:
    scalar.activation(dst, "reciprocal", data)


def iota(dst: Any, pattern: Any, offset: int = 0, channel_multiplier: int = 0) -> None:
    gpsimd.iota(dst, pattern, offset, channel_multiplier)


def affine_select(
    dst: Any,
    pattern: Any,
    channel_multiplier: int,
    on_true_tile: Any,
    on_false_value: Any,
    cmp_op: Any = "equal",
    offset: int = 0,
) -> None:
    gpsimd.affine_select(dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op, offset)


def local_gather(
    dst: Any,
    src_buffer: Any,
    index: Any,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
) -> None:
    gpsimd.local_gather(dst, src_buffer, index, num_elem_per_idx, num_valid_indices)
    checks.dtype(index, "index of local_gather", np.uint16)
    checks.equal_dtypes(dst, src_buffer, "dst of local_gather")


def nc_n_gather(dst: Any, data: Any, indices: Any) -> None:
    gpsimd.gather_flattened(dst, data, indices)
    checks.dtype(indices, "indices", np.uint32)
    checks.equal_dtypes(dst, data, "dst of nc_n_gather")
    checks.in_sbuf("nc_n_gather", dst, data, indices)


def bn_stats(dst: Any, data: Any) -> None:
    vector_reductions.bn_stats(dst, data)


def bn_aggr(dst: Any, data: Any) -> None:
    vector_reductions.bn_aggr(dst, data)


def tensor_tensor_scan(
    dst: Any,
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    vector_reductions.tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0, reverse1)


def nc_stream_shuffle(dst: Any, src: Any, shuffle_mask: Any) -> None:
    gpsimd.nc_stream_shuffle(src, dst, shuffle_mask)
    checks.equal_dtypes(dst, src, "dst of nc_stream_shuffle")


def rng(dst: Any, engine: Any = None) -> None:
    vector.random(checks.on_chip(dst, "dst"), engine=engine)
    checks.dtype(dst, "dst of rng", np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32)


def rand2(dst: Any, min: Any, max: Any) -> None:
    needs(nc_version.gen4, "rand2")
    vector.random(checks.on_chip(dst, "dst"))
    low, high = number(min), number(max)
    if low is None or high is None:
        raise NkiError("err_immediate_expected", "rand2 takes numbers as bounds here")
    vector.tensor_scalar(dst, dst, np.multiply, float(high - low), op1=np.add, operand1=float(low))


def set_rng_seed(src_seeds: Any) -> None:
    checks.on_chip(src_seeds, "src_seeds")
    checks.dtype(src_seeds, "src_seeds", np.int32, np.uint32, np.float32)
    if current().check and src_seeds.size != 1:
        raise NkiError("err_shape_mismatch", f"src_seeds has the shape (1, 1), not {src_seeds.shape}")
    current().notes.append("set_rng_seed is ignored: random numbers come from the kernel's own seed")


def dropout(dst: Any, data: Any, prob: Any) -> None:
    vector.dropout(dst, data, prob)
    checks.equal_dtypes(dst, data, "dst of dropout")


def max8(dst: Any, src: Any) -> None:
    vector_searches.max8(dst, src)


def sequence_bounds(dst: Any, segment_ids: Any) -> None:
    vector_searches.sequence_bounds(dst, segment_ids)
    for tile, what in ((dst, "dst of sequence_bounds"), (segment_ids, "segment_ids")):
        checks.dtype(tile, what, np.float32, np.int32)


def scalar_tensor_tensor(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    vector.scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0, reverse1)


def tensor_scalar_reduce(
    dst: Any,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any = None,
    reverse0: bool = False,
    reduce_cmd: Any = _command.reset_reduce,
    reduce_init: Any = None,
    reduce_res_negate: bool = False,
) -> None:
    vector.tensor_scalar_reduce(dst, data, op0, operand0, reduce_op, reduce_res, reverse0, reduce_cmd, reduce_init)
    if reduce_res_negate and reduce_res is not None:
        vector.tensor_scalar(reduce_res, reduce_res, np.multiply, -1.0)


def dma_compute(
    dst: Any,
    srcs: Any,
    reduce_op: Any,
    scales: Any = None,
    unique_indices: bool = True,
    oob_mode: Any = None,
) -> None:
    dma.dma_compute(dst, srcs, reduce_op, scales, unique_indices, oob_mode)


def range_select(
    dst: Any,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = _command.reset_reduce,
    reduce_res: Any = None,
    reduce_op: Any = np.maximum,
    range_start: Any = 0,
    on_false_value: Any = None,
) -> None:
    vector.range_select(
        dst,
        on_true_tile,
        comp_op0,
        comp_op1,
        bound0,
        bound1,
        reduce_cmd,
        reduce_res,
        reduce_op,
        range_start,
        None if on_false_value is ... else on_false_value,
    )
    if current().check and not is_float(on_true_tile.dtype):
        raise NkiError("err_unsupported_dtype", f"on_true_tile of range_select is a float, not {on_true_tile.dtype}")
    _only_max("range_select", reduce_op)
    for op in (comp_op0, comp_op1):
        if current().check and op_name(op) not in ("equal", "less", "less_equal", "greater", "greater_equal"):
            raise NkiError("err_unsupported_op", f"range_select compares, it does not compute {op_name(op)}")


def select_reduce(
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = _command.idle,
    reduce_op: Any = np.maximum,
    reverse_pred: bool = False,
) -> None:
    vector.select_reduce(dst, predicate, on_true, on_false, reduce_res, reduce_cmd, reduce_op, reverse_pred)
    checks.dtype(predicate, "predicate", np.int8, np.uint8, np.int16, np.uint16, np.bool_)
    _only_max("select_reduce", reduce_op)
    if current().check and on_true.dtype in (int32, uint32):
        raise NkiError("err_unsupported_dtype", f"on_true of select_reduce can't be {on_true.dtype}")


def _only_max(what: str, reduce_op: Any) -> None:
    if current().check and op_name(reduce_op) not in ("maximum", "max"):
        raise NkiError("err_unsupported_op", f"{what} reduces to the maximum, not by {op_name(reduce_op)}")


def nc_find_index8(dst: Any, data: Any, vals: Any) -> None:
    vector_searches.nc_find_index8(dst, data, vals)


def nc_match_replace8(dst: Any, data: Any, vals: Any, imm: Any, dst_idx: Any = None) -> None:
    vector_searches.nc_match_replace8(dst, data, vals, imm, dst_idx)


def nonzero_with_count(dst: Any, src: Any, index_offset: int = 0, padding_val: int = -1) -> None:
    gpsimd.nonzero_with_count(dst, src, index_offset, padding_val)
    checks.in_sbuf("nonzero_with_count", dst, src)
    checks.dtype(src, "src of nonzero_with_count", np.float32, np.int32)
    checks.dtype(dst, "dst of nonzero_with_count", np.int32)


def topk(val_dst: Any, idx_dst: Any, src: Any, n: int) -> None:
    gpsimd.topk(val_dst, idx_dst, src, n)


def core_barrier(data: Any = None, cores: Any = None, engine: Any = None) -> None:
    needs(nc_version.gen3, "core_barrier")
    if data is not None:
        checks.in_hbm(data, "what a barrier is for")
    checks.engine("core_barrier", engine, "tensor", "vector", "scalar", "gpsimd", "sync")
    _every_program(cores)
    current().exchange(Exchange("barrier"))


def _every_program(cores: Any) -> None:
    programs = math.prod(current().grid)
    if cores is not None and current().check and programs > 1 and sorted(map(int, cores)) != list(range(programs)):
        raise NkiError("err_barrier_cores", f"the cores of a barrier are all {programs} of the grid, not {cores}")


def sendrecv(
    src: Any,
    dst: Any,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: Any = 0,
    dma_engine: Any = None,
    use_gpsimd_dma: bool = False,
) -> None:
    needs(nc_version.gen3, "sendrecv")
    by_gpsimd = use_gpsimd_dma or getattr(dma_engine, "name", "dma") == "gpsimd_dma"
    if current().check and by_gpsimd and any(t.buffer.kind != "sbuf" for t in (src, dst)):
        raise NkiError("err_unsupported_memory", "GpSimd's DMA sends from SBUF to SBUF only")
    if number(pipe_id) is None:
        raise NkiError("err_immediate_expected", f"pipe_id is a number, not {type(pipe_id).__name__}")
    checks.in_sbuf("sendrecv", src, dst)
    checks.equal_dtypes(dst, src, "dst of sendrecv")
    current().exchange(Exchange("sendrecv", src, dst, int(send_to_rank), int(recv_from_rank)))
