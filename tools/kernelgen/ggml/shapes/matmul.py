"""Shapes and types of matrix products."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    Inputs,
    Rule,
    given,
    want,
    want_type,
)
from kernelgen.plan import Dims, TensorDesc


def matrix_product(a: TensorDesc, b: TensorDesc, i: int, names: tuple[str, str]) -> None:
    """`ggml_can_mul_mat`, reported at input `i`."""
    first, second = names
    want(
        a.ne[0] == b.ne[0],
        i,
        f"the inner dimensions differ: ne0 of {first} is {a.ne[0]}, ne0 of {second} is {b.ne[0]}",
    )
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


RULES: Mapping[str, Rule] = {
    "mul_mat": _mul_mat,
}
