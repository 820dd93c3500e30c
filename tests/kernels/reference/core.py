"""Shared by the references: their registry, ggml's types in NumPy, and an example of shapes for each op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

from .quantize import QUANTIZE

Array = np.ndarray[Any, Any]

DTYPES: dict[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
}

REFERENCES: dict[str, Callable[..., Array]] = {}


def reference(*ops: str) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    def add(function: Callable[..., Array]) -> Callable[..., Array]:
        for op in ops:
            REFERENCES[op] = function
        return function

    return add


@dataclass(frozen=True)
class Example:
    """Shapes with which a test runs every combination of an emitter's registered types.

    Attributes:
        inputs: ggml's dimensions of each input, `(256,8,1,1)`; None for an absent input.
        output: the result's dimensions; None if `kernelgen.ggml.shapes` computes them, or if they are the first input's.
        dtype: the result's type, with `output`.
        limit: the largest normalized mean squared error.
        params: the op's parameters.
        values: functions that make the values of an input, by its index, from a generator and the shape `[ne3, ne2, ne1, ne0]`;
            the default is normal numbers, small integers or random blocks.
    """

    inputs: tuple[str | None, ...]
    output: str | None
    dtype: str
    limit: float
    params: dict[str, float]
    values: dict[int, Callable[[np.random.Generator, tuple[int, ...]], Array]]


EXAMPLES: dict[str, Example] = {}


def example(
    *ops: str,
    inputs: tuple[str | None, ...],
    output: str | None = None,
    dtype: str = "f32",
    limit: float = 1e-6,
    values: dict[int, Callable[[np.random.Generator, tuple[int, ...]], Array]] | None = None,
    **params: float,
) -> None:
    """Registers the example of some ops; see `Example`."""
    for op in ops:
        EXAMPLES[op] = Example(inputs, output, dtype, limit, params, values or {})


def below(n: int) -> Callable[[np.random.Generator, tuple[int, ...]], Array]:
    """Returns a function that makes indices below `n`, distinct in the last axis if possible."""

    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        if shape[-1] > n:
            return rng.integers(0, n, shape)
        return np.stack([rng.permutation(n)[: shape[-1]] for _ in range(int(np.prod(shape[:-1])))]).reshape(shape)

    return make


def compute(spec: KernelSpec, inputs: list[Array | None]) -> Array:
    """Returns ggml's result in the output's type and shape; bytes per row for a quantized type."""
    return REFERENCES[spec.op](spec, *inputs)


def dequantize(x: Array, tensor: TensorDesc) -> Array:
    """Returns float32 elements; ggml's own Python package decodes the types that it supports."""
    if not TYPES[tensor.dtype].quantized:
        return x.astype(np.float32)
    if tensor.dtype in ("q1_0", "q2_0"):
        return dequantize_bits(x, tensor)
    rows = x.reshape(*x.shape[:3], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(TYPES[tensor.dtype].number)).astype(np.float32)


def dequantize_bits(x: Array, tensor: TensorDesc) -> Array:
    """Returns the float32 elements of Q1_0 and Q2_0 (`dequantize_row_q1_0`): a scale, and 1 or 2 bits per element,
    lowest first.
    """
    ggml = TYPES[tensor.dtype]
    bits = 1 if tensor.dtype == "q1_0" else 2
    blocks = x.reshape(-1, ggml.size)
    y = np.empty((len(blocks), ggml.block), np.float32)
    for i, block in enumerate(blocks):
        d = np.float32(block[:2].view(np.float16)[0])
        for j in range(ggml.block):
            q = int(block[2 + j * bits // 8]) >> (j * bits % 8) & (2**bits - 1)
            y[i, j] = d * np.float32(2 * q - 1 if bits == 1 else q - 1)
    return y.reshape(tensor.shape)


def round_to(x: Array, tensor: TensorDesc) -> Array:
    """Returns `x` in the form that the tensor stores."""
    ggml = TYPES[tensor.dtype]
    if not ggml.quantized:
        return x.astype(DTYPES[tensor.dtype])
    x = np.ascontiguousarray(x, np.float32)
    if tensor.dtype in QUANTIZE:
        return QUANTIZE[tensor.dtype](x.reshape(*x.shape[:-1], -1, ggml.block)).reshape(*x.shape[:-1], -1)
    return gguf.quants.quantize(x, gguf.GGMLQuantizationType(ggml.number))


def f32(x: Array) -> Array:
    return x.astype(np.float32)


def out(spec: KernelSpec, x: Array) -> Array:
    return round_to(x.reshape(spec.output.shape), spec.output)


def dot_type(x: Array, tensor: TensorDesc) -> Array:
    """Returns the second operand of a dot product, rounded as the CPU rounds it for a first operand of this type."""
    return f32(x) if TYPES[tensor.dtype].quantized else f32(x.astype(DTYPES[tensor.dtype]))
