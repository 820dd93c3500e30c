"""Copies and views."""

from __future__ import annotations

import numpy as np

from kernelgen.spec.kernel import KernelSpec

from .core import Array, dequantize, example, out, reference, round_to


@reference("cont", "dup", "reshape")
def cont(spec: KernelSpec, x: Array) -> Array:
    return out(spec, x)


@reference("transpose")
def transpose(spec: KernelSpec, x: Array) -> Array:
    return out(spec, np.swapaxes(x, 2, 3))


@reference("cpy")
def cpy(spec: KernelSpec, x: Array, dst: Array) -> Array:
    if spec.inputs[0].dtype == spec.output.dtype:
        return x.reshape(dst.shape)
    x = x if spec.inputs[0].dtype == "i32" else dequantize(x, spec.inputs[0])
    return round_to(x.reshape(spec.output.shape), spec.output)


for _op in ("cont", "dup", "reshape"):
    example(_op, inputs=("(256,4,3,2)",), output="(256,4,3,2)", dtype="same")
example("transpose", inputs=("(256,4,3,2)",))
example("cpy", inputs=("(256,4,3,2)", "(256,4,3,2)"))
