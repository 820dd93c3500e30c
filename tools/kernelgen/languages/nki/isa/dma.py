"""DMA: copies between memories, with indices known at run time, read-modify-write and transposes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelgen.languages.nki import checks
from kernelgen.languages.nki.elementwise import op_name
from kernelgen.languages.nki.errors import NkiTypeError, NkiValueError
from kernelgen.languages.nki.isa.tensor import transpose_axes
from kernelgen.languages.nki.lower import Context, lowering, to_float
from kernelgen.languages.nki.operators import apply_binary, assign, emit, result
from kernelgen.languages.nki.program import Instruction, current
from kernelgen.languages.nki.tensors import Tensor

_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def _tensor(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise NkiTypeError("err_operand_not_tile", f"{what} has to be a tensor, not {type(value).__name__}")
    return value


@lowering("rmw")
def _lower_rmw(context: Context, instruction: Instruction) -> None:
    (target,) = instruction.writes
    source = instruction.reads[0]
    context.check_indices(target, f"{instruction.file}:{instruction.line}")
    old, inside = context.read_checked(target)
    new, ok = context.read_checked(source)
    value = apply_binary(str(instruction.attributes), to_float(old), to_float(new.reshape(target.shape)))
    if inside is not None:
        ok = inside if ok is None else ok & inside
    context.write(target, value, ok)


def dma_copy(dst: Tensor, src: Tensor, *, mask: Any = None, dst_rmw_op: Any = None, oob_mode: Any = None) -> Tensor:
    """Copies elements in order; only their number has to agree. `oob_mode` skip leaves alone what an index out of range names."""
    dst = _tensor(dst, "dst")
    src = _tensor(src, "src")
    if dst.size != src.size:
        raise NkiValueError(
            "err_dma_size_mismatch", f"dst has shape {dst.shape} and src {src.shape}: the numbers of elements differ"
        )
    if current().check and not current().older and "psum" in (dst.buffer.kind, src.buffer.kind):
        raise NkiTypeError("err_unsupported_memory", "dma_copy can't access PSUM; use tensor_copy")
    checks.dma_source(src)
    if dst_rmw_op is not None:
        emit("rmw", [src, dst], [dst.with_mask(mask)], op_name(dst_rmw_op))
        return dst
    skips = getattr(oob_mode, "name", "error") == "skip"
    target = dst.with_mask(mask)
    if src.shape != dst.shape and src.valid is None and src.mask is None and not src.dynamic and not dst.dynamic:
        emit("assign", [src], [target], False)
        return dst
    emit("assign", [src if mask is None or src.shape != dst.shape else src.with_mask(mask)], [target], not skips)
    return dst


def dma_transpose(dst: Tensor | None, src: Any, axes: Any = None, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """2-D (1,0), 3-D (2,1,0), 4-D (3,1,2,0)."""
    src = _tensor(src, "src")
    wanted = _AXES.get(src.ndim)
    order = wanted if axes is None else tuple(int(a) for a in axes)
    if wanted is None or (order != wanted and current().check):
        raise NkiValueError(
            "err_dma_transpose_axes", f"dma_transpose of {src.ndim} dimensions has the axes {wanted}, not {order}"
        )
    return transpose_axes(dst, src, order or wanted, dtype, mask)


@lowering("dma_compute")
def _lower_dma_compute(context: Context, instruction: Instruction) -> None:
    name, scales = instruction.attributes
    (target,) = instruction.writes
    total = None
    ok = None
    for source, scale in zip(instruction.reads, scales, strict=True):
        value, inside = context.read_checked(source)
        value = to_float(value).reshape(target.shape)
        value = value if scale == 1.0 else value * np.float32(scale)
        total = value if total is None else apply_binary(name, total, value)
        if inside is not None:
            ok = inside if ok is None else ok & inside
    context.write(target, total, ok)


def dma_compute(dst: Tensor, srcs: Any, reduce_op: Any, scales: Any = None) -> Tensor:
    """`reduce_op` over `srcs[i] · scales[i]`."""
    dst = _tensor(dst, "dst")
    sources = [_tensor(s, "a source") for s in srcs]
    factors = tuple(float(s) for s in scales) if scales is not None else (1.0,) * len(sources)
    for source in sources:
        if source.size != dst.size:
            raise NkiValueError("err_dma_size_mismatch", f"dst has shape {dst.shape} and a source {source.shape}")
    emit("dma_compute", sources, [dst], (op_name(reduce_op), factors))
    return dst


def load(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Returns a new tile in SBUF with what a tensor in HBM holds."""
    src = checks.in_hbm(src, "what is loaded").with_mask(mask)
    shape = src.shape if src.ndim > 1 else (src.shape[0], 1) if src.ndim else (1, 1)
    tile = result(shape, dtype or src.dtype)
    assign(tile, src, checked=True)
    shown = src.mask if src.valid is None else src.valid if src.mask is None else src.mask & src.valid
    if shown is not None:
        full = np.broadcast_to(shown, src.shape).reshape(shape)
        tile = tile.with_mask(full)
    return tile


def store(dst: Any, value: Any, *, mask: Any = None) -> None:
    """Writes a tile to a tensor in HBM."""
    dst = checks.in_hbm(dst, "where a tile is stored")
    assign(dst, value, mask=mask, checked=True)


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    src = checks.in_hbm(src, "what is loaded")
    if src.ndim != 2:
        raise NkiValueError("err_tensor_rank", f"load_transpose2d takes 2 dimensions, not {src.shape}")
    source = src.with_mask(mask)
    shown = source.mask if source.valid is None else source.valid if source.mask is None else source.mask & source.valid
    checks.inside(source)
    tile = result((src.shape[1], src.shape[0]), dtype or src.dtype)
    if shown is not None:
        tile = tile.with_mask(np.broadcast_to(shown, src.shape).T)
    emit("transpose", [source], [tile], (1, 0))
    return tile
