"""Rows by index."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, below, dequantize, example, f32, out, reference, round_to


@reference("get_rows")
def get_rows(spec: KernelSpec, x: Array, rows: Array) -> Array:
    table = x if spec.inputs[0].dtype == "i32" else dequantize(x, spec.inputs[0])
    y = np.empty(spec.output.shape, table.dtype)
    for i3, i2, i in np.ndindex(*y.shape[:3]):
        y[i3, i2, i] = table[i3, i2, rows[0, i3, i2, i]]
    return out(spec, y)


@reference("set_rows")
def set_rows(spec: KernelSpec, x: Array, rows: Array, dst: Array) -> Array:
    y = dst.copy()
    stored = round_to(f32(x), spec.output)
    for i3, i2, i in np.ndindex(*x.shape[:3]):
        y[i3, i2, rows[0, i3 % rows.shape[1], i2 % rows.shape[2], i]] = stored[i3, i2, i]
    return y


@reference("get_rows_back")
def get_rows_back(spec: KernelSpec, x: Array, rows: Array) -> Array:
    y = np.zeros(spec.output.shape, np.float32)
    for i, row in enumerate(rows[0, 0, 0]):
        y[0, 0, row] += f32(x[0, 0, i])
    return y


example("get_rows", inputs=("(256,8,2,3)", "(4,2,3,1)"), values={1: below(8)})
example("set_rows", inputs=("(256,4,2,3)", "(4,2,1,1)", "(256,8,2,3)"), values={1: below(8)})
example("get_rows_back", inputs=("(17,6,1,1)", "(6,1,1,1)"), output="(17,5,1,1)", values={1: below(5)})
