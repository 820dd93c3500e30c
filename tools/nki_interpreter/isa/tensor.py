"""The tensor engine: products and transposes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import float32
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import destination
from nki_interpreter.isa.constants import GENERATIONS, nc_version, needs
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, fitted, lowering, masked, to_float
from nki_interpreter.operators import accumulate as accumulated
from nki_interpreter.operators import accumulation, emit
from nki_interpreter.program import PSUM, Instruction, Origin, current
from nki_interpreter.tensors import NkiTensor
from nki_interpreter.written import flags


def product(stationary: Any, moving: Any) -> Any:
    """Returns `stationary.T @ moving` in float32; it first widens float8 and integer operands, without loss."""
    a, b = (_widened(v) for v in (stationary, moving))
    if a.dtype != b.dtype:
        a, b = to_float(a), to_float(b)
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=np.float32)


def _widened(value: Any) -> Any:
    if value.dtype.itemsize == 1 and jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.bfloat16)
    return value if jnp.issubdtype(value.dtype, jnp.floating) else to_float(value)


@lowering("matmul")
def _lower_matmul(context: Context, instruction: Instruction) -> Any:
    mode, double, _ = instruction.attributes
    a, b = (masked(context.read(t), t, 0) for t in instruction.reads[:2])
    if double:
        a = jnp.moveaxis(a, 1, 0).reshape((-1, math.prod(a.shape[2:])))
        b = jnp.moveaxis(b, 1, 0).reshape((-1, math.prod(b.shape[2:])))
    (target,) = instruction.writes
    value = product(a.reshape((a.shape[0], -1)), b.reshape((b.shape[0], -1))).reshape(target.shape)
    return value if mode == "set" else accumulated(context.read(target), value, mode)


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
    """Computes `stationary.T @ moving`, contracted over at most 128 partitions, into PSUM.

    With `accumulate` None, it adds to elements that were written before and overwrites the others. In the mode
    double_row, the operands are [K, 2, …], and it contracts both rows. The flag for operands of only ones and zeros
    makes float32 faster on a device; it changes no value.
    """
    a, b = checks.on_chip(stationary, "stationary"), checks.on_chip(moving, "moving")
    double = is_double_row(perf_mode)
    if double:
        needs(nc_version.gen3, "perf_mode double_row")
        if a.shape[1] != 2 or b.shape[1] != 2:
            raise NkiValueError("err_double_row", f"double_row takes [K, 2, …], not {a.shape} and {b.shape}")
    _array_tile(a, tile_position, tile_size, double)
    checks.matmul(a, b, dst, double=double)
    target = destination(dst, product_shape(a, b, perf_mode))
    if is_transpose:
        _transposed(b, target)
    else:
        checks.product_result(target)
    checks.psum_bank(target)
    mode = accumulation(target, accumulate)
    if mode != "set":
        _sum(target, accumulate)
    _chain(target, accumulate, mode)
    hint = bool(is_stationary_onezero or is_moving_onezero)
    emit("matmul", [a, b, *([] if mode == "set" else [target])], [target], (mode, double, hint))


def is_double_row(perf_mode: Any) -> bool:
    return getattr(perf_mode, "value", perf_mode) in ("double_row", "double_row_gen3", "double_row_swinterleave")


def product_shape(stationary: NkiTensor, moving: NkiTensor, perf_mode: Any) -> tuple[int, int]:
    rows = 2 if is_double_row(perf_mode) else 1
    return math.prod(stationary.shape[1:]) // rows, math.prod(moving.shape[1:]) // rows


def _array_tile(a: NkiTensor, position: Any, size: Any, double: bool) -> None:
    """Checks a part of the 128×128 array: 32, 64 or 128 rows and columns that start at a multiple of their number.

    Raises:
        NkiValueError: the part is invalid, or the operands don't fit in it.
    """
    if bool(position) != bool(size):
        raise NkiValueError("err_tile_position_and_size", "tile_position and tile_size are given both or not at all")
    if not position:
        return
    if double and not current().older and int(size[1]) != checks.PARTITIONS:
        raise NkiValueError(
            "err_double_row", f"double_row takes all 128 columns of the array, not a tile_size of {size}"
        )
    starts, sizes = (tuple(int(n) for n in given) for given in (position, size))
    needed = (a.shape[0], math.prod(a.shape[1:]) // (2 if double else 1))
    if (
        len(starts) != 2
        or len(sizes) != 2
        or any(
            n not in (32, 64, 128) or at % n or not 0 <= at < checks.PARTITIONS or wants > n
            for at, n, wants in zip(starts, sizes, needed, strict=True)
        )
    ):
        raise NkiValueError(
            "err_tile_position_and_size",
            f"tile_size {sizes} at tile_position {starts} is not a part of the array for a stationary tile of {needed[0]} rows and "
            f"{needed[1]} columns: both are 32, 64 or 128, start at a multiple of that, and hold the tile",
        )
    if sizes[0] == 32:
        needs(nc_version.gen3, "a tile_size of 32 rows")


def _transposed(data: NkiTensor, target: NkiTensor) -> None:
    """Checks a transpose's dtype: gen2's tensor engine writes F32, later generations write the input's dtype.

    Without a target, either is allowed.
    """
    recorder = current()
    if recorder.older or target.buffer.kind != "psum":
        return
    wanted = {t: float32 if GENERATIONS[t] <= nc_version.gen2 else data.dtype for t in recorder.targets}
    wrong = [t for t, dtype in wanted.items() if dtype != target.dtype]
    if wrong and (recorder.targets_given or len(wrong) == len(wanted)):
        raise NkiTypeError(
            "err_transpose_dtype",
            f"a transpose of {data.dtype} into PSUM is {wanted[wrong[0]]} on {wrong[0]}, not {target.dtype}; "
            "float32 on both sides is right on every target",
        )


def _sum(target: NkiTensor, wanted: bool | None) -> None:
    """Checks that a product is only added to earlier products in PSUM.

    AWS's documentation of nc_matmul: a product can't be added to memory that was never written, nor, before
    NeuronCore-v4, to data of another instruction. Without `accumulate`, a sum with zeros only causes a note: AWS's own
    kernels do it, and overwriting zeros gives the same result as adding to them.

    Raises:
        NkiValueError: the product would be added to other data.
    """
    recorder = current()
    if recorder.older:
        return
    origin = flags(target, "origin")
    found = {Origin(number) for number in np.unique(origin).tolist()} - {Origin.TENSOR_ENGINE}
    if wanted is None:
        found.discard(Origin.NOTHING)  # these elements are overwritten
    if all(GENERATIONS[t] >= nc_version.gen4 for t in recorder.targets):
        found &= {Origin.NOTHING}
    if found == {Origin.ZEROS} and wanted is None:
        _note_chain("an instruction that is not a product put zeros there")
    elif found:
        what = "nothing was written there" if Origin.NOTHING in found else "another instruction wrote there"
        raise NkiValueError(
            "err_psum_accumulate",
            f"the product is added to a tile in PSUM, and {what}; the device's result is undefined. Give accumulate=False for the "
            "first product of a sum, and add other data afterwards with tensor_tensor",
        )


def _chain(target: NkiTensor, wanted: bool | None, mode: Any) -> None:
    """Notes sums of products that a device was observed to compute differently, without an error.

    A product without `accumulate` may be added to another chain's sum, and chains in one tensor may lose parts of their sums.
    """
    recorder, storage = current(), target.storage
    if recorder.older:
        return
    if wanted is None:
        if storage.finished:
            _note_chain("its tile in PSUM was read before")
        elif isinstance(storage.written, np.ndarray) and mode == "set":
            _note_chain("several sums share one tensor in PSUM")
    if storage.finished or storage.sums is None:
        storage.sums = set()
    storage.sums.add((target.offset, target.dims))
    if wanted and len(storage.sums) > 1:
        recorder.note(
            "several sums share one tensor in PSUM, and devices have lost parts of such sums; give each a tensor of its own"
        )
    storage.finished = False


def _note_chain(why: str) -> None:
    current().note(
        f"nc_matmul leaves accumulate out, and {why}; give accumulate=False for the first product of a sum and True for the others"
    )


@lowering("transpose")
def _lower_transpose(context: Context, instruction: Instruction) -> None:
    order, checked = instruction.attributes
    (source,), (target,) = instruction.reads, instruction.writes
    if checked:
        context.check_indices(source, f"{instruction.file}:{instruction.line}")

    def turned(value: Any) -> Any:
        if order is None:
            return fitted(lax.transpose(value.reshape((value.shape[0], -1)), (1, 0)), target)
        return fitted(lax.transpose(value, order), target)

    value, inside = context.read_checked(source)
    context.write(target, turned(value), None if inside is None else turned(inside))


def nc_transpose(dst: Any, data: Any, engine: Any = None) -> None:
    """Swaps partitions and flattened free dimensions: at most 128×128 on the tensor engine, 32×32 on the vector engine."""
    data = checks.on_chip(data, "data")
    rows, columns = data.shape[0], math.prod(data.shape[1:])
    name = checks.engine("nc_transpose", engine, "tensor", "vector")
    limit = 32 if name == "vector" else checks.PARTITIONS
    if rows > limit or columns > limit:
        raise NkiValueError(
            "err_size_of_dimension_exceed_arch_limit",
            f"nc_transpose takes {limit}×{limit} elements, not {rows}×{columns}",
        )
    target = destination(dst, (columns, rows))
    if target.buffer is not PSUM:  # PSUM has rules by target
        checks.equal_dtypes(target, data, "dst of nc_transpose")
    if name != "vector":
        checks.psum_bank(target)
        _transposed(data, target)
    emit("transpose", [data], [target], (None, False))
