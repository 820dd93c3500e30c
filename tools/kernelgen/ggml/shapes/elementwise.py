"""Shapes and types of elementwise ops."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import GLU, UNARY, ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    Inputs,
    Rule,
    ShapeError,
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
from kernelgen.ggml.tensor import Dims
from kernelgen.ggml.types import TYPES


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


def _add1(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    _padded(op, inputs)
    b = given(inputs, 1)
    want(b.elements == 1, 1, f"src1 of add1 is one number, not {dims(b.ne)}")
    return _binary(op, inputs, params)


def _add_id(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b, ids = given(inputs, 0), given(inputs, 1), given(inputs, 2)
    want_type(inputs, 0, "src0 of add_id", frozenset({"f32"}))
    want_type(inputs, 1, "src1 of add_id", frozenset({"f32"}))
    want_type(inputs, 2, "ids of add_id", frozenset({"i32"}))
    want(b.ne[0] == a.ne[0], 1, f"ne0 of src1 is that of src0, {a.ne[0]}, not {b.ne[0]}")
    want(b.ne[2:] == (1, 1), 1, f"src1 is a matrix with a row per id, not {dims(b.ne)}")
    for d in (0, 1):
        want(ids.ne[d] == a.ne[d + 1], 2, f"ne{d} of ids is ne{d + 1} of src0, {a.ne[d + 1]}, not {ids.ne[d]}")
    want(ids.ne[2:] == (1, 1), 2, f"ids is a matrix, not {dims(ids.ne)}")
    return a.ne, a.dtype


def _leaky_relu(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    want_type(inputs, 0, "src0 of leaky_relu", frozenset({"f32", "f16"}))
    want(contiguous_but_rows(given(inputs, 0)), 0, "src0 of leaky_relu is contiguous except for gaps between rows")
    return elementwise(op, inputs, params)


def _padded(op: str, inputs: Inputs) -> None:
    a = given(inputs, 0)
    padded = a.nb[0] == TYPES[a.dtype].size and all(a.nb[i] == a.nb[i - 1] * a.ne[i - 1] for i in (2, 3))
    want(padded, 0, f"src0 of {op} is contiguous except for gaps between rows")


def _scale(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    _padded(op, inputs)
    return elementwise(op, inputs, params)


def _clamp(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    if float(params["min"]) > float(params["max"]):
        raise ShapeError("params", "min", f"min is at most max: {params['min']} > {params['max']}")
    return elementwise(op, inputs, params)


def _glu(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    b = optional(inputs, 1)
    want_type(inputs, 0, f"src0 of {op}", _GLU_TYPES.get(op, FLOATS))
    for i, t in ((0, a), (1, b)):
        want(t is None or contiguous_but_rows(t), i, f"src{i} of {op} is contiguous except for gaps between rows")
    if b is None:
        return (a.ne[0] // 2, *a.ne[1:]), a.dtype
    want(
        b.ne == a.ne and b.dtype == a.dtype,
        1,
        f"src1 of {op} is as src0, {text(a.ne, a.dtype)}, not {text(b.ne, b.dtype)}",
    )
    return a.ne, a.dtype


_GLU_TYPES = {"swiglu_oai": frozenset({"f32"}), "swiglu_clamp": frozenset({"f32", "f16"})}
"""The types that ggml's CPU backend computes, for ops that do not support all."""

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("sqr", "sqrt", "log", "sin", "cos"), elementwise),
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(GLU, _glu),
    **dict.fromkeys(("add", "sub", "mul", "div"), _binary),
    "add1": _add1,
    "add_id": _add_id,
    "leaky_relu": _leaky_relu,
    "scale": _scale,
    "clamp": _clamp,
}
