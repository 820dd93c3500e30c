"""Shapes and types of norms and sums of rows."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    Inputs,
    Rule,
    at_least,
    elementwise,
    given,
    want_type,
)
from kernelgen.ggml.tensor import Dims


def _sum_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    ne, dtype = elementwise(op, inputs, params)
    return (1, *ne[1:]), dtype


def _group_norm(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of group_norm", frozenset({"f32"}))
    at_least(params, "n_groups", 1)
    return a.ne, a.dtype


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("norm", "rms_norm", "l2_norm"), elementwise),
    "group_norm": _group_norm,
    "sum_rows": _sum_rows,
}
