"""Concatenations, repetitions, regions, diagonals, triangles and constant tensors."""

from __future__ import annotations

import numpy as np

from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, out, reference


@reference("concat")
def concat(spec: KernelSpec, x: Array, y: Array) -> Array:
    # Rows of a quantized tensor are bytes here, so dimension 0 counts bytes.
    return np.concatenate([x, y], axis=3 - int(dict(spec.params)["dim"]))


@reference("repeat")
def repeat(spec: KernelSpec, x: Array) -> Array:
    y = np.empty(spec.output.shape, x.dtype)
    for at in np.ndindex(*y.shape):
        y[at] = x[tuple(i % n for i, n in zip(at, x.shape, strict=True))]
    return y


def _places(spec: KernelSpec, y: Array) -> list[tuple[tuple[int, ...], int]]:
    """Returns (place in `y`, element of the flat destination) for every element of `y`."""
    p = dict(spec.params)
    size = TYPES[spec.output.dtype].size
    strides = (int(p["nb3"]), int(p["nb2"]), int(p["nb1"]), size)
    return [
        (at, (int(p["offset"]) + sum(i * s for i, s in zip(at, strides, strict=True))) // size)
        for at in np.ndindex(*y.shape)
    ]


@reference("acc")
def acc(spec: KernelSpec, x: Array, y: Array) -> Array:
    z = x.copy().reshape(-1)
    for at, i in _places(spec, y):
        z[i] = x.reshape(-1)[i] + y[at]
    return out(spec, z)


@reference("set")
def set_part(spec: KernelSpec, x: Array, y: Array) -> Array:
    z = x.copy().reshape(-1)
    for at, i in _places(spec, y):
        z[i] = y[at]
    return out(spec, z)


@reference("diag")
def diag(spec: KernelSpec, x: Array) -> Array:
    y = np.zeros(spec.output.shape, x.dtype)
    for i3, i2, i in np.ndindex(*y.shape[:3]):
        y[i3, i2, i, i] = x[i3, i2, 0, i]
    return y


@reference("tri")
def tri(spec: KernelSpec, x: Array) -> Array:
    kind = dict(spec.params)["tri_type"]
    y = np.zeros_like(x)
    for i3, i2, row, i in np.ndindex(*x.shape):
        if {0: i >= row, 1: i > row, 2: i <= row, 3: i < row}[kind]:
            y[i3, i2, row, i] = x[i3, i2, row, i]
    return y


@reference("fill")
def fill(spec: KernelSpec, x: Array) -> Array:
    return out(spec, np.full(x.shape, dict(spec.params)["c"]))


@reference("arange")
def arange(spec: KernelSpec) -> Array:
    p = dict(spec.params)
    start, step = np.float32(p["start"]), np.float32(p["step"])
    return out(spec, np.array([start + step * np.float32(i) for i in range(spec.output.ne[0])]))


example("concat", inputs=("(256,4,3,2)", "(256,4,5,2)"), dim=2)
example("repeat", inputs=("(3,4,3,1)",), output="(6,4,9,2)", dtype="same")
example("acc", "set", inputs=("(8,6,4,3)", "(5,4,2,3)"), nb1=32, nb2=192, nb3=768, offset=36)
example("diag", inputs=("(9,1,3,2)",))
example("tri", inputs=("(9,9,3,2)",), tri_type=2)
example("fill", inputs=("(9,4,3,2)",), c=-1.5)
example("arange", inputs=(), output="(12,1,1,1)", start=0.5, stop=4.0, step=0.3)
