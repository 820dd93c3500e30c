"""nki.language of both generations: memory, loops, grids, and mathematics on tiles."""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nki_interpreter import checks, operators, tensors
from nki_interpreter.devices import DEVICES
from nki_interpreter.dtypes import boolean, dtype_of, float32, is_float, promoted
from nki_interpreter.elementwise import BINARY, UNARY
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.indices import DynamicSlice, IndexArray, MGrid, arange, index_array
from nki_interpreter.isa import older, vector
from nki_interpreter.program import (
    HBM,
    PRIVATE_HBM,
    PSUM,
    SBUF,
    SHARED_HBM,
    Buffer,
    NkiLoopIndex,
    Origin,
    current,
    recording,
)
from nki_interpreter.tensors import NkiTensor
from nki_interpreter.written import mark_written

# Memory and dtypes

sbuf, psum, hbm, private_hbm, shared_hbm = SBUF, PSUM, HBM, PRIVATE_HBM, SHARED_HBM
float16, int8, int16, int32 = np.float16, np.int8, np.int16, np.int32
uint8, uint16, uint32, bool_ = np.uint8, np.uint16, np.uint32, np.bool_
bfloat16 = ml_dtypes.bfloat16
float8_e4m3, float8_e5m2, float8_e4m3fn = ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn
# Packed dtypes are names here, because kernels compare them; `dtype_of` returns the dtype that stores them.
float8_e4m3fn_x4, float8_e5m2_x4, float4_e2m1fn_x4 = "float8_e4m3fn_x4", "float8_e5m2_x4", "float4_e2m1fn_x4"
mgrid = MGrid()


class _Limits:
    """The smallest and largest number of a dtype."""

    def __init__(self, dtype: Any) -> None:
        limits: Any = ml_dtypes.finfo if is_float(np.dtype(dtype)) else np.iinfo
        info = limits(dtype)
        self.dtype = np.dtype(dtype)
        self.min = float(info.min)
        self.max = float(info.max)
        self.eps = float(getattr(info, "eps", 1))
        self.tiny = float(getattr(info, "tiny", 1))
        self.bits = self.dtype.itemsize * 8


fp32, bfp16 = _Limits(np.float32), _Limits(ml_dtypes.bfloat16)


def finfo(dtype: Any) -> _Limits:
    return _Limits(dtype_of(dtype))


class _TileSize:
    """The tile sizes that the engines accept."""

    pmax = checks.PARTITIONS
    psum_fmax = 512
    psum_bank_fmax = 512
    psum_bank_fmax_bytes = checks.PSUM_BANK_BYTES
    gemm_stationary_fmax = checks.STATIONARY_FREE
    gemm_moving_fmax = checks.MOVING_FREE
    bn_stats_fmax = checks.BN_STATS_FREE
    psum_min_align = 4
    sbuf_min_align = 1
    psum_num_banks = checks.PSUM_BANKS

    @property
    def total_available_sbuf_size(self) -> int:
        return checks.sbuf_bytes() if recording() else DEVICES["trn2"].sbuf_bytes

    sbuf_size_bytes = sbuf_fmax_bytes = total_available_sbuf_size


tile_size = _TileSize()


class PartitionDim(int):
    """`par_dim(n)`: the size of the partition dimension."""


def par_dim(size: int) -> PartitionDim:
    return PartitionDim(size)


class _Cores:
    def __call__(self, size: int) -> int:
        return int(size)

    def __getitem__(self, size: int) -> int:
        return int(size)


nc = _Cores()


def spmd_dim(a: Any, b: Any) -> int:
    return int(a) * int(b)


def ds(start: Any, size: int) -> DynamicSlice:
    return DynamicSlice(start, size)


dslice = ds


def is_hbm(buffer: Any) -> bool:
    return isinstance(buffer, Buffer) and buffer.is_hbm


def is_sbuf(buffer: Any) -> bool:
    return buffer is SBUF


def is_psum(buffer: Any) -> bool:
    return buffer is PSUM


def is_on_chip(buffer: Any) -> bool:
    return is_sbuf(buffer) or is_psum(buffer)


def _buffer(given: Any) -> Buffer:
    if given is None:
        return SBUF
    if isinstance(given, Buffer):
        return given
    known = {b.kind: b for b in (SBUF, PSUM, HBM, PRIVATE_HBM, SHARED_HBM)}
    if str(given) in known:
        return known[str(given)]
    raise NkiTypeError("err_unsupported_memory", f"{given!r} is not a buffer; there are {', '.join(known)}")


def _made(shape: Any, dtype: Any, buffer: Any, name: str, value: Any = None, address: Any = None) -> NkiTensor:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    where = buffer if isinstance(buffer, Buffer) else _buffer(buffer)
    partition = (
        next((i for i, n in enumerate(sizes) if isinstance(n, PartitionDim)), 0)
        if PartitionDim in map(type, sizes)
        else 0
    )
    made = tensors.new(sizes, dtype_of(dtype), where, name=name, partition=partition, address=address)
    checks.tile(made)
    if value is not None:
        made.storage.initial = np.full(made.shape, value).astype(made.dtype)
        mark_written(made)
        if made.storage.origin is not None:
            made.storage.origin = Origin.ZEROS if value == 0 else Origin.OTHER
    return made


def ndarray(shape: Any, dtype: Any, buffer: Any = None, *, name: str = "", address: Any = None, **_: Any) -> NkiTensor:
    """Returns memory that was never written; floats read from it are NaN."""
    return _made(shape, dtype, buffer, name, address=address)


def zeros(shape: Any, dtype: Any, buffer: Any = None, *, name: str = "", **_: Any) -> NkiTensor:
    return _made(shape, dtype, buffer, name, 0)


def ones(shape: Any, dtype: Any, buffer: Any = None, *, name: str = "", **_: Any) -> NkiTensor:
    return _made(shape, dtype, buffer, name, 1)


def full(shape: Any, fill_value: Any, dtype: Any, buffer: Any = None, *, name: str = "", **_: Any) -> NkiTensor:
    return _made(shape, dtype, buffer, name, fill_value)


def zeros_like(a: NkiTensor, dtype: Any = None, *, buffer: Any = None, name: str = "", **_: Any) -> NkiTensor:
    return _made(a.shape, dtype or a.dtype, buffer or a.buffer, name, 0)


def empty_like(a: NkiTensor, dtype: Any = None, *, buffer: Any = None, name: str = "", **_: Any) -> NkiTensor:
    return _made(a.shape, dtype or a.dtype, buffer or a.buffer, name)


def shared_constant(constant: Any, dtype: Any = None, **_: Any) -> NkiTensor:
    """Returns constants in HBM, from an array or from the path of a `.npy` file."""
    values = np.load(constant) if isinstance(constant, str | Path) else np.asarray(constant)
    wanted = dtype_of(dtype if dtype is not None else values.dtype)
    return tensors.whole(current().constant(values.astype(wanted), wanted))


def shared_identity_matrix(n: int, dtype: Any = np.uint8, dst: NkiTensor | None = None, **_: Any) -> NkiTensor:
    made = shared_constant(np.identity(n), dtype)
    if dst is None:
        return made
    operators.assign(dst, made)
    return dst


# Loops and grids


def _bound(value: Any) -> int:
    """Returns the bound of a loop. A bound in memory is known only if the kernel runs with arrays."""
    if isinstance(value, int | np.integer):
        return int(value)
    register = getattr(value, "register_tensor", None)
    place = value if isinstance(value, NkiTensor) else register() if register else None
    if place is None:
        raise NkiTypeError("err_dynamic_loop_bound", f"the bounds of a loop are numbers, not {type(value).__name__}")
    if place.size != 1:
        raise NkiTypeError("err_dynamic_loop_bound", f"the bound of a loop is one number, not a tensor {place.shape}")
    return int(current().known(place).reshape(()))


def _loop(kind: str, args: tuple[Any, ...]) -> Iterator[int]:
    values = range(*map(_bound, args))
    if not recording():
        return iter(values)
    return current().iterate(kind, values)


def affine_range(*args: Any, **_: Any) -> Iterator[int]:
    return _loop("affine", args)


def sequential_range(*args: Any, **_: Any) -> Iterator[int]:
    return _loop("sequential", args)


def static_range(*args: Any, **_: Any) -> Iterator[int]:
    return _loop("static", args)


def dynamic_range(*args: Any, **_: Any) -> Iterator[int]:
    return _loop("dynamic", args)


def fori_loop(lower: int, upper: int, body_fun: Any, step: int = 1) -> None:
    for i in _loop("fori", (lower, upper, step)):
        body_fun(i)


def while_loop(init: Any, body_fun: Callable[[Any], Any]) -> None:
    """Runs a body until a register is 0; if the register is 0 at first, the body does not run.

    Args:
        init: the register.
        body_fun: receives the register and returns the register that the next iteration reads.

    Raises:
        NkiError: the body returns no register, or a register's value is unknown (`Recorder.known`).
    """
    register = init

    def turns() -> Iterator[int]:
        turn = 0
        while _bound(register):
            yield turn
            turn += 1

    for _ in current().iterate("while", turns()):
        register = body_fun(register)


def program_id(axis: int = 0) -> int:
    recorder = current()
    if axis >= max(1, len(recorder.program)):
        raise NkiValueError("err_program_axis", f"the grid has {len(recorder.program)} axes, and none of number {axis}")
    return recorder.program[axis] if recorder.program else 0


def num_programs(axes: Any = None) -> int:
    grid = current().grid or (1,)
    if axes is None:
        return math.prod(grid)
    if isinstance(axes, int):
        return grid[axes] if axes < len(grid) else 1
    return math.prod(grid[axis] for axis in axes)


def program_ndim() -> int:
    return len(current().grid)


# Loads and stores


def load(src: Any, *, mask: Any = None, dtype: Any = None, **_: Any) -> NkiTensor:
    """Loads a tensor in HBM into a new tile in SBUF, and returns the tile."""
    src = checks.in_hbm(src, "what is loaded").with_mask(mask)
    shape = src.shape if src.ndim > 1 else (src.shape[0], 1) if src.ndim else (1, 1)
    tile = operators.result(shape, dtype or src.dtype)
    operators.assign(tile, src, checked=True)
    shown = tensors.shown_of(src)
    return tile if shown is None else tile.with_mask(np.broadcast_to(shown, src.shape).reshape(shape))


def store(dst: Any, value: Any, *, mask: Any = None, **_: Any) -> None:
    """Writes a tile to a tensor in HBM."""
    operators.assign(checks.in_hbm(dst, "where a tile is stored"), value, mask=mask, checked=True)


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None, **_: Any) -> NkiTensor:
    src = checks.in_hbm(src, "what is loaded").with_mask(mask)
    if src.ndim != 2:
        raise NkiValueError("err_tensor_rank", f"load_transpose2d takes 2 dimensions, not {src.shape}")
    checks.inside(src)
    shown = tensors.shown_of(src)
    shown = None if shown is None else np.broadcast_to(shown, src.shape).T
    tile = operators.result((src.shape[1], src.shape[0]), dtype or src.dtype, mask=shown)
    operators.emit("transpose", [src], [tile], ((1, 0), False))
    return tile


def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None, **_: Any) -> None:
    older.dma_copy(dst=dst, src=value, mask=mask, dst_rmw_op=op)


def copy(src: Any, *, mask: Any = None, dtype: Any = None, **_: Any) -> NkiTensor:
    return operators.copied(checks.on_chip(src, "src"), dtype, mask=mask)


def broadcast_to(src: Any, shape: Any, dtype: Any = None, **_: Any) -> NkiTensor:
    view: NkiTensor = src.broadcast_to(shape)
    return operators.copied(view, dtype) if dtype is not None else view


def expand_dims(data: NkiTensor, axis: int) -> NkiTensor:
    return data.expand_dim(axis)


def transpose(x: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> NkiTensor:
    x = checks.on_chip(x, "x")
    if x.ndim != 2:
        raise NkiValueError("err_tensor_rank", f"transpose takes 2 dimensions, not {x.shape}")
    return older.nc_transpose(x, dtype=dtype, mask=mask)


def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None, **_: Any) -> NkiTensor:
    """`x[M, K] @ y[K, N]`, or with `transpose_x` `x[K, M].T @ y[K, N]`, in float32 in PSUM."""
    x, y = checks.on_chip(x, "x"), checks.on_chip(y, "y")
    stationary = x
    if not transpose_x:
        stationary = operators.copied(older.nc_transpose(x))
    return older.nc_matmul(stationary, y, mask=mask if transpose_x else None)


# Mathematics


def _unary(name: str) -> Any:
    def function(x: Any, dtype: Any = None, mask: Any = None, **_: Any) -> Any:
        return operators.unary(name, x, dtype=dtype, mask=mask)

    function.nki_op = function.__name__ = name  # type: ignore[attr-defined]
    function.__doc__ = f"Returns `{name}` of a tile, element by element."
    return function


def _binary(name: str) -> Any:
    def function(x: Any, y: Any, dtype: Any = None, mask: Any = None, **_: Any) -> Any:
        return operators.binary(name, x, y, dtype=dtype, mask=mask)

    function.nki_op = function.__name__ = name  # type: ignore[attr-defined]
    function.__doc__ = f"Returns `{name}` of two tiles, or of a tile and a number, element by element."
    return function


def _reduction(name: str, op: str) -> Any:
    def function(x: Any, axis: Any, dtype: Any = None, mask: Any = None, keepdims: bool = False, **_: Any) -> Any:
        return operators.reduction(op, x, axis, dtype=dtype, mask=mask, keepdims=keepdims)

    function.__name__ = name
    function.nki_op = op  # type: ignore[attr-defined]
    function.__doc__ = f"Returns the {name} of a tile over free axes; the result has two dimensions at least."
    return function


def mean(x: Any, axis: Any, dtype: Any = None, mask: Any = None, keepdims: bool = False, **_: Any) -> NkiTensor:
    return operators.reduction("add", x, axis, dtype=dtype, mask=mask, keepdims=keepdims, mean=True)


def var(x: Any, axis: Any, dtype: Any = None, mask: Any = None, keepdims: bool = False, **_: Any) -> NkiTensor:
    average = operators.reduction("add", x, axis, dtype=float32, mask=mask, keepdims=True, mean=True)
    spread = operators.unary("square", operators.binary("subtract", x, average, dtype=float32))
    return operators.reduction("add", spread, axis, dtype=dtype or x.dtype, mask=mask, keepdims=keepdims, mean=True)


def all(x: Any, axis: Any, dtype: Any = bool, mask: Any = None, **_: Any) -> NkiTensor:
    return operators.reduction("logical_and", x, axis, dtype=dtype, mask=mask)


all.nki_op = "logical_and"  # type: ignore[attr-defined]


def softmax(
    x: Any, axis: Any = -1, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None, **_: Any
) -> NkiTensor:
    top = operators.reduction("maximum", x, axis, dtype=float32, mask=mask, keepdims=True)
    powers = operators.unary("exp", operators.binary("subtract", x, top, dtype=float32), mask=mask)
    total = operators.reduction("add", powers, axis, keepdims=True, mask=mask)
    made: NkiTensor = operators.binary("divide", powers, total, dtype=dtype or x.dtype)
    return made


def rms_norm(
    x: Any, w: Any, axis: Any, n: Any, epsilon: float = 1e-6, *, dtype: Any = None, compute_dtype: Any = None,
    mask: Any = None, **_: Any,
) -> NkiTensor:  # fmt: skip
    squares = operators.unary("square", x, dtype=float32, mask=mask)
    total = operators.reduction("add", squares, axis, keepdims=True, mask=mask)
    scale = operators.unary("rsqrt", operators.binary("add", operators.binary("multiply", total, 1.0 / n), epsilon))
    made: NkiTensor = operators.binary(
        "multiply", operators.binary("multiply", x, scale, dtype=float32), w, dtype=dtype or x.dtype
    )
    return made


def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> NkiTensor:
    """Returns x where the condition is not 0, else y."""
    tiles = [v for v in (condition, x, y) if isinstance(v, NkiTensor)]
    if not tiles:
        raise NkiTypeError("err_operand_not_tile", "where takes a tile")
    shape = operators.broadcast_shape(*tiles)
    kinds = [v.dtype if isinstance(v, NkiTensor) else operators.scalar_dtype(v) for v in (x, y)]
    fixed = [operators.number(v) for v in (x, y)]
    values = [v.dtype for v in (x, y) if isinstance(v, NkiTensor)]
    out = dtype or (promoted(*(values or kinds)) if len(values) != 1 else values[0])
    condition = condition if isinstance(condition, NkiTensor) else shared_constant(np.asarray(condition))
    made = operators.result(shape, out, tiles, mask)
    given = [v.broadcast_to(shape) for v in (x, y) if isinstance(v, NkiTensor)]
    operators.emit("select", [condition.broadcast_to(shape), *given], [made], (fixed[0], fixed[1], False, None))
    return made


def gather_flattened(data: Any, indices: Any, *, mask: Any = None, dtype: Any = None, **_: Any) -> NkiTensor:
    return older._gather_flattened(data, indices, dtype=dtype, mask=mask)


def loop_reduce(x: Any, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> Any:
    """Reduces over the iterations of the loops with these indices.

    The result is x in the first iteration, and `op(previous result, x)` in each later one. Enclosing loops that are not
    named have one result per iteration.
    """
    recorder = current()
    frame = sys._getframe(1)
    given = tuple(loop_indices) if isinstance(loop_indices, Iterable) else (loop_indices,)
    others = tuple(index.turn for index in recorder.indices if not any(index is one for one in given))
    key = (frame.f_code.co_filename, frame.f_lineno, others)
    known = recorder.reduced.get(key)
    first = not any(one.turn if isinstance(one, NkiLoopIndex) else int(one) for one in given)
    if first or known is None:
        made = x if dtype is None else operators.copied(x, dtype)
    else:
        made = operators.binary(op, known, x, dtype=dtype)
    recorder.reduced[key] = made
    return made


def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None, **_: Any) -> NkiTensor:
    return older.dropout(x, rate, dtype=dtype, mask=mask)


def rand(shape: Any, dtype: Any = np.float32, **_: Any) -> NkiTensor:
    tile = operators.result(tuple(shape), dtype)
    vector.random(tile)
    return tile


def random_seed(seed: Any, **_: Any) -> None:
    value = operators.number(seed)
    current().seed = int(value) << 16 if value is not None else 0


def static_cast(input_data: Any, dtype: Any) -> Any:
    """Returns a host array or a tile in another dtype."""
    if isinstance(input_data, NkiTensor):
        return operators.copied(input_data, dtype)
    return np.asarray(input_data).astype(dtype_of(dtype))


def device_print(prefix: Any, x: Any = None, **_: Any) -> None:
    current().notes.append(f"device_print({prefix!r}) prints nothing")


def no_reorder(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


class NKIObject:
    """A base class whose attributes are set by keyword."""

    def __init__(self, **kwargs: Any) -> None:
        for key, value in kwargs.items():
            setattr(self, key, value)


def names() -> dict[str, Any]:
    """Returns all names of the module that kernels import."""
    own = {k: v for k, v in globals().items() if k[0] != "_" and not isinstance(v, types.ModuleType) and k != "names"}
    own["float32"] = np.float32
    own["tfloat32"] = np.dtype(np.float32)
    for name in UNARY:
        own.setdefault(name, _unary(name))
    for name in BINARY:
        own.setdefault(name, _binary(name))
    for name, op in (("sum", "add"), ("max", "maximum"), ("min", "minimum"), ("prod", "multiply")):
        own[name] = _reduction(name, op)
    own["NkiTensor"] = NkiTensor
    own["tensor"] = NkiTensor
    return own


__all__ = ["IndexArray", "arange", "boolean", "index_array"]
