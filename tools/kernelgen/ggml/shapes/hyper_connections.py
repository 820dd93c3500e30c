"""Shapes and types of hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    Inputs,
    Rule,
    dims,
    given,
    optional,
    want,
    want_type,
)
from kernelgen.ggml.tensor import Dims

_F32 = frozenset({"f32"})
_MIX = 24  # (2 + hc) * hc for ggml's four streams


def _shape(inputs: Inputs, i: int, name: str, ne: Dims) -> None:
    want_type(inputs, i, name, _F32)
    have = given(inputs, i).ne
    want(have == ne, i, f"{name} is {dims(ne)}, not {dims(have)}")


def _pre(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    x = given(inputs, 0)
    want_type(inputs, 0, "x", _F32)
    n_embd, streams, n_tokens, _ = x.ne
    want(x.ne[3] == 1, 0, f"ne3 of x is 1, not {x.ne[3]}")
    if params["gated"]:
        _shape(inputs, 1, "weights, gated,", x.ne)
    else:
        _shape(inputs, 1, "weights", (streams, n_tokens, 1, 1))
    return (n_embd, n_tokens, 1, 1), "f32"


def _comb(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    mixes, scale = given(inputs, 0), given(inputs, 1)
    n_tokens = mixes.ne[1]
    _shape(inputs, 0, "mixes", (_MIX, n_tokens, 1, 1))
    want_type(inputs, 1, "scale", _F32)
    want(
        scale.ne[0] >= 3 and scale.elements == scale.ne[0],
        1,
        f"scale is a vector of 3 values or more, not {dims(scale.ne)}",
    )
    _shape(inputs, 2, "base", (_MIX, 1, 1, 1))
    return (4, 4, n_tokens, 1), "f32"


def _post(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    x, residual = given(inputs, 0), given(inputs, 1)
    n_embd, n_tokens = x.ne[:2]
    streams = residual.ne[1]
    _shape(inputs, 0, "x", (n_embd, n_tokens, 1, 1))
    _shape(inputs, 1, "residual", (n_embd, streams, n_tokens, 1))
    _shape(inputs, 2, "post", (streams, n_tokens, 1, 1))
    if optional(inputs, 3) is not None:
        _shape(inputs, 3, "comb", (streams, streams, n_tokens, 1))
    return residual.ne, "f32"


RULES: Mapping[str, Rule] = {
    "dsv4_hc_pre": _pre,
    "dsv4_hc_comb": _comb,
    "dsv4_hc_post": _post,
}
