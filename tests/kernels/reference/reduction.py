"""Sums, means, maxima and counts."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, example, f32, out, reference


@reference("sum")
def sum_all(spec: KernelSpec, x: Array) -> Array:
    return out(spec, f32(x.astype(np.float64).sum(keepdims=True)))


@reference("mean")
def mean(spec: KernelSpec, x: Array) -> Array:
    return out(spec, f32(x.astype(np.float64).sum(axis=3)) / np.float32(x.shape[3]))


@reference("cumsum")
def cumsum(spec: KernelSpec, x: Array) -> Array:
    y = x.copy()
    for i in range(1, x.shape[3]):
        y[..., i] = y[..., i - 1] + x[..., i]
    return out(spec, y)


@reference("argmax")
def argmax(spec: KernelSpec, x: Array) -> Array:
    y = np.zeros(x.shape[2], np.int32)
    for row in range(x.shape[2]):
        top = -np.inf
        for i, value in enumerate(x[0, 0, row]):
            top = max(top, value)
            if top == value:
                y[row] = i
    return out(spec, y)


@reference("count_equal")
def count_equal(spec: KernelSpec, x: Array, y: Array) -> Array:
    return out(spec, np.array([sum(int(a == b) for a, b in zip(x.flat, y.flat, strict=True))], np.int64))


@reference("repeat_back")
def repeat_back(spec: KernelSpec, x: Array) -> Array:
    y = np.zeros(spec.output.shape)
    for at in np.ndindex(*x.shape):
        y[tuple(i % n for i, n in zip(at, y.shape, strict=True))] += x[at]
    return out(spec, f32(y))


example("sum", "mean", inputs=("(33,4,3,2)",))
example("cumsum", inputs=("(33,4,3,2)",))
example("argmax", inputs=("(33,4,1,1)",))
example(
    "count_equal",
    inputs=("(33,4,3,2)", "(33,4,3,2)"),
    values={i: lambda rng, shape: rng.integers(0, 3, shape) for i in (0, 1)},
)
example("repeat_back", inputs=("(6,4,9,2)",), output="(3,4,3,1)", dtype="same")
