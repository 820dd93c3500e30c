"""Matrix products."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.op_kernel import KernelSpec

from .core import Array, below, dequantize, dot_type, example, f32, out, reference


@reference("mul_mat")
def mul_mat(spec: KernelSpec, a: Array, b: Array) -> Array:
    b = dot_type(b, spec.inputs[0]).astype(np.float64)
    a = dequantize(a, spec.inputs[0]).astype(np.float64)
    y = np.empty((*b.shape[:3], a.shape[2]))
    for i3 in range(b.shape[0]):
        for i2 in range(b.shape[1]):
            matrix = a[i3 * a.shape[0] // b.shape[0], i2 * a.shape[1] // b.shape[1]]
            y[i3, i2] = b[i3, i2] @ matrix.T
    return out(spec, y)


@reference("out_prod")
def out_prod(spec: KernelSpec, a: Array, b: Array) -> Array:
    a, b = dequantize(a, spec.inputs[0]).astype(np.float64), f32(b).astype(np.float64)
    y = np.zeros((*b.shape[:2], b.shape[3], a.shape[3]))
    for i3, i2, k in np.ndindex(*b.shape[:3]):
        row = a[i3 * a.shape[0] // b.shape[0], i2 * a.shape[1] // b.shape[1], k]
        y[i3, i2] += np.outer(b[i3, i2, k], row)
    return out(spec, y)


@reference("mul_mat_id")
def mul_mat_id(spec: KernelSpec, a: Array, b: Array, ids: Array) -> Array:
    b = dot_type(b, spec.inputs[0]).astype(np.float64)
    a = dequantize(a, spec.inputs[0]).astype(np.float64)
    y = np.empty(spec.output.shape)
    for t, u in np.ndindex(*ids.shape[2:]):
        y[0, t, u] = a[0, ids[0, 0, t, u]] @ b[0, t, u % b.shape[2]]
    return out(spec, y)


example("mul_mat", inputs=("(512,6,1,2)", "(512,3,4,2)"))
example("out_prod", inputs=("(256,6,1,2)", "(3,6,4,2)"))
example("mul_mat_id", inputs=("(256,6,3,1)", "(256,1,5,1)", "(2,5,1,1)"), values={2: below(3)})
