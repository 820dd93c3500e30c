"""Shapes and types of systems of linear equations."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import Inputs, Rule, given, want, want_type
from kernelgen.ggml.tensor import Dims


def _solve_tri(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    for i, t in ((0, a), (1, b)):
        want_type(inputs, i, f"src{i} of solve_tri", frozenset({"f32"}))
        want(t.contiguous, i, f"src{i} of solve_tri is contiguous: leave its strides out")
    want(a.ne[0] == a.ne[1], 0, f"src0 of solve_tri has square matrices, not {a.ne[0]} x {a.ne[1]}")
    for d in (1, 2, 3):
        want(a.ne[d] == b.ne[d], 1, f"ne{d} of src1 is that of src0, {a.ne[d]}, not {b.ne[d]}")
    return b.ne, "f32"


RULES: Mapping[str, Rule] = {
    "solve_tri": _solve_tri,
}
