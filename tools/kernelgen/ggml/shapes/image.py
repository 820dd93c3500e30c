"""Shapes and types of image ops other than convolution: resizing, padding, windows, embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    ChosenRule,
    Inputs,
    Rule,
    ShapeError,
    at_least,
    dims,
    given,
    want,
    want_output,
    want_type,
)
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES

_F32 = frozenset({"f32"})

Params = Mapping[str, ParamValue]


def _upscale(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    given(inputs, 0)
    want_type(inputs, 0, "src0 of upscale", _F32)
    want_output(output.dtype == "f32", f"the result of upscale is f32, not {output.dtype}")


def _pad(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want(not TYPES[a.dtype].quantized, 0, f"a quantized tensor can't be padded: {a.dtype}")
    ne = []
    for i in range(4):
        left, right = int(params[f"lp{i}"]), int(params[f"rp{i}"])
        ne.append(a.ne[i] + left + right)
        if ne[i] <= 0:
            raise ShapeError(
                "params", f"rp{i}", f"nothing is left of ne{i} = {a.ne[i]} with lp{i} = {left} and rp{i} = {right}"
            )
    return (ne[0], ne[1], ne[2], ne[3]), a.dtype


def _pad_reflect_1d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of pad_reflect_1d", _F32)
    want(a.contiguous, 0, "src0 of pad_reflect_1d is contiguous: leave its strides out")
    total = a.ne[0]
    for name in ("p0", "p1"):
        p = at_least(params, name, 0)
        if p >= a.ne[0]:
            raise ShapeError("params", name, f"{name} is less than ne0 = {a.ne[0]}, not {p}")
        total += p
    return (total, *a.ne[1:]), a.dtype


def _roll(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want(not TYPES[a.dtype].quantized, 0, f"a quantized tensor can't be rolled: {a.dtype}")
    want(a.nb[0] == TYPES[a.dtype].size, 0, f"rows of src0 are contiguous: nb0 is {TYPES[a.dtype].size}, not {a.nb[0]}")
    for i in range(4):
        shift = int(params[f"shift{i}"])
        if abs(shift) >= a.ne[i]:
            raise ShapeError(
                "params", f"shift{i}", f"shift{i} is less than ne{i} = {a.ne[i]} to either side, not {shift}"
            )
    return a.ne, a.dtype


def _timestep_embedding(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of timestep_embedding", _F32)
    at_least(params, "max_period", 1)
    return (at_least(params, "dim", 1), a.ne[0], 1, 1), "f32"


def _win_part(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of win_part", _F32)
    want(a.ne[3] == 1, 0, f"ne3 of src0 is 1, not {a.ne[3]}")
    w = at_least(params, "w", 1)
    for name, n in (("npx", a.ne[1]), ("npy", a.ne[2])):
        if params[name] != -(-n // w):
            raise ShapeError("params", name, f"{n} elements make {-(-n // w)} windows of {w}, not {params[name]}")
    return (a.ne[0], w, w, int(params["npx"]) * int(params["npy"])), "f32"


def _win_unpart(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of win_unpart", _F32)
    w = at_least(params, "w", 1)
    want(a.ne[1:3] == (w, w), 0, f"windows of src0 are {w} by {w}, not {a.ne[1]} by {a.ne[2]}")
    want_output(
        output.dtype == "f32" and output.ne[0] == a.ne[0] and output.ne[3] == 1,
        f"the result of win_unpart is f32 with ne0 = {a.ne[0]} and ne3 = 1, not {output}",
    )
    n = -(-output.ne[1] // w) * -(-output.ne[2] // w)
    want(a.ne[3] >= n, 0, f"an image of {output.ne[1]} by {output.ne[2]} has {n} windows, src0 {a.ne[3]}")


def _get_rel_pos(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of get_rel_pos", frozenset({"f16"}))
    want(a.ne[1] % 2 == 1, 0, f"src0 has a row per distance, 2 * n - 1, not {a.ne[1]}")
    want(a.ne[2:] == (1, 1), 0, f"src0 of get_rel_pos is a matrix, not {dims(a.ne)}")
    n = (a.ne[1] + 1) // 2
    return (a.ne[0], n, n, 1), "f16"


def _add_rel_pos(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a, pw, ph = (given(inputs, i) for i in range(3))
    for i, t in enumerate((a, pw, ph)):
        want_type(inputs, i, f"src{i} of add_rel_pos", _F32)
        want(t.contiguous, i, f"src{i} of add_rel_pos is contiguous: leave its strides out")
    want(pw.ne == ph.ne, 2, f"src2 has the shape of src1, {dims(pw.ne)}, not {dims(ph.ne)}")
    want(pw.ne[3] == a.ne[2], 1, f"ne3 of src1 is ne2 of src0, {a.ne[2]}, not {pw.ne[3]}")
    want(pw.ne[0] ** 2 == a.ne[0], 1, f"ne0 of src0 is the square of src1's, {pw.ne[0] ** 2}, not {a.ne[0]}")
    want(pw.ne[1] * pw.ne[2] == a.ne[1], 1, f"ne1 of src0 is ne1 * ne2 of src1, {pw.ne[1] * pw.ne[2]}, not {a.ne[1]}")
    return a.ne, "f32"


RULES: Mapping[str, Rule] = {
    "pad": _pad,
    "pad_reflect_1d": _pad_reflect_1d,
    "roll": _roll,
    "timestep_embedding": _timestep_embedding,
    "win_part": _win_part,
    "get_rel_pos": _get_rel_pos,
    "add_rel_pos": _add_rel_pos,
}

CHOSEN: Mapping[str, ChosenRule] = {"upscale": _upscale, "win_unpart": _win_unpart}
