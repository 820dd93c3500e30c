"""DMA: copies between memories, with indices known at run time, read-modify-write and transposes."""

from __future__ import annotations

from typing import Any

from nki_interpreter import checks
from nki_interpreter.dtypes import uint32
from nki_interpreter.elementwise import op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lower import Context, lowering, to_float
from nki_interpreter.operators import apply_binary, emit
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor

_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


@lowering("rmw")
def _lower_rmw(context: Context, instruction: Instruction) -> None:
    name, checked = instruction.attributes
    (target,) = instruction.writes
    source = instruction.reads[0]
    if checked:
        context.check_indices(target, f"{instruction.file}:{instruction.line}")
    old, inside = context.read_checked(target)
    new, ok = context.read_checked(source)
    value = apply_binary(name, to_float(old), to_float(new.reshape(target.shape)))
    if inside is not None:
        ok = inside if ok is None else ok & inside
    context.write(target, value, ok)


def _skips(oob_mode: Any) -> bool:
    """Returns whether a DMA skips elements with an index out of range; otherwise they are an error."""
    return getattr(oob_mode, "name", "error") == "skip"


def _descriptors(dge_mode: Any, engine: Any = None) -> None:
    """Checks the generator of a DMA's descriptors: it has no effect on values, but not every target has every generator."""
    mode = getattr(dge_mode, "name", "unknown")
    if mode == "hwdge":
        needs(nc_version.gen3, "dge_mode hwdge")
    if checks.engine("a DMA's descriptor generation", engine, "sync", "scalar") != "unknown" and mode != "hwdge":
        raise NkiValueError("err_dma_engine", f"dma_copy takes an engine with dge_mode hwdge only, not with {mode}")


def _unique(unique_indices: Any) -> None:
    if not unique_indices:
        raise NkiValueError(
            "err_unique_indices",
            "unique_indices=False is not supported: a read-modify-write of an element that several indices name loses values; "
            "make the indices unique",
        )


def _scattered() -> None:
    """Notes the device's behaviour for a read-modify-write at addresses known only at run time."""
    current().note(
        "trn2 was seen to hang in a read-modify-write whose indices are out of range, which oob_mode skip is meant for, or repeat; "
        "give it indices that are inside and unique"
    )


def dma_copy(
    dst: Any,
    src: Any,
    priority: Any = None,
    oob_mode: Any = None,
    dge_mode: Any = None,
    engine: Any = None,
    dst_rmw_op: Any = None,
    unique_indices: bool = True,
) -> None:
    """Copies elements in order; only their number must agree. `oob_mode` skip leaves out elements with an index out of range."""
    dst, src = checks.as_tile(dst, "dst"), checks.as_tile(src, "src")
    checks.priority(priority)
    _descriptors(dge_mode, engine)
    _unique(unique_indices)
    if dst.size != src.size:
        raise NkiValueError(
            "err_dma_size_mismatch", f"dst has shape {dst.shape} and src {src.shape}: the numbers of elements differ"
        )
    if not current().older and "psum" in (dst.buffer.kind, src.buffer.kind):
        raise NkiTypeError("err_unsupported_memory", "dma_copy can't access PSUM; use tensor_copy")
    checks.dma_source(src)
    is_checked = not _skips(oob_mode)
    if dst_rmw_op is not None:
        if dst.dynamic and not current().older:
            _scattered()
        emit("rmw", [src, dst], [dst], (op_name(dst_rmw_op), is_checked))
        return
    is_reshaped = src.shape != dst.shape and src.valid is None and src.mask is None
    emit("assign", [src], [dst], is_checked and not (is_reshaped and not src.dynamic and not dst.dynamic))


def _transposable(src: NkiTensor, mode: str) -> None:
    """Checks the source against AWS's documentation of dma_transpose, by the generator of the descriptors."""
    rules: list[tuple[bool, str]] = []
    if src.dynamic:
        indices = [dynamic.index for dynamic in src.dynamic]
        rules = [
            (mode != "hwdge", "dge_mode unknown or swdge"),
            (not src.on_chip, "a source in HBM"),
            (src.itemsize == 2, "a dtype of 2 bytes"),
            (src.shape[-1] <= checks.PARTITIONS, f"at most {checks.PARTITIONS} elements in the last dimension"),
            (src.shape[0] % 16 == 0, "a multiple of 16 rows"),
            (all(i.dtype == uint32 and i.on_chip for i in indices), "indices of uint32 in SBUF"),
        ]
    elif mode == "hwdge":
        rules = [
            (src.shape[0] == 16, "16 rows"),
            (src.shape[-1] % 128 == 0, "a multiple of 128 elements in the last dimension"),
            (src.itemsize == 2, "a dtype of 2 bytes"),
        ]
    else:
        rules = [(mode != "swdge", "dge_mode unknown, none or hwdge")]
    missing = [text for holds, text in rules if not holds]
    if missing:
        what = "of rows that a tile names" if src.dynamic else f"with dge_mode {mode}"
        raise NkiValueError("err_dma_transpose", f"dma_transpose {what} takes {', '.join(missing)}; src is {src!r}")


def transposed_shape(src: NkiTensor, axes: Any = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the fixed permutation for a number of dimensions, 2-D (1,0), 3-D (2,1,0), 4-D (3,1,2,0), and the result's shape."""
    wanted = _AXES.get(src.ndim)
    order = wanted if axes is None else tuple(int(a) for a in axes)
    if order is None or order != wanted:
        raise NkiValueError(
            "err_dma_transpose_axes", f"dma_transpose of {src.ndim} dimensions has the axes {wanted}, not {order}"
        )
    return order, tuple(src.shape[i] for i in order)


def dma_transpose(
    dst: Any, src: Any, axes: Any = None, priority: Any = None, dge_mode: Any = None, oob_mode: Any = None
) -> None:
    """Transposes with a fixed permutation (`transposed_shape`)."""
    src = checks.as_tile(src, "src")
    checks.priority(priority)
    _descriptors(dge_mode)
    if not current().older:
        if src.on_chip:
            needs(nc_version.gen3, "dma_transpose from SBUF, not from HBM,")
        if src.dynamic:
            needs(nc_version.gen3, "dma_transpose of rows that a tile names (DmaGatherTranspose)")
        _transposable(src, getattr(dge_mode, "name", "unknown"))
    skips = _skips(oob_mode)
    if skips and not src.dynamic:
        raise NkiValueError("err_oob_mode", "dma_transpose takes oob_mode skip only with indices known at run time")
    order, shape = transposed_shape(src, axes)
    if dst.size != src.size:
        raise NkiValueError("err_shape_mismatch", f"the destination has shape {dst.shape}, and the result {shape}")
    checks.equal_dtypes(dst, src, "dst of dma_transpose")
    emit("transpose", [src], [dst], (order, not skips))


@lowering("dma_compute")
def _lower_dma_compute(context: Context, instruction: Instruction) -> None:
    (target,) = instruction.writes
    if instruction.attributes:
        for tensor in (*instruction.reads, target):
            context.check_indices(tensor, f"{instruction.file}:{instruction.line}")
    total = None
    ok = None
    for source in instruction.reads:
        value, inside = context.read_checked(source)
        value = to_float(value).reshape(target.shape)
        total = value if total is None else total + value
        if inside is not None:
            inside = inside.reshape(target.shape)
            ok = inside if ok is None else ok & inside
    context.write(target, total, ok)


MOST_SOURCES = 16


def dma_compute(
    dst: Any, srcs: Any, reduce_op: Any, scales: Any = None, unique_indices: bool = True, oob_mode: Any = None
) -> None:
    """Adds the sources in float32.

    `reduce_op` must be add and every scale 1.0: AWS's documentation has no others yet.
    """
    dst = checks.as_tile(dst, "dst")
    sources = [checks.as_tile(s, "a source") for s in srcs]
    if op_name(reduce_op) != "add":
        raise NkiValueError(
            "err_unsupported_op", f"dma_compute takes nl.add as reduce_op only, not '{op_name(reduce_op)}'"
        )
    factors = [float(s) for s in scales] if scales is not None else [1.0] * len(sources)
    if len(factors) != len(sources) or any(factor != 1.0 for factor in factors):
        raise NkiValueError(
            "err_dma_scales",
            f"dma_compute takes scales of 1.0, one per source, not {factors}; multiply with tensor_scalar before",
        )
    _unique(unique_indices)
    if len(sources) > MOST_SOURCES:
        raise NkiValueError("err_dma_sources", f"dma_compute takes {MOST_SOURCES} sources at most, not {len(sources)}")
    if len(sources) != 2 and any(t.dynamic for t in (dst, *sources)):
        raise NkiValueError(
            "err_dma_sources", f"dma_compute with indices known at run time takes 2 sources, not {len(sources)}"
        )
    for source in sources:
        if source.size != dst.size:
            raise NkiValueError("err_dma_size_mismatch", f"dst has shape {dst.shape} and a source {source.shape}")
    emit("dma_compute", sources, [dst], not _skips(oob_mode))
