"""Shapes and types of matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    Inputs,
    Rule,
    dims,
    given,
    want,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES


def matrix_product(a: TensorDesc, b: TensorDesc, i: int, names: tuple[str, str]) -> None:
    """`ggml_can_mul_mat`, reported at input `i`."""
    first, second = names
    want(
        a.ne[0] == b.ne[0],
        i,
        f"the inner dimensions differ: ne0 of {first} is {a.ne[0]}, ne0 of {second} is {b.ne[0]}",
    )
    repeats(a, b, i, names)


def repeats(a: TensorDesc, b: TensorDesc, i: int, names: tuple[str, str]) -> None:
    """Requires that each matrix of `a` serves equally many of `b`; reports a problem at input `i`."""
    first, second = names
    for d in (2, 3):
        want(
            b.ne[d] % a.ne[d] == 0,
            i,
            f"{first} is repeated along dimension {d}, but {a.ne[d]} does not divide {second}'s {b.ne[d]}",
        )


def _mul_mat(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    want(
        not a.dtype.startswith("i") or a.dtype.startswith("iq"),
        0,
        f"src0 of mul_mat is a float or quantized type, not {a.dtype}",
    )
    want_type(inputs, 1, "src1 of mul_mat", FLOATS)
    matrix_product(a, b, 1, ("src0", "src1"))
    want(a.nb[0] <= a.nb[1], 0, f"src0 of mul_mat can't be transposed: nb0 {a.nb[0]} > nb1 {a.nb[1]}")
    return (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), "f32"


def _mul_mat_id(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b, ids = (given(inputs, i) for i in range(3))
    want(
        a.dtype in FLOATS or TYPES[a.dtype].quantized,
        0,
        f"as of mul_mat_id is a float or quantized type, not {a.dtype}",
    )
    want_type(inputs, 1, "b of mul_mat_id", FLOATS)
    want_type(inputs, 2, "ids of mul_mat_id", frozenset({"i32"}))
    want(a.ne[3] == 1, 0, f"as has one matrix per expert along dimension 2, so ne3 is 1, not {a.ne[3]}")
    want(a.nb[0] <= a.nb[1], 0, f"as of mul_mat_id can't be transposed: nb0 {a.nb[0]} > nb1 {a.nb[1]}")
    want(b.ne[3] == 1, 1, f"ne3 of b is 1, not {b.ne[3]}")
    want(a.ne[0] == b.ne[0], 1, f"the inner dimensions differ: ne0 of as is {a.ne[0]}, ne0 of b is {b.ne[0]}")
    want(ids.ne[2:] == (1, 1), 2, f"ids is (experts used, tokens), not {dims(ids.ne)}")
    want(ids.ne[1] == b.ne[2], 2, f"ids has a list per token of b, {b.ne[2]}, not {ids.ne[1]}")
    want(
        ids.ne[0] % b.ne[1] == 0,
        1,
        f"b is repeated for the experts used, but its ne1 = {b.ne[1]} does not divide {ids.ne[0]}",
    )
    return (a.ne[1], ids.ne[0], b.ne[2], 1), "f32"


def _out_prod(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    want(
        a.dtype in FLOATS or TYPES[a.dtype].quantized,
        0,
        f"src0 of out_prod is a float or quantized type, not {a.dtype}",
    )
    want_type(inputs, 1, "src1 of out_prod", FLOATS)
    want(a.ne[1] == b.ne[1], 1, f"the summed dimensions differ: ne1 of src0 is {a.ne[1]}, ne1 of src1 is {b.ne[1]}")
    repeats(a, b, 1, ("src0", "src1"))
    want(a.nb[0] <= a.nb[1], 0, f"src0 of out_prod can't be transposed: nb0 {a.nb[0]} > nb1 {a.nb[1]}")
    return (a.ne[0], b.ne[0], b.ne[2], b.ne[3]), "f32"


RULES: Mapping[str, Rule] = {
    "mul_mat": _mul_mat,
    "mul_mat_id": _mul_mat_id,
    "out_prod": _out_prod,
}
