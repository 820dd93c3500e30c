"""Matrix products."""

from __future__ import annotations

import numpy as np

from kernelgen.plan import KernelSpec

from .core import Array, dequantize, dot_type, example, out, reference


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


example("mul_mat", inputs=("(512,6,1,2)", "(512,3,4,2)"))
