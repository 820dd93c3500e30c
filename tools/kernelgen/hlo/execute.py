"""Runs HLO with XLA on the CPU, for tests and the simulator's runtime.

Not a device and not a model of one: results are what the HLO means, computed as XLA for the CPU rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernelgen.hlo import proto
from kernelgen.hlo.cpu import import_jax, xla_compile


@dataclass(frozen=True, slots=True)
class Executable:
    """HLO compiled for this machine's CPU.

    Attributes:
        loaded: XLA's executable.
        parameters: (name, NumPy dtype name, shape) per parameter.
    """

    loaded: Any
    parameters: tuple[tuple[str, str, tuple[int, ...]], ...]

    def run(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        """Returns the results for these parameters, in order.

        Raises:
            ValueError: number, shape or dtype of the arrays is not what the parameters are.
        """
        jax = import_jax()
        if len(arrays) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} parameters, {len(arrays)} arrays")
        for array, (name, dtype, shape) in zip(arrays, self.parameters, strict=True):
            if (array.dtype.name, array.shape) != (dtype, shape):
                raise ValueError(f"{name} is {dtype}{list(shape)}, not {array.dtype}{list(array.shape)}")
        device = jax.devices("cpu")[0]
        with jax.enable_x64(True):  # or 64-bit arrays are narrowed on the way in
            # Copies: XLA may write a result over the parameter that it aliases.
            buffers = [jax.device_put(np.array(a), device) for a in arrays]
        results = self.loaded.execute_sharded(buffers)
        return [np.asarray(shards[0]) for shards in results.disassemble_into_single_device_arrays()]


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
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}


def compile_for_cpu(hlo: bytes) -> Executable:
    """Compiles a serialized `HloModuleProto` for this machine's CPU.

    Raises:
        ValueError: `hlo` is not a module, or XLA does not compile it (its message).
    """
    return Executable(xla_compile(hlo, import_jax().devices("cpu")[0].client), parameters(hlo))


def parameters(hlo: bytes) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Returns the parameters of a serialized `HloModuleProto`, as `Executable` has them.

    Raises:
        ValueError: `hlo` is not a module.
    """
    return tuple(
        (i.name, _NUMPY[proto.ELEMENT_TYPES[i.shape.element_type]], tuple(i.shape.dimensions))
        for i in proto.parameters(proto.entry(proto.parse(hlo)))
    )


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
