"""Shapes and types of norms and sums of rows."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    Inputs,
    Rule,
    elementwise,
)
from kernelgen.plan import Dims


def _sum_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    ne, dtype = elementwise(op, inputs, params)
    return (1, *ne[1:]), dtype


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("norm", "rms_norm", "l2_norm"), elementwise),
    "sum_rows": _sum_rows,
}
