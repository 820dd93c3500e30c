"""Runs HLO with XLA on the CPU, for tests and the simulator's runtime.

It is neither a device nor a model of one: results follow the HLO's semantics, with the rounding of XLA for the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from kernelgen.hlo import proto
from kernelgen.hlo.cpu import client, xla_compile


@dataclass(frozen=True, slots=True)
class Executable:
    """HLO compiled for this machine's CPU.

    Attributes:
        loaded: XLA's executable.
        parameters: (name, NumPy dtype name, shape) per parameter.
        results: (NumPy dtype name, shape) per result.
        handlers: functions that make the buffer of each result.
    """

    loaded: Any
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]
    results: tuple[tuple[str, tuple[int, ...]], ...]
    handlers: list[Callable[..., Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handlers", [_result(dtype, shape) for dtype, shape in self.results])

    @classmethod
    def of(cls, hlo: bytes, loaded: Any) -> Executable:
        """Returns XLA's executable of a serialized `HloModuleProto`, with its parameters and results.

        Raises:
            ValueError: `hlo` is not a module.
        """
        module = proto.parse(hlo)
        return cls(loaded, parameters(hlo), tuple(_array(shape) for shape in proto.result_shapes(module)))

    def begin(self, buffers: Sequence[Any]) -> list[Any]:
        """Returns XLA's result buffers, which may not be computed yet: XLA runs longer computations in its own threads.

        Args:
            buffers: one for each parameter, made by `put`. They must live until the results are computed.
        """
        made: list[Any] = self.loaded.execute_sharded(buffers).consume_with_handlers(self.handlers)
        return made

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Returns the results for these parameters, in order.

        Raises:
            ValueError: number, shape or dtype of the arrays differs from the parameters.
        """
        if len(arrays) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} parameters, {len(arrays)} arrays")
        for array, (name, dtype, shape) in zip(arrays, self.parameters, strict=True):
            if (array.dtype.name, array.shape) != (dtype, shape):
                raise ValueError(f"{name} is {dtype}{list(shape)}, not {array.dtype}{list(array.shape)}")
        # Copies: XLA may write a result over the parameter that it aliases.
        copies = [np.array(a) for a in arrays]
        buffers = self.begin([put(a) for a in copies])
        for buffer in buffers:
            buffer.block_until_ready()
        return [_copy(buffer, *result) for buffer, result in zip(buffers, self.results, strict=True)]


def put(array: np.ndarray[Any, Any]) -> Any:
    """Returns XLA's buffer of an array: the same memory, which must outlive it, if XLA can use its layout, else a copy."""
    device, sharding = _place()
    from jaxlib import _jax

    zero_copy = _jax.HostBufferSemantics.ZERO_COPY
    # The lowest layer that accepts an array: JAX's own costs ten times as much, and may copy.
    described = _Described(array.shape, array.dtype)
    return _jax.batched_device_put(described, sharding, [array], [device], True, False, zero_copy, True)


def address(buffer: Any) -> int:
    """Returns the address of one of XLA's buffers in this process; the buffer must be computed.

    jaxlib's `unsafe_buffer_pointer` imports JAX, which takes longer than most simulator runs. A DLPack capsule holds a
    `DLManagedTensor`, whose first field is the address (dmlc/dlpack, dlpack.h); XLA's buffers start there.
    """
    from jaxlib import _jax

    capsule = _jax.buffer_to_dlpack_managed_tensor(buffer)
    found = ctypes.c_void_p.from_address(_capsule_pointer(capsule, b"dltensor")).value
    return found or 0


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True, slots=True)
class _Described:
    """The attributes of an array that jaxlib reads."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    weak_type: bool = False


@cache
def _place() -> tuple[Any, Any]:
    """Returns the device, and a sharding that places an array only on it.

    jaxlib leaves some methods of its shardings to JAX; these return the same as JAX's.
    """
    device = client().devices()[0]
    from jaxlib import _jax, xla_client

    class OnOneDevice(_jax.SingleDeviceSharding):  # type: ignore[misc]  # jaxlib has no types
        memory_kind = None
        _internal_device_list = _jax.DeviceList((device,))

        def _to_xla_hlo_sharding(self, _dimensions: int) -> Any:
            return xla_client.HloSharding.replicate()

    return device, OnOneDevice(device)


@cache
def _result(dtype: str, shape: tuple[int, ...]) -> Callable[..., Any]:
    """Returns a function that makes the buffer of a result."""
    from jaxlib import _jax

    made: Callable[..., Any] = _jax.array_result_handler(_Described(shape, numpy_dtype(dtype)), _place()[1], True, True)
    return made


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype with a name of NumPy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _copy(buffer: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Returns a copy of a buffer's values."""
    array: np.ndarray[Any, Any] = np.empty(shape, numpy_dtype(dtype))
    if array.nbytes:
        ctypes.memmove(array.ctypes.data, address(buffer), array.nbytes)
    return array


_NUMPY = {
    "pred": "bool",
    "s8": "int8",
    "s16": "int16",
    "s32": "int32",
    "s64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "f8e4m3": "float8_e4m3",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def compile_for_cpu(hlo: bytes) -> Executable:
    """Compiles a serialized `HloModuleProto` for this machine's CPU.

    Raises:
        ValueError: `hlo` is not a module, or XLA does not compile it (its message).
    """
    return Executable.of(hlo, xla_compile(hlo, client()))


def parameters(hlo: bytes) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Returns the parameters of a serialized `HloModuleProto`, as `Executable` has them.

    Raises:
        ValueError: `hlo` is not a module.
    """
    return tuple((i.name, *_array(i.shape)) for i in proto.parameters(proto.entry(proto.parse(hlo))))


def _array(shape: Any) -> tuple[str, tuple[int, ...]]:
    """Returns (NumPy dtype name, shape) of a `ShapeProto`."""
    return _NUMPY[proto.ELEMENT_TYPES[shape.element_type]], tuple(shape.dimensions)


def run(hlo: bytes, arrays: Sequence[np.ndarray[Any, Any]] | Mapping[str, np.ndarray[Any, Any]]) -> list[Any]:
    """Compiles `hlo` and returns its results for these parameters.

    Args:
        hlo: serialized `HloModuleProto`.
        arrays: one array per parameter, in order or by the parameter's name.

    Raises:
        ValueError: it does not compile, or the arrays do not fit.
    """
    executable = compile_for_cpu(hlo)
    if isinstance(arrays, Mapping):
        arrays = [arrays[name] for name, _, _ in executable.parameters]
    return executable.run(arrays)
