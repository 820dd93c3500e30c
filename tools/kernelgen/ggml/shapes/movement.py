"""Shapes and types of tensors composed of parts of others, of one value, or of none."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue, f32_bits, f32_from_bits
from kernelgen.ggml.shapes.common import (
    ChosenRule,
    Inputs,
    Rule,
    ShapeError,
    dims,
    given,
    want,
    want_output,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES


def _concat(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    want(a.dtype == b.dtype, 1, f"src1 of concat has the type of src0, {a.dtype}, not {b.dtype}")
    dim = int(params["dim"])
    ne = list(a.ne)
    for d in range(4):
        want(d == dim or a.ne[d] == b.ne[d], 1, f"ne{d} of src1 is that of src0, {a.ne[d]}, not {b.ne[d]}")
    ne[dim] += b.ne[dim]
    return (ne[0], ne[1], ne[2], ne[3]), a.dtype


def _repeat(op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue]) -> None:
    a = given(inputs, 0)
    want_output(output.dtype == a.dtype, f"the result of repeat is {a.dtype}, not {output.dtype}")
    for d in range(4):
        want_output(
            output.ne[d] % a.ne[d] == 0,
            f"src0 of repeat fills the result, {dims(output.ne)}, but its ne{d} = {a.ne[d]} does not divide {output.ne[d]}",
        )


def _region(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    allowed = frozenset({"f32"}) if op == "acc" else frozenset({"f32", "i32"})
    want_type(inputs, 0, f"src0 of {op}", allowed)
    want(b.dtype == a.dtype, 1, f"src1 of {op} has the type of src0, {a.dtype}, not {b.dtype}")
    want(a.contiguous, 0, f"src0 of {op} is contiguous: leave its strides out")
    size = TYPES[a.dtype].size
    names = ("nb1", "nb2", "nb3", "offset")
    for name in names:
        if params[name] % size:
            raise ShapeError("params", name, f"{name} is a multiple of the element's {size} bytes, not {params[name]}")
    end = int(params["offset"]) + size
    for n, stride in zip(b.ne, (size, *(int(params[name]) for name in names[:3])), strict=True):
        end += (n - 1) * stride
    if end > a.elements * size:
        raise ShapeError(
            "params",
            "offset",
            f"src1 with these strides ends at byte {end}, beyond the {a.elements * size} bytes of src0",
        )
    return a.ne, a.dtype


def _diag(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of diag", frozenset({"f32"}))
    want(a.ne[1] == 1, 0, f"src0 of diag has one row per matrix: ne1 is 1, not {a.ne[1]}")
    return (a.ne[0], a.ne[0], a.ne[2], a.ne[3]), a.dtype


def _tri(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of tri", frozenset({"f32"}))
    want(a.contiguous, 0, "src0 of tri is contiguous: leave its strides out")
    want(a.ne[0] == a.ne[1], 0, f"src0 of tri has square matrices, not {a.ne[0]} x {a.ne[1]}")
    return a.ne, a.dtype


def _fill(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of fill", frozenset({"f32", "f16"}))
    want(a.contiguous, 0, "src0 of fill is contiguous: leave its strides out")
    return a.ne, a.dtype


def _arange(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    start, stop, step = (float(params[name]) for name in ("start", "stop", "step"))
    if not stop > start:
        raise ShapeError("params", "stop", f"stop is larger than start: {stop} <= {start}")
    if not step > 0:
        raise ShapeError("params", "step", f"step is larger than 0, not {step}")
    if not (stop - start) / step < 2**31:
        raise ShapeError("params", "step", f"from {start} to {stop} by {step} are more than 2^31 elements")
    # ggml counts in binary32.
    n = math.ceil(_binary32(_binary32(stop - start) / step))
    return (n, 1, 1, 1), "f32"


def _binary32(x: float) -> float:
    return f32_from_bits(f32_bits(x))


RULES: Mapping[str, Rule] = {
    "arange": _arange,
    "concat": _concat,
    **dict.fromkeys(("acc", "set"), _region),
    "diag": _diag,
    "tri": _tri,
    "fill": _fill,
}

CHOSEN: Mapping[str, ChosenRule] = {
    "repeat": _repeat,
}
