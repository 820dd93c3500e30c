"""Shapes and types of pooling."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    ChosenRule,
    Inputs,
    Rule,
    ShapeError,
    at_least,
    given,
    want,
    want_output,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc

_F32_F16 = frozenset({"f32", "f16"})

Params = Mapping[str, ParamValue]


def _pool_1d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of pool_1d", _F32_F16)
    k, s, p = at_least(params, "k0", 1), at_least(params, "s0", 1), at_least(params, "p0", 0)
    n = (a.ne[0] + 2 * p - k) // s + 1
    want(n > 0, 0, f"src0 is too small for the window: {a.ne[0]} elements, {p} of padding, a window of {k}")
    return (n, *a.ne[1:]), "f32"


def _want_pooled(i: int | None, a: TensorDesc, pooled: TensorDesc, params: Params) -> None:
    """Raises `ShapeError` at input `i`, or the output, unless `pooled` is the result of pool_2d for `a`.

    ggml's padding may be fractional, like 0.5 for one more element in total; op_params has its integer part.
    """
    for axis in (0, 1):
        k, s, p = at_least(params, f"k{axis}", 1), at_least(params, f"s{axis}", 1), at_least(params, f"p{axis}", 0)
        least, most = ((a.ne[axis] + 2 * p + more - k) // s + 1 for more in (0, 1))
        expected = f"{least}" if least == most else f"{least} or {most}"
        if not max(least, 1) <= pooled.ne[axis] <= most:
            raise ShapeError(
                "output" if i is None else "inputs",
                i,
                f"ne{axis} of what is pooled is {expected}, not {pooled.ne[axis]}",
            )
    if pooled.ne[2:] != a.ne[2:] or pooled.dtype != "f32":
        raise ShapeError(
            "output" if i is None else "inputs",
            i,
            f"what is pooled is f32 with ne2, ne3 = {a.ne[2]}, {a.ne[3]}, not {pooled.dtype} with {pooled.ne[2]}, {pooled.ne[3]}",
        )


def _pool_2d(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    want_type(inputs, 0, "src0 of pool_2d", _F32_F16)
    _want_pooled(None, given(inputs, 0), output, params)


def _pool_2d_back(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    gradient, a = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 1, "src1 of pool_2d_back", _F32_F16)
    _want_pooled(0, a, gradient, params)
    want_output(
        output.ne == a.ne and output.dtype == "f32",
        f"the result of pool_2d_back is f32 in the shape of src1, not {output}",
    )


RULES: Mapping[str, Rule] = {"pool_1d": _pool_1d}

CHOSEN: Mapping[str, ChosenRule] = {"pool_2d": _pool_2d, "pool_2d_back": _pool_2d_back}
