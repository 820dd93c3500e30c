"""Matrix products."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kernelgen.ggml.types import TYPES
from kernelgen.spec.kernel import KernelSpec

from .core import DTYPES, Array, below, dequantize, dot_type, example, f32, out, reference


def factors(spec: KernelSpec, a: Array, b: Array) -> tuple[Array, Array]:
    """Returns the factors as float64: with quantized weights both are rounded to bfloat16, unless F32 is requested.

    With weights in tiles the codes are not rounded, and the scales are float32.
    """
    weights = spec.inputs[0]
    if weights.layout == "f8_e4m3_128x128":
        kept = DTYPES["f32" if dict(spec.params)["prec_src1"] == 10 else "bf16"]
        return in_tiles(dequantize(a, weights)), b.astype(kept).astype(np.float64)
    if not TYPES[weights.dtype].quantized:
        return f32(a).astype(np.float64), dot_type(b, weights).astype(np.float64)
    kept = DTYPES["f32" if dict(spec.params)["prec_src1"] == 10 else "bf16"]
    return dequantize(a, weights).astype(kept).astype(np.float64), b.astype(kept).astype(np.float64)


def in_tiles(values: Array) -> Array:
    """Returns a weight as the layout f8_e4m3_128x128 stores it: each element is a code times its tile's scale, [...,
    ne1, ne0] float64.
    """
    made = np.empty(values.shape, np.float64)
    for r in range(0, values.shape[-2], 128):
        for c in range(0, values.shape[-1], 128):
            for matrix in np.ndindex(*values.shape[:-2]):
                at = (*matrix, slice(r, r + 128), slice(c, c + 128))
                scale = np.abs(values[at]).max() / np.float32(240)
                codes = (values[at] / (scale or np.float32(1))).astype(ml_dtypes.float8_e4m3)
                made[at] = codes.astype(np.float64) * scale
    return made


@reference("mul_mat")
def mul_mat(spec: KernelSpec, a: Array, b: Array) -> Array:
    a, b = factors(spec, a, b)
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
    a, b = factors(spec, a, b)
    y = np.empty(spec.output.shape)
    for t, u in np.ndindex(*ids.shape[2:]):
        y[0, t, u] = a[0, ids[0, 0, t, u]] @ b[0, t, u % b.shape[2]]
    return out(spec, y)


example("mul_mat", inputs=("(512,6,1,2)", "(512,3,4,2)"))
example("out_prod", inputs=("(256,6,1,2)", "(3,6,4,2)"))
example("mul_mat_id", inputs=("(256,6,3,1)", "(256,1,5,1)", "(2,5,1,1)"), values={2: below(3)})
