"""From an emitter to HLO: views of dense storage, tracing with JAX, checks of the result.

A kernel's parameters are the storage that ggml's tensors cover, as a backend binds it: a range of bytes from the tensor's first
element to the end of its last. A tensor that is not contiguous is a view of its storage, and the view is part of the kernel:

* dense storage in another order of dimensions: the parameter has the storage's shape, the view is a transpose;
* strides that nest (each a multiple of the next, rows longer than what is used): the parameter is flat, the view pads it to whole
  rows, reshapes and slices;
* anything else (overlapping or irregular strides): a gather from flat storage.

Element types that neuronx-cc does not take arrive as others: I64 as pairs of i32, the lower word first, quantized blocks as
bytes. An emitter is given I64's lower words only, unless its result is I64, too: then it is given pairs and returns pairs. JAX is
imported when the first kernel is lowered, for the CPU only: nothing here needs or touches a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kernelgen.emitter import CONTEXT
from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.hlo.cpu import import_jax
from kernelgen.kernel import KernelSpec

_ARRAY_TYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "i8": "int8", "i16": "int16", "i32": "int32"}

CLEAR_EVERY = 64
"""JAX keeps what it traced; its caches are emptied after so many kernels, so that a long-lived worker does not grow."""

_lowered = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """The parameter that a tensor arrives as, and how its elements lie in it.

    Attributes:
        dtype: NumPy name of the parameter's element type.
        shape: the parameter's shape.
        dims: (length, stride in elements of `dtype`) of the view's dimensions, outermost first: ne3 to ne0 (blocks for a
            quantized type), then what `trailing` adds.
        length: elements of `dtype` in the storage.
        dense: whether the view covers every element once.
    """

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[tuple[int, int], ...]
    length: int
    dense: bool

    @property
    def view_shape(self) -> tuple[int, ...]:
        return tuple(n for n, _ in self.dims)

    @property
    def order(self) -> tuple[int, ...]:
        """The view's dimensions from the largest stride to the smallest; in order for a contiguous tensor."""
        return tuple(sorted(range(len(self.dims)), key=lambda k: (-self.dims[k][1], k)))


def storage(tensor: TensorDesc) -> Storage:
    """Returns the parameter that `tensor` arrives as.

    Raises:
        ValueError: neuronx-cc has nothing to hold its type in.
    """
    t = TYPES[tensor.dtype]
    strides = list(tensor.nb)
    lengths = list(tensor.ne)
    trailing: tuple[tuple[int, int], ...] = ()
    if t.quantized:
        dtype, unit, trailing = "uint8", 1, ((t.size, 1),)
        lengths[0] //= t.block
    elif tensor.dtype == "i64":
        dtype, unit, trailing = "int32", 4, ((2, 1),)
    elif tensor.dtype in _ARRAY_TYPES:
        dtype, unit = _ARRAY_TYPES[tensor.dtype], t.size
    else:
        raise ValueError(f"Neuron devices have no {tensor.dtype}")
    dims = (*((lengths[k], strides[k] // unit) for k in (3, 2, 1, 0)), *trailing)
    length = tensor.storage_bytes // unit
    made = Storage(dtype, (length,), dims, length, False)
    expected = 1
    for k in reversed(made.order):
        n, stride = dims[k]
        if n > 1 and stride != expected:
            return made
        expected *= n
    return Storage(dtype, tuple(dims[k][0] for k in made.order), dims, length, True)


def storage_shape(tensor: TensorDesc) -> tuple[str, tuple[int, ...]]:
    """Returns (NumPy dtype name, shape) of the HLO parameter or result that holds `tensor`."""
    made = storage(tensor)
    return made.dtype, made.shape


def view(array: Any, s: Storage) -> Any:
    """Returns the logical array, shape `s.view_shape`, of a parameter of shape `s.shape`."""
    from jax import lax

    if s.dense:
        return lax.transpose(array, _inverse(s.order)) if s.order != tuple(range(len(s.order))) else array
    nested = _nested(s)
    if nested is None:
        return array.at[_indices(s)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    padded, rows, used, kept = nested
    if padded > s.length:
        array = lax.pad(array, array.dtype.type(0), [(0, padded - s.length, 0)])
    array = lax.slice(lax.reshape(array, rows), (0,) * len(rows), used)
    array = lax.reshape(array, tuple(s.dims[k][0] for k in kept))
    stepped = sorted(kept)
    array = lax.transpose(array, [kept.index(k) for k in stepped])
    # What is left out is of one element, or repeats (stride 0).
    return lax.broadcast_in_dim(array, s.view_shape, stepped)


def update(array: Any, s: Storage, value: Any) -> Any:
    """Returns the storage `array`, shape `s.shape`, with its view replaced by `value`, shape `s.view_shape`.

    Elements that the view does not cover stay; dense storage has none, and its `array` is not read.
    """
    from jax import lax

    if s.dense:
        return lax.transpose(value, s.order) if s.order != tuple(range(len(s.order))) else value
    nested = _nested(s)
    if nested is None or any(n > 1 and stride == 0 for n, stride in s.dims):
        return array.at[_indices(s)].set(value, mode="promise_in_bounds", wrap_negative_indices=False)
    padded, rows, used, kept = nested
    if padded > s.length:
        array = lax.pad(array, array.dtype.type(0), [(0, padded - s.length, 0)])
    stepped = sorted(kept)
    value = lax.reshape(value, tuple(s.dims[k][0] for k in stepped))
    value = lax.reshape(lax.transpose(value, [stepped.index(k) for k in kept]), used)
    array = lax.dynamic_update_slice(lax.reshape(array, rows), value, (0,) * len(rows))
    return lax.slice(lax.reshape(array, (padded,)), (0,), (s.length,))


def _nested(s: Storage) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Returns how the view is a slice of rows of rows, or None when strides do not nest.

    Returns:
        (elements after padding to whole rows, shape as rows, end of the slice per dimension, view dimensions in that order).
    """
    kept = tuple(k for k in s.order if s.dims[k][0] > 1 and s.dims[k][1] > 0)
    if not kept:
        return (s.length, (s.length,), (1,), ()) if s.length else None
    rows, used = [s.dims[kept[0]][0]], [s.dims[kept[0]][0]]
    for outer, inner in pairwise(kept):
        n, stride = s.dims[inner]
        if s.dims[outer][1] % stride or s.dims[outer][1] < n * stride:
            return None
        rows.append(s.dims[outer][1] // stride)
        used.append(n)
    step = s.dims[kept[-1]][1]
    return s.dims[kept[0]][0] * s.dims[kept[0]][1], (*rows, step), (*used, 1), kept


def _indices(s: Storage) -> Any:
    """Returns the position in flat storage of every element of the view, i32."""
    import jax.numpy as jnp
    from jax import lax

    total = jnp.zeros(s.view_shape, jnp.int32)
    for axis, (n, stride) in enumerate(s.dims):
        if n > 1:
            total = total + lax.broadcasted_iota(jnp.int32, s.view_shape, axis) * jnp.int32(stride)
    return total


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(k) for k in range(len(order))]


# --- tracing --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lowered:
    """What tracing gives.

    Attributes:
        hlo: serialized `HloModuleProto` as XLA writes it.
        inputs: `input<i>` per parameter, i the index in ggml's `src`.
        outputs: `output0` for the result, then `input<i>.updated` for every input that the kernel changes besides.
        aliases: result number → parameter number.
    """

    hlo: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[int, int]


def lower(spec: KernelSpec, function: Callable[..., Any]) -> Lowered:
    """Traces an emitter for one kernel.

    Args:
        spec: what is computed.
        function: the emitter.

    Raises:
        KernelgenError: the emitter refuses the kernel, or its result is not what the spec says.
    """
    global _lowered
    jax = import_jax()
    arguments = [None if t is None else _storage(spec, function, t, f"input {i}") for i, t in enumerate(spec.inputs)]
    present = [(i, s) for i, s in enumerate(arguments) if s is not None]
    updated = _updated(spec, function)
    targets = [(spec.alias, _target(spec, function)), *((i, storage(t)) for i, t in updated.items())]
    keywords = _keywords(spec, function)

    def kernel(*arrays: Any) -> Any:
        bound = dict(zip((i for i, _ in present), arrays, strict=True))
        # What is moved to another i64 needs both words; what is computed with is an index, and small.
        pairs = spec.output.dtype == "i64"
        views = [None if s is None else _logical(bound[i], s, spec.inputs[i], pairs) for i, s in enumerate(arguments)]
        results = _checked(function(*views, **keywords), updated, spec, function)
        new = tuple(
            update(None if i is None else bound[i], target, result)
            for (i, target), result in zip(targets, results, strict=True)
        )
        return new if spec.updates else new[0]

    avals = [jax.ShapeDtypeStruct(s.shape, _dtype(s.dtype)) for _, s in present]
    try:
        # The process's own settings must not leak into the kernel's bytes.
        with jax.enable_x64(False), jax.default_matmul_precision(None), jax.numpy_dtype_promotion("standard"):
            lowered = jax.jit(kernel, keep_unused=True).trace(*avals).lower(lowering_platforms=("cpu",))
            hlo = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
    except KernelgenError:
        raise
    except Exception as error:
        raise _failure(spec, function, f"{type(error).__name__}: {str(error).strip()}", error) from error
    finally:
        _lowered += 1
        if _lowered % CLEAR_EVERY == 0:
            jax.clear_caches()
    numbers = {i: n for n, (i, _) in enumerate(present)}
    return Lowered(
        hlo,
        tuple(f"input{i}" for i in numbers),
        ("output0", *(f"input{i}.updated" for i in spec.updates)),
        {n: numbers[i] for n, (i, _) in enumerate(targets) if i is not None},
    )


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _storage(spec: KernelSpec, function: Callable[..., Any], tensor: TensorDesc, what: str) -> Storage:
    try:
        made = storage(tensor)
    except ValueError as error:
        raise _failure(spec, function, f"{what}: {error}") from None
    if made.length >= 2**31 and not made.dense:
        raise _failure(spec, function, f"{what}: a view of 2^31 elements or more is not supported")
    return made


def _target(spec: KernelSpec, function: Callable[..., Any]) -> Storage:
    """Returns how the result is stored."""
    out = spec.output
    if spec.alias is None:
        made = _storage(spec, function, out, "the result")
        if not made.dense:
            raise _failure(
                spec, function, f"the result {out} has gaps, which only a kernel that works in place can leave"
            )
        return made
    shared = spec.inputs[spec.alias] if spec.alias < len(spec.inputs) else None
    if shared is None:
        raise _failure(spec, function, f"the result shares the memory of input {spec.alias}, which is absent")
    if (shared.ne, shared.dtype) != (out.ne, out.dtype):
        raise _failure(spec, function, f"the result {out} can't share the memory of input {spec.alias}, {shared}")
    return _storage(spec, function, shared, "the result")


def _logical(array: Any, s: Storage, tensor: TensorDesc | None, pairs: bool) -> Any:
    logical = view(array, s)
    return logical[..., 0] if tensor is not None and tensor.dtype == "i64" and not pairs else logical


def _keywords(spec: KernelSpec, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the emitter's keyword arguments: the spec's parameters, and the context that it declares."""
    declared = {
        p.name for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = [name for name, value in spec.params if name not in declared]
    if unknown:
        raise _failure(spec, function, f"the emitter takes no parameter {', '.join(map(repr, unknown))}")
    context = {"out": spec.output, "inputs": spec.inputs, "op": spec.op}
    return {**dict(spec.params), **{name: context[name] for name in CONTEXT if name in declared}}


def _updated(spec: KernelSpec, function: Callable[..., Any]) -> dict[int, TensorDesc]:
    """Returns the inputs that the kernel changes besides the one that its result shares the memory of."""
    found = {}
    for i in spec.updates:
        tensor = spec.inputs[i] if i < len(spec.inputs) else None
        if tensor is None:
            raise _failure(spec, function, f"input {i}, which the op changes, is absent")
        found[i] = tensor
    return found


def _checked(
    returned: Any, updated: Mapping[int, TensorDesc], spec: KernelSpec, function: Callable[..., Any]
) -> tuple[Any, ...]:
    """Returns the emitter's result, and the new content of each input that it updates, if they are what the spec says."""
    wanted = [("the result", spec.output), *((f"the new input {i}", t) for i, t in updated.items())]
    results: tuple[Any, ...] = returned if updated and isinstance(returned, tuple) else (returned,)
    if len(results) != len(wanted):
        what = ", ".join(name for name, _ in wanted)
        raise _failure(spec, function, f"the emitter returned {type(returned).__name__}, not a tuple of {what}")
    for result, (what, tensor) in zip(results, wanted, strict=True):
        if not hasattr(result, "shape") or not hasattr(result, "dtype"):
            raise _failure(spec, function, f"the emitter returned {type(result).__name__}, not one array")
        s = storage(tensor)
        if tuple(result.shape) != s.view_shape or str(result.dtype) != s.dtype:
            raise _failure(
                spec,
                function,
                f"the emitter returned {result.dtype}{list(result.shape)} where {what} {tensor} is "
                f"{s.dtype}{list(s.view_shape)}",
            )
    return results


def place(function: Callable[..., Any], error: BaseException | None = None) -> Location:
    """Returns where an emitter is, or the line of its file that raised `error`."""
    code = inspect.unwrap(function).__code__
    line = code.co_firstlineno
    trace = error.__traceback__ if error else None
    while trace:
        if trace.tb_frame.f_code.co_filename == code.co_filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return Location(code.co_filename, line, 1)


def _failure(
    spec: KernelSpec, function: Callable[..., Any], message: str, error: BaseException | None = None
) -> KernelgenError:
    inputs = ", ".join("absent" if t is None else str(t) for t in spec.inputs)
    return KernelgenError(
        Diagnostic(
            f"kernel {spec.id}: {message}",
            place(function, error),
            f"{spec.op}({inputs}) -> {spec.output} {dict(spec.params)}",
        ),
        exit_code=1,
    )
