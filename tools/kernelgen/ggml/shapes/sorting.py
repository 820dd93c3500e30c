"""Shapes and types of sorting rows and finding their largest elements."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import ChosenRule, Inputs, Rule, dims, given, want, want_output, want_type
from kernelgen.ggml.tensor import Dims, TensorDesc


def _argsort(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of argsort", frozenset({"f32"}))
    want(a.ne[0] < 2**31, 0, f"rows of argsort's input have less than 2^31 elements, not {a.ne[0]}")
    return a.ne, "i32"


def _top_k(op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue]) -> None:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of top_k", frozenset({"f32"}))
    want_output(output.dtype == "i32", f"the result of top_k is i32, not {output.dtype}")
    want_output(
        output.ne[1:] == a.ne[1:] and output.ne[0] <= a.ne[0],
        f"the result of top_k has some of src0's {dims(a.ne)} in each row, and as many rows, not {dims(output.ne)}",
    )


RULES: Mapping[str, Rule] = {
    "argsort": _argsort,
}

CHOSEN: Mapping[str, ChosenRule] = {
    "top_k": _top_k,
}
