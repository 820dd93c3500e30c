"""Shapes and types of softmax, masks and attention."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    Inputs,
    Rule,
    ShapeError,
    dims,
    given,
    optional,
    want,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES


def max_bias(inputs: Inputs, mask: int, params: Mapping[str, ParamValue]) -> None:
    if float(params["max_bias"]) > 0 and optional(inputs, mask) is None:
        raise ShapeError("params", "max_bias", "max_bias (ALiBi) needs a mask")


def sinks_fit(inputs: Inputs, i: int, heads: int) -> None:
    sinks = optional(inputs, i)
    if sinks is not None:
        want_type(inputs, i, "sinks", frozenset({"f32"}))
        want(sinks.ne[0] == heads, i, f"sinks has one value per head, {heads}, not {sinks.ne[0]}")


def mask_repeats(a: TensorDesc, mask: TensorDesc, i: int, name: str) -> None:
    want(mask.contiguous, i, "the mask is contiguous: leave its strides out")
    for d in (2, 3):
        want(
            a.ne[d] % mask.ne[d] == 0,
            i,
            f"the mask repeats along dimension {d}, but {mask.ne[d]} does not divide {name}'s {a.ne[d]}",
        )


def _soft_max(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of soft_max", frozenset({"f32"}))
    want(a.contiguous, 0, "src0 of soft_max is contiguous: leave its strides out")
    mask = optional(inputs, 1)
    if mask is not None:
        want_type(inputs, 1, "the mask of soft_max", frozenset({"f32", "f16"}))
        want(mask.ne[0] == a.ne[0], 1, f"ne0 of the mask is that of src0, {a.ne[0]}, not {mask.ne[0]}")
        want(mask.ne[1] >= a.ne[1], 1, f"ne1 of the mask is at least that of src0, {a.ne[1]}, not {mask.ne[1]}")
        mask_repeats(a, mask, 1, "src0")
    max_bias(inputs, 1, params)
    sinks_fit(inputs, 2, a.ne[2])
    return a.ne, a.dtype


def _soft_max_back(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    grad, y = given(inputs, 0), given(inputs, 1)
    for i, (t, name) in enumerate(((grad, "grad"), (y, "y"))):
        want_type(inputs, i, f"{name} of soft_max_back", frozenset({"f32"}))
        want(t.contiguous, i, f"{name} of soft_max_back is contiguous: leave its strides out")
    want(y.ne == grad.ne, 1, f"y of soft_max_back is as grad, {dims(grad.ne)}, not {dims(y.ne)}")
    return grad.ne, grad.dtype


def _diag_mask(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, f"src0 of {op}", frozenset({"f32"}))
    want(a.contiguous, 0, f"src0 of {op} is contiguous: leave its strides out")
    return a.ne, a.dtype


def _flash_attn_ext(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    q, k, v = given(inputs, 0), given(inputs, 1), given(inputs, 2)
    want_type(inputs, 0, "q", frozenset({"f32"}))
    for i, t in ((1, k), (2, v)):
        want(
            t.dtype in FLOATS or TYPES[t.dtype].quantized,
            i,
            f"{'kv'[i - 1]} is a float or quantized type, not {t.dtype}",
        )
    want(k.ne[0] == q.ne[0], 1, f"k has q's head size (ne0) {q.ne[0]}, not {k.ne[0]}")
    want(
        q.ne[2] % k.ne[2] == 0,
        1,
        f"q's {q.ne[2]} heads (ne2) are a multiple of k's, and {k.ne[2]} does not divide them",
    )
    want(k.ne[3] == q.ne[3], 1, f"ne3 of k is that of q, {q.ne[3]}, not {k.ne[3]}")
    want(v.ne[1] == k.ne[1], 2, f"v has as many positions (ne1) as k, {k.ne[1]}, not {v.ne[1]}")
    want(v.ne[2] == k.ne[2], 2, f"v has as many heads (ne2) as k, {k.ne[2]}, not {v.ne[2]}")
    want(v.ne[3] == q.ne[3], 2, f"ne3 of v is that of q, {q.ne[3]}, not {v.ne[3]}")
    mask = optional(inputs, 3)
    if mask is not None:
        want_type(inputs, 3, "the mask of flash_attn_ext", frozenset({"f16"}))
        want(mask.ne[0] == k.ne[1], 3, f"ne0 of the mask is k's ne1, {k.ne[1]}, not {mask.ne[0]}")
        want(mask.ne[1] >= q.ne[1], 3, f"ne1 of the mask is at least q's, {q.ne[1]}, not {mask.ne[1]}")
        mask_repeats(q, mask, 3, "q")
    max_bias(inputs, 3, params)
    if params.get("causal"):
        if mask is None:
            raise ShapeError("params", "causal", "causal needs a mask")
        if k.ne[1] < q.ne[1]:
            raise ShapeError("params", "causal", f"causal needs as many keys as tokens, {q.ne[1]}, not {k.ne[1]}")
    sinks_fit(inputs, 4, q.ne[2])
    return (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), "f32"


def _lightning_indexer(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    q, k, weights, mask = (given(inputs, i) for i in range(4))
    want_type(inputs, 0, "q", frozenset({"f32"}))
    want(k.dtype in FLOATS or TYPES[k.dtype].quantized, 1, f"k is a float or quantized type, not {k.dtype}")
    want_type(inputs, 2, "weights", frozenset({"f32"}))
    want_type(inputs, 3, "the mask of lightning_indexer", frozenset({"f16"}))
    size, heads, n, streams = q.ne
    want(k.ne[0] == size, 1, f"k has q's head size (ne0) {size}, not {k.ne[0]}")
    want(k.ne[1] == 1, 1, f"k has one head (ne1), not {k.ne[1]}")
    want(k.ne[3] == streams, 1, f"ne3 of k is that of q, {streams}, not {k.ne[3]}")
    want(
        weights.ne == (heads, n, 1, streams),
        2,
        f"weights has a value for each of q's heads and tokens, {dims((heads, n, 1, streams))}, not {dims(weights.ne)}",
    )
    want(
        mask.ne[:3] == (k.ne[2], n, 1),
        3,
        f"the mask has a value for each of k's rows (ne2) and q's tokens, {dims((k.ne[2], n, 1, mask.ne[3]))}, not {dims(mask.ne)}",
    )
    want(
        streams % mask.ne[3] == 0,
        3,
        f"the mask repeats along dimension 3, but {mask.ne[3]} does not divide q's {streams}",
    )
    return (k.ne[2], n, 1, streams), "f32"


RULES: Mapping[str, Rule] = {
    "soft_max": _soft_max,
    "soft_max_back": _soft_max_back,
    **dict.fromkeys(("diag_mask_inf", "diag_mask_zero"), _diag_mask),
    "flash_attn_ext": _flash_attn_ext,
    "lightning_indexer": _lightning_indexer,
}
