"""Shapes and types of copies and views."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    ChosenRule,
    Inputs,
    Rule,
    given,
    want,
    want_output,
)
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES


def _dup(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    return a.ne, a.dtype


def _same_elements(op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue]) -> None:
    a = given(inputs, 0)
    if op == "reshape":
        want(a.contiguous, 0, "src0 of reshape is contiguous: leave its strides out, or use cont")
    want_output(
        output.dtype == a.dtype and output.elements == a.elements,
        f"the result of {op} has {a.elements} elements of {a.dtype}, not {output.elements} of {output.dtype}",
    )


def _transpose(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want(not TYPES[a.dtype].quantized, 0, f"a quantized tensor can't be transposed: {a.dtype}")
    return (a.ne[1], a.ne[0], a.ne[2], a.ne[3]), a.dtype


def _cpy(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = given(inputs, 0), given(inputs, 1)
    want(a.elements == b.elements, 1, f"cpy keeps the number of elements: src0 has {a.elements}, dst has {b.elements}")
    return b.ne, b.dtype


RULES: Mapping[str, Rule] = {
    "dup": _dup,
    "transpose": _transpose,
    "cpy": _cpy,
}

CHOSEN: Mapping[str, ChosenRule] = dict.fromkeys(("reshape", "cont"), _same_elements)
