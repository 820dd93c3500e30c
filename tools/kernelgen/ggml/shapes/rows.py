"""Shapes and types of reading and writing rows by index."""

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


def _get_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, rows = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 1, "rows of get_rows", frozenset({"i32"}))
    for d in (1, 2):
        want(
            rows.ne[d] == a.ne[d + 1],
            1,
            f"ne{d} of rows is ne{d + 1} of src0, {a.ne[d + 1]}, not {rows.ne[d]}",
        )
    want(rows.ne[3] == 1, 1, f"ne3 of rows is 1, not {rows.ne[3]}")
    return (a.ne[0], rows.ne[0], rows.ne[1], rows.ne[2]), "i32" if a.dtype == "i32" else "f32"


def _set_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    src, rows, dst = given(inputs, 0), given(inputs, 1), given(inputs, 2)
    want_type(inputs, 0, "src0 of set_rows", frozenset({"f32", "f16"}))
    want_type(inputs, 1, "rows of set_rows", frozenset({"i32", "i64"}))
    for d in (0, 2, 3):
        want(src.ne[d] == dst.ne[d], 2, f"ne{d} of dst is that of src0, {src.ne[d]}, not {dst.ne[d]}")
    want(rows.ne[0] == src.ne[1], 1, f"rows has one index per row of src0, {src.ne[1]}, not {rows.ne[0]}")
    for d in (1, 2):
        want(
            src.ne[d + 1] % rows.ne[d] == 0,
            1,
            f"rows repeats to fill src0, but its ne{d} = {rows.ne[d]} does not divide {src.ne[d + 1]}",
        )
    want(rows.ne[3] == 1, 1, f"ne3 of rows is 1, not {rows.ne[3]}")
    want(rows_contiguous(src), 0, f"the rows of src0 are contiguous: nb0 is {TYPES[src.dtype].size}, not {src.nb[0]}")
    want(rows_contiguous(dst), 2, f"the rows of dst are contiguous: nb0 is {TYPES[dst.dtype].size}, not {dst.nb[0]}")
    return dst.ne, dst.dtype


def _get_rows_back(op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue]) -> None:
    a, rows = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 0, "src0 of get_rows_back", FLOATS)
    want_type(inputs, 1, "rows of get_rows_back", frozenset({"i32"}))
    want(a.ne[2] == 1 and a.ne[3] == 1, 0, f"src0 of get_rows_back is a matrix, not {dims(a.ne)}")
    want(rows.ne[1:] == (1, 1, 1), 1, f"rows of get_rows_back is one row, not {dims(rows.ne)}")
    want(rows.ne[0] <= a.ne[1], 1, f"rows has at most one index per row of src0, {a.ne[1]}, not {rows.ne[0]}")
    want_output(
        output.dtype == "f32" and output.ne[0] == a.ne[0] and output.ne[2:] == (1, 1),
        f"the result of get_rows_back is a matrix of f32 with rows of {a.ne[0]}, not {dims(output.ne)} of {output.dtype}",
    )


RULES: Mapping[str, Rule] = {
    "get_rows": _get_rows,
    "set_rows": _set_rows,
}

CHOSEN: Mapping[str, ChosenRule] = {
    "get_rows_back": _get_rows_back,
}
