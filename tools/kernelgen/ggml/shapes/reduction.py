"""Shapes and types of sums, means, maxima and counts."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    ChosenRule,
    Inputs,
    Rule,
    dims,
    given,
    rows_contiguous,
    want,
    want_output,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES


# ggml's CPU backend, the reference for results, reads rows as if they were contiguous.
def _rows(op: str, inputs: Inputs, allowed: frozenset[str]) -> TensorDesc:
    a = given(inputs, 0)
    want_type(inputs, 0, f"src0 of {op}", allowed)
    want(rows_contiguous(a), 0, f"the rows of {op}'s input are contiguous: nb0 is {TYPES[a.dtype].size}, not {a.nb[0]}")
    return a


def _sum(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    return (1, 1, 1, 1), _rows(op, inputs, FLOATS).dtype


def _mean(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    return (1, *_rows(op, inputs, FLOATS).ne[1:]), "f32"


def _cumsum(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _rows(op, inputs, frozenset({"f32"}))
    return a.ne, a.dtype


def _argmax(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _rows(op, inputs, frozenset({"f32"}))
    want(a.ne[2] == 1 and a.ne[3] == 1, 0, f"src0 of argmax is a matrix, not {dims(a.ne)}")
    want(a.ne[0] < 2**31, 0, f"rows of argmax's input have less than 2^31 elements, not {a.ne[0]}")
    return (a.ne[1], 1, 1, 1), "i32"


def _count_equal(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    for i in (0, 1):
        want_type(inputs, i, f"src{i} of count_equal", frozenset({"i32"}))
    want(a.ne == b.ne, 1, f"src1 of count_equal has the shape of src0, {dims(a.ne)}, not {dims(b.ne)}")
    return (1, 1, 1, 1), "i64"


def _repeat_back(op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue]) -> None:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of repeat_back", FLOATS)
    want_output(output.dtype == a.dtype, f"the result of repeat_back is {a.dtype}, not {output.dtype}")
    for d in range(4):
        want_output(
            a.ne[d] % output.ne[d] == 0,
            f"the result of repeat_back repeats to src0, {dims(a.ne)}, but its ne{d} = {output.ne[d]} does not divide {a.ne[d]}",
        )


def _all_reduce(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of all_reduce", frozenset({"f32"}))
    return a.ne, a.dtype


RULES: Mapping[str, Rule] = {
    "all_reduce": _all_reduce,
    "sum": _sum,
    "mean": _mean,
    "cumsum": _cumsum,
    "argmax": _argmax,
    "count_equal": _count_equal,
}

CHOSEN: Mapping[str, ChosenRule] = {
    "repeat_back": _repeat_back,
}
