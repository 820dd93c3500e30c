"""nki.isa of `nki`: the instructions by engine, registers, and the exchange between programs.

Instructions write to `dst`. `modules` adds a parameter for the instruction's name.
"""

# ruff: noqa: F401  # kernels import these names

from __future__ import annotations

import math
from typing import Any

from nki_interpreter import checks
from nki_interpreter.dtypes import int32, uint32
from nki_interpreter.errors import NkiError, NkiTypeError
from nki_interpreter.isa import constants
from nki_interpreter.isa.constants import GENERATIONS, engine, matmul_perf_mode, nc_version, needs, reduce_cmd
from nki_interpreter.isa.dma import dma_compute, dma_copy, dma_transpose
from nki_interpreter.isa.gpsimd import (
    affine_select,
    iota,
    local_gather,
    nc_n_gather,
    nc_stream_shuffle,
    nonzero_with_count,
    topk,
)
from nki_interpreter.isa.scalar import activate2, activation, activation_reduce, exponential, reciprocal
from nki_interpreter.isa.tensor import nc_matmul, nc_transpose
from nki_interpreter.isa.vector import (
    dropout,
    memset,
    rand2,
    range_select,
    rng,
    scalar_tensor_tensor,
    select_reduce,
    set_rng_seed,
    tensor_copy,
    tensor_copy_predicated,
    tensor_scalar,
    tensor_scalar_reduce,
    tensor_tensor,
)
from nki_interpreter.isa.vector_reductions import (
    bn_aggr,
    bn_stats,
    tensor_partition_reduce,
    tensor_reduce,
    tensor_scalar_cumulative,
    tensor_tensor_scan,
)
from nki_interpreter.isa.vector_searches import max8, nc_find_index8, nc_match_replace8, sequence_bounds
from nki_interpreter.operators import assign, number
from nki_interpreter.program import REGISTERS, Exchange, current, recording
from nki_interpreter.tensors import NkiTensor, new

dge_mode, oob_mode = constants.newer_dge_mode, constants.oob_mode
tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine, dma_engine = engine.gpsimd, engine.unknown, constants.dma_engine


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


def core_barrier(data: Any = None, cores: Any = None, engine: Any = None) -> None:
    needs(nc_version.gen3, "core_barrier")
    if data is not None:
        checks.in_hbm(data, "what a barrier is for")
    checks.engine("core_barrier", engine, "tensor", "vector", "scalar", "gpsimd", "sync")
    programs = math.prod(current().grid)
    if cores is not None and programs > 1 and sorted(map(int, cores)) != list(range(programs)):
        raise NkiError("err_barrier_cores", f"the cores of a barrier are all {programs} of the grid, not {cores}")
    current().exchange(Exchange("barrier"))


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
    if by_gpsimd and any(t.buffer.kind != "sbuf" for t in (src, dst)):
        raise NkiTypeError("err_unsupported_memory", "GpSimd's DMA sends from SBUF to SBUF only")
    if number(pipe_id) is None:
        raise NkiTypeError("err_immediate_expected", f"pipe_id is a number, not {type(pipe_id).__name__}")
    checks.in_sbuf("sendrecv", src, dst)
    checks.equal_dtypes(dst, src, "dst of sendrecv")
    current().exchange(Exchange("sendrecv", src, dst, int(send_to_rank), int(recv_from_rank)))
