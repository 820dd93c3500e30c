"""The computations of nki.language on tiles: elementwise operations, reductions, copies, assignments. The isa modules use them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from nki_interpreter import checks, tensors
from nki_interpreter.dtypes import boolean, dtype_of, float32, int32, is_float, promoted
from nki_interpreter.elementwise import BINARY, BITWISE, COMPARISONS, REDUCTIONS, UNARY, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError, kernel_location
from nki_interpreter.lazy import jnp, lax
from nki_interpreter.lower import Context, bits, lowering, masked, to_float
from nki_interpreter.program import PRODUCTS, PSUM, SBUF, Buffer, Instruction, Origin, current
from nki_interpreter.tensors import NkiTensor, in_register, provides
from nki_interpreter.written import flags, mark_written, put


def emit(
    op: str,
    reads: Sequence[NkiTensor],
    writes: Sequence[NkiTensor],
    attributes: Hashable = (),
    integers: tuple[Any, ...] = (),
) -> None:
    """Records an instruction; the tensors in `writes` must be writable."""
    for tensor in writes:
        if not tensor.storage.mutable:
            checks.writable(tensor)
        mark_written(tensor)
        if tensor.storage.origin is not None and not current().older:
            put(tensor, "origin", _origin(op, attributes))
    for tensor in reads:
        if tensor.valid is not None:
            checks.inside(tensor)
    for tensor in writes:
        if tensor.valid is not None:
            checks.inside(tensor)
    file, line = kernel_location()
    current().record(Instruction(op, tuple(reads), tuple(writes), attributes, integers, file, line))


def _origin(op: str, attributes: Hashable) -> Origin:
    if op in PRODUCTS or op == "transpose":
        return Origin.TENSOR_ENGINE
    return Origin.ZEROS if op == "fill" and attributes == 0 else Origin.OTHER


def result(
    shape: Any, dtype: Any, like: Sequence[NkiTensor] = (), mask: Any = None, buffer: Buffer = SBUF
) -> NkiTensor:
    """Returns a new tile for the result of an instruction.

    The older generation keeps such tiles in float32 until the kernel stores them in declared memory; the newer one
    rounds them.
    """
    recorder = current()
    declared = dtype_of(dtype)
    value_dtype = float32 if recorder.older and is_float(declared) else declared
    tile = tensors.new(shape, declared, buffer, value_dtype=value_dtype)
    checks.tile(tile)
    shown = None
    for other in like:
        if other.mask is not None:
            part = np.broadcast_to(other.mask, other.shape)
            if part.shape == tile.shape or np.broadcast_shapes(part.shape, tile.shape) == tile.shape:
                shown = part if shown is None else shown & part
    if shown is not None:
        tile = tile.with_mask(shown)
    return tile if mask is None else tile.with_mask(mask)


def number(value: Any) -> float | int | None:
    """Returns the Python number for a number or a scalar array, None for anything else."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        item = value.item()
        return item if isinstance(item, int | float) else float(value)
    return None


def scalar_dtype(value: Any) -> np.dtype[Any]:
    if isinstance(value, np.generic):
        return dtype_of(value.dtype)
    return int32 if isinstance(value, int) else float32


# Elementwise operations


def apply_vector(name: str, a: Any, b: Any, itemsize: int) -> Any:
    """Computes an operation as the vector engine does: on bit patterns of `itemsize` bytes, or in float32.

    AWS's documentation of nki.isa: arithmetic operators cast their operands to float32; bitvec operators do not cast,
    and right_shift is logical.
    """
    if name in BITWISE:
        return BINARY[name](bits(a, itemsize), bits(b, itemsize))
    return BINARY[name](to_float(a), to_float(b))


def apply_binary(name: str, a: Any, b: Any) -> Any:
    """Computes an operation as nki.language and GpSimd do: on integers if both operands are integers, else in float32."""
    if name in BITWISE:
        if name == "right_shift":
            a = bits(a, a.dtype.itemsize)
        return BINARY[name](*_same_ints(a, b))
    if not any(jnp.issubdtype(v.dtype, jnp.floating) for v in (a, b)) and name not in (
        "divide",
        "power",
        "rsqrt",
        "average",
    ):
        return BINARY[name](*_same_ints(a, b))
    return BINARY[name](to_float(a), to_float(b))


def _same_ints(a: Any, b: Any) -> tuple[Any, Any]:
    wide = (a.dtype if a.dtype.itemsize == 4 else None) if a.dtype == b.dtype and a.dtype != np.bool_ else None
    if wide is None:
        unsigned = a.dtype == np.uint32 or b.dtype == np.uint32
        wide = np.dtype(np.uint32) if unsigned else np.dtype(np.int32)
    return lax.convert_element_type(a, wide), lax.convert_element_type(b, wide)


def apply_unary(name: str, a: Any) -> Any:
    if name == "invert":
        return ~a
    if name == "copy":
        return a
    if name in ("abs", "negative", "square", "sign", "relu") and not jnp.issubdtype(a.dtype, jnp.floating):
        return UNARY[name](lax.convert_element_type(a, np.int32) if a.dtype.itemsize < 4 else a)
    return UNARY[name](to_float(a))


def immediate(value: float | int) -> Any:
    if isinstance(value, bool | int):
        return jnp.asarray(value, np.uint32 if value > 0x7FFFFFFF else np.int32)
    return jnp.asarray(value, np.float32)


@lowering("binary")
def _lower_binary(context: Context, instruction: Instruction) -> None:
    name, left, right = instruction.attributes
    values = iter(instruction.reads)
    a = context.read(next(values)) if left is None else immediate(left)
    b = context.read(next(values)) if right is None else immediate(right)
    context.write(instruction.writes[0], apply_binary(name, a, b), exact=name in BITWISE)


@lowering("unary")
def _lower_unary(context: Context, instruction: Instruction) -> Any:
    return apply_unary(str(instruction.attributes), context.read(instruction.reads[0]))


def broadcast_shape(*operands: NkiTensor) -> tuple[int, ...]:
    """Returns the shape of a result. The newer generation broadcasts free dimensions only.

    Raises:
        NkiValueError: the shapes can't be broadcast together.
    """
    try:
        shape = np.broadcast_shapes(*(t.shape for t in operands))
    except ValueError:
        raise NkiValueError(
            "err_cannot_broadcast", f"shapes {', '.join(str(t.shape) for t in operands)} can't be broadcast together"
        ) from None
    checks.partitions_agree(operands, shape)
    return tuple(shape)


@provides("binary")
def binary(op: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> Any:
    """Returns `x op y` as a new tile; an operand can be a number."""
    name = op_name(op)
    x, y = (_operand(v) for v in (x, y))
    tiles = [v for v in (x, y) if isinstance(v, NkiTensor)]
    if not tiles:
        return getattr(np, name)(x, y)  # numbers and index arrays, computed while a kernel is recorded
    if dtype is None:
        kinds = [v.dtype if isinstance(v, NkiTensor) else scalar_dtype(v) for v in (x, y)]
        dtype = promoted(*kinds)
        if name in COMPARISONS:
            dtype = boolean if current().older else tiles[0].dtype
        elif name in ("divide", "power") and not is_float(dtype):
            dtype = float32
        elif len(tiles) == 1 and (is_float(tiles[0].dtype) or (name in BITWISE and tiles[0].dtype.itemsize == 4)):
            dtype = tiles[0].dtype
    for tile in tiles:
        checks.operand_on_chip(tile, name)
    made = result(broadcast_shape(*tiles), dtype, tiles, mask)
    left, right = (None if isinstance(v, NkiTensor) else number(v) for v in (x, y))
    emit("binary", tiles, [made], (name, left, right))
    return made


def _operand(value: Any) -> Any:
    if hasattr(value, "register_tensor"):
        return value.register_tensor()
    if isinstance(value, np.ndarray) and value.ndim:
        return tensors.whole(current().constant(np.asarray(value), dtype_of(value.dtype)))
    return value


@provides("unary")
def unary(op: Any, x: Any, *, dtype: Any = None, mask: Any = None) -> NkiTensor:
    """Returns `op(x)` as a new tile."""
    name = op_name(op)
    x = _operand(x)
    if not isinstance(x, NkiTensor):
        x = in_register(x)
    checks.operand_on_chip(x, name)
    if dtype is None:
        dtype = x.dtype
        if name == "logical_not":
            dtype = boolean if current().older else x.dtype
        elif not is_float(dtype) and name not in ("copy", "abs", "negative", "square", "sign", "relu", "invert"):
            dtype = float32
    made = result(x.shape, dtype, [x], mask)
    emit("unary", [x], [made], name)
    return made


@provides("copied")
def copied(x: NkiTensor, dtype: Any = None, *, mask: Any = None, buffer: Buffer = SBUF) -> NkiTensor:
    made = result(x.shape, dtype or x.dtype, [x], mask, buffer)
    emit("unary", [x], [made], "copy")
    return made


# Assignments


@lowering("assign")
def _lower_assign(context: Context, instruction: Instruction) -> None:
    (target,) = instruction.writes
    (source,) = instruction.reads
    value, ok = context.read_checked(source)
    if value.shape != target.shape:
        value = value.reshape(target.shape) if value.size == target.size else jnp.broadcast_to(value, target.shape)
        ok = None if ok is None else ok.reshape(target.shape)
    if instruction.attributes:
        file_line = f"{instruction.file}:{instruction.line}"
        context.check_indices(source, file_line)
        context.check_indices(target, file_line)
    context.write(target, value, ok)


@lowering("fill")
def _lower_fill(context: Context, instruction: Instruction) -> None:
    (target,) = instruction.writes
    value = np.asarray(instruction.attributes)
    context.write(target, jnp.full(target.shape, value.astype(_fill_dtype(value, target.dtype))))


def _fill_dtype(value: Any, dtype: np.dtype[Any]) -> np.dtype[Any]:
    if is_float(dtype) or value.dtype.kind == "f":
        return float32
    return dtype


def _fits(target: NkiTensor, source: NkiTensor) -> NkiTensor:
    """Copies the source's mask to the target; the two shapes may differ in dimensions of size 1."""
    if source.mask is None:
        return target
    shown = np.broadcast_to(source.mask, source.shape)
    if shown.shape != target.shape:
        if shown.size != target.size:
            return target
        shown = shown.reshape(target.shape)
    return target.with_mask(shown)


@provides("assign")
def assign(target: NkiTensor, value: Any, *, mask: Any = None, checked: bool = False) -> None:
    """Writes a tile or a number to a view; masked elements of the view keep their values."""
    target = target.with_mask(mask)
    fixed = number(value)
    if fixed is not None:
        emit("fill", [], [target], float(fixed) if is_float(target.dtype) else fixed)
        return
    value = _operand(value)
    source = checks.as_tile(value, "what is assigned")
    if (
        source.storage is target.storage
        and source.dims == target.dims
        and source.offset == target.offset
        and source.gather is target.gather is None
        and not source.dynamic
    ):
        return
    if source.size != target.size:
        try:
            np.broadcast_to(np.empty(source.shape), target.shape)
        except ValueError:
            raise NkiValueError(
                "err_shape_mismatch", f"a tensor of shape {source.shape} can't be assigned to one of {target.shape}"
            ) from None
    target = _fits(target, source)
    if source.valid is not None and source.size == target.size:
        # Elements outside the source are not assigned.
        target = target.with_mask(np.broadcast_to(source.valid, source.shape).reshape(target.shape))
        source = source.replaced(mask=source.valid if source.mask is None else source.mask & source.valid)
    if target.mask is not None and source.shape == target.shape:
        source = source.with_mask(target.mask)
    emit("assign", [source], [target], checked or bool(source.dynamic or target.dynamic))


@lowering("accumulate")
def _lower_accumulate(context: Context, instruction: Instruction) -> None:
    (target,) = instruction.writes
    value = context.read(instruction.reads[0])
    if value.shape != target.shape:
        value = jnp.broadcast_to(value, target.shape)
    context.write(target, accumulate(context.read(target), to_float(value), instruction.attributes))


def accumulate(old: Any, value: Any, mode: Any) -> Any:
    """Adds values to PSUM: "set" overwrites, "add" adds, a mask (shape and bytes) adds to the elements that it shows."""
    if mode == "set":
        return value
    if mode == "add":
        return to_float(old) + value
    shape, packed = mode
    adds = np.unpackbits(np.frombuffer(packed, np.uint8), count=math.prod(shape)).reshape(shape).astype(np.bool_)
    return value + jnp.where(adds, to_float(old), np.float32(0))


def accumulation(target: NkiTensor, wanted: bool | None = None) -> Any:
    """Returns the mode of a product's write to PSUM (see `accumulate`): the product overwrites elements that were never written."""
    if wanted is not None:
        return "add" if wanted else "set"
    storage = target.storage
    if storage.written is None or storage.written is True:
        return "add"
    if storage.written is False:
        return "set"
    written = storage.written if target.size == storage.size else flags(target)
    if written.all():
        return "add"
    if not written.any():
        return "set"
    return (target.shape, np.packbits(written).tobytes())


@provides("accumulated")
def accumulated(target: NkiTensor, value: Any) -> Any:
    """Computes `target += value`: in place in PSUM, otherwise as a new tile."""
    if target.buffer is not PSUM or not isinstance(value, NkiTensor) or target.shape != value.shape:
        return binary("add", target, value)
    mode = accumulation(target)
    emit("accumulate", [value, *([] if mode == "set" else [target])], [_fits(target, value)], mode)
    return target


# Reductions


def reduce_values(name: str, value: Any, axes: tuple[int, ...]) -> Any:
    """Reduces values over axes, which keep size 1; sums and products of floats are computed in float32."""
    if name not in REDUCTIONS:
        raise NkiTypeError("err_unsupported_op", f"'{name}' does not reduce")
    if name.startswith("bitwise"):
        functions = {"bitwise_and": lax.bitwise_and, "bitwise_or": lax.bitwise_or, "bitwise_xor": lax.bitwise_xor}
        neutral = np.asarray(REDUCTIONS[name]).astype(value.dtype)
        reduced = lax.reduce(value, neutral, functions[name], axes)
        return jnp.expand_dims(reduced, axes)
    if jnp.issubdtype(value.dtype, jnp.floating):
        value = to_float(value)
    elif value.dtype.itemsize < 4:
        value = value.astype(np.int32)
    if name == "add":
        return jnp.sum(value, axis=axes, keepdims=True, dtype=value.dtype)
    if name == "multiply":
        return jnp.prod(value, axis=axes, keepdims=True, dtype=value.dtype)
    if name == "maximum":
        return jnp.max(value, axis=axes, keepdims=True)
    if name == "minimum":
        return jnp.min(value, axis=axes, keepdims=True)
    if name == "abs_max":
        return jnp.max(jnp.abs(value), axis=axes, keepdims=True)
    if name == "logical_and":
        return jnp.all(value != 0, axis=axes, keepdims=True)
    return jnp.any(value != 0, axis=axes, keepdims=True)


def neutral_of(name: str, dtype: Any) -> Any:
    """Returns the neutral element of a reduction in a dtype."""
    value = REDUCTIONS.get(name, 0)
    dtype = np.dtype(dtype)
    if name == "bitwise_and" and dtype.kind == "u":
        return np.iinfo(dtype).max
    if not is_float(dtype) and dtype != boolean and math.isinf(value):
        info = np.iinfo(dtype)
        return info.max if value > 0 else info.min
    return value


@lowering("reduce")
def _lower_reduce(context: Context, instruction: Instruction) -> None:
    name, axes, negate, mean, vector = instruction.attributes
    (source,) = instruction.reads
    value = context.read(source)
    bitwise = name in BITWISE
    if vector:
        value = bits(value, value.dtype.itemsize) if bitwise else to_float(value)
    value = masked(value, source, neutral_of(name, value.dtype))
    reduced = reduce_values(name, value, axes)
    if mean:
        reduced = to_float(reduced) / np.float32(mean)
    if negate:
        reduced = -reduced
    target = instruction.writes[0]
    context.write(target, reduced.reshape(target.shape), exact=bitwise)


def free_axes(tile: NkiTensor, axis: Any) -> tuple[int, ...]:
    """Returns the axes of a reduction, sorted. They must be free axes.

    Raises:
        NkiValueError: an axis is the partition axis, or the tile has no such axis.
    """
    given = [axis] if isinstance(axis, int | np.integer) else list(axis)
    found = []
    for one in given:
        place = int(one) + tile.ndim if one < 0 else int(one)
        if not 0 <= place < tile.ndim:
            raise NkiValueError("err_invalid_axis", f"axis {one} is not an axis of a tile of {tile.ndim} dimensions")
        if place == 0:
            raise NkiValueError(
                "err_unsupported_reduce_axis", "axis 0 is the partition axis; engines reduce over free axes"
            )
        found.append(place)
    return tuple(sorted(set(found)))


def reduction(
    op: Any, x: NkiTensor, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False, mean: bool = False
) -> NkiTensor:
    """Returns a tile reduced over free axes; the result has at least two dimensions."""
    x = checks.as_tile(x, "what is reduced")
    checks.operand_on_chip(x, "a reduction")
    axes = free_axes(x, axis)
    name = op_name(op)
    kept = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    shape = kept if keepdims else tuple(n for i, n in enumerate(kept) if i not in axes)
    shape = shape if len(shape) > 1 else (*shape, 1)
    if dtype is None:
        dtype = float32 if mean and not is_float(x.dtype) else x.dtype
    made = result(shape, dtype)
    source = x.with_mask(mask)
    if source.mask is not None:
        rows = np.broadcast_to(source.mask, x.shape).any(axis=axes, keepdims=True)
        made = made.with_mask(rows.reshape(shape))
    count = math.prod(x.shape[i] for i in axes) if mean else 0
    emit("reduce", [source], [made], (name, axes, False, count, False))
    return made
