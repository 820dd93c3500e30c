"""Shapes and types of ops on each element."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import GLU, UNARY, ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    Inputs,
    Misfit,
    Rule,
    contiguous_but_rows,
    dims,
    elementwise,
    given,
    optional,
    rows_contiguous,
    text,
    want,
    want_type,
)
from kernelgen.ggml.types import TYPES
from kernelgen.plan import Dims


def _unary(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want(rows_contiguous(a), 0, f"the rows of {op}'s input are contiguous: nb0 is {TYPES[a.dtype].size}, not {a.nb[0]}")
    return elementwise(op, inputs, params)


def _binary(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 0, f"src0 of {op}", FLOATS)
    want_type(inputs, 1, f"src1 of {op}", FLOATS)
    for i in range(4):
        want(
            a.ne[i] % b.ne[i] == 0,
            1,
            f"src1 of {op} repeats to fill src0, but ne{i} = {b.ne[i]} does not divide {a.ne[i]}: {dims(b.ne)} in {dims(a.ne)}",
        )
    want(b.dtype in ("f32", a.dtype), 1, f"src1 of {op} is f32 or of src0's type {a.dtype}, not {b.dtype}")
    return a.ne, a.dtype


def _scale(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    padded = a.nb[0] == TYPES[a.dtype].size and all(a.nb[i] == a.nb[i - 1] * a.ne[i - 1] for i in (2, 3))
    want(padded, 0, "src0 of scale is contiguous but for gaps between rows")
    return elementwise(op, inputs, params)


def _clamp(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    if params["min"] > params["max"]:
        raise Misfit("params", "min", f"min is at most max: {params['min']} > {params['max']}")
    return elementwise(op, inputs, params)


def _glu(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    b = optional(inputs, 1)
    want_type(inputs, 0, f"src0 of {op}", frozenset({"f32", "f16"}))
    for i, t in ((0, a), (1, b)):
        want(t is None or contiguous_but_rows(t), i, f"src{i} of {op} is contiguous but for gaps between rows")
    if b is None:
        return (a.ne[0] // 2, *a.ne[1:]), a.dtype
    want(
        b.ne == a.ne and b.dtype == a.dtype,
        1,
        f"src1 of {op} is as src0, {text(a.ne, a.dtype)}, not {text(b.ne, b.dtype)}",
    )
    return a.ne, a.dtype


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("sqr", "sqrt", "log", "sin", "cos"), elementwise),
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(GLU, _glu),
    **dict.fromkeys(("add", "sub", "mul", "div"), _binary),
    "scale": _scale,
    "clamp": _clamp,
}
