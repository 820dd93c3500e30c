"""Shapes and types of rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    Inputs,
    Rule,
    ShapeError,
    dims,
    given,
    optional,
    want,
    want_type,
)
from kernelgen.ggml.tensor import Dims

_MROPE = 8  # the bit that MROPE, vision and IMROPE share


def _rope(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, pos = given(inputs, 0), given(inputs, 1)
    n_dims = int(params["n_dims"])
    want_type(inputs, 0, f"src0 of {op}", frozenset({"f32", "f16"}))
    want_type(inputs, 1, f"pos of {op}", frozenset({"i32"}))
    if n_dims % 2 or not 0 < n_dims <= a.ne[0]:
        raise ShapeError("params", "n_dims", f"n_dims is even and at most ne0 of src0, {a.ne[0]}, not {n_dims}")
    per_token = 4 if int(params["mode"]) & _MROPE else 1
    want(pos.elements == pos.ne[0], 1, f"pos has one dimension, not {dims(pos.ne)}")
    want(
        pos.ne[0] == a.ne[2] * per_token,
        1,
        f"pos holds {a.ne[2] * per_token} positions ({per_token} for each of src0's ne2 = {a.ne[2]} tokens), not {pos.ne[0]}",
    )
    factors = optional(inputs, 2)
    if factors is not None:
        want_type(inputs, 2, f"freq_factors of {op}", frozenset({"f32"}))
        want(
            factors.ne[0] >= n_dims // 2,
            2,
            f"freq_factors has at least n_dims / 2 = {n_dims // 2} values, not {factors.ne[0]}",
        )
    return a.ne, a.dtype


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("rope", "rope_back"), _rope),
}
