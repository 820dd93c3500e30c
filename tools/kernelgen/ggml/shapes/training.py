"""Shapes and types of gradients, losses and the optimizer's steps."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    Inputs,
    Rule,
    contiguous_but_rows,
    dims,
    given,
    rows_contiguous,
    want,
    want_type,
)
from kernelgen.ggml.tensor import Dims
from kernelgen.ggml.types import TYPES

_F32 = frozenset({"f32"})


def _same_shape(inputs: Inputs, first: int, others: tuple[int, ...], names: tuple[str, ...]) -> None:
    a = given(inputs, first)
    for i in others:
        b = given(inputs, i)
        want(b.ne == a.ne, i, f"{names[i]} has the shape of {names[first]}, {dims(a.ne)}, not {dims(b.ne)}")


def _silu_back(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    grad, x = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 0, "grad of silu_back", frozenset({"f32", "f16"}))
    want_type(inputs, 1, "src1 of silu_back", frozenset({grad.dtype}))
    for i, t in ((0, grad), (1, x)):
        want(contiguous_but_rows(t), i, f"src{i} of silu_back is contiguous except for gaps between rows")
    _same_shape(inputs, 0, (1,), ("grad", "src1"))
    return grad.ne, grad.dtype


def _rms_norm_back(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    names = ("grad", "src1")
    for i, name in enumerate(names):
        want_type(inputs, i, f"{name} of rms_norm_back", _F32)
        want(rows_contiguous(given(inputs, i)), i, f"the rows of {name} are contiguous: nb0 is {TYPES['f32'].size}")
    _same_shape(inputs, 0, (1,), names)
    return given(inputs, 0).ne, "f32"


def _cross_entropy_loss(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    _logits(op, inputs, 0)
    return (1, 1, 1, 1), "f32"


def _cross_entropy_loss_back(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    grad = given(inputs, 0)
    want_type(inputs, 0, f"grad of {op}", _F32)
    want(grad.elements == 1, 0, f"grad of {op} is one number, not {dims(grad.ne)}")
    _logits(op, inputs, 1)
    for i in (1, 2):
        want(given(inputs, i).contiguous, i, f"the inputs of {op} are contiguous: leave their strides out")
    return given(inputs, 1).ne, "f32"


def _logits(op: str, inputs: Inputs, first: int) -> None:
    names = (*[""] * first, "logits", "labels")
    for i in (first, first + 1):
        want_type(inputs, i, f"{names[i]} of {op}", _F32)
        want(contiguous_but_rows(given(inputs, i)), i, f"{names[i]} of {op} is contiguous except for gaps between rows")
    _same_shape(inputs, first, (first + 1,), names)


def _opt_step(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    *tensors, last = range(len(inputs))
    names = ("src0", "grad", "m", "v")
    w = given(inputs, 0)
    for i in tensors:
        want_type(inputs, i, f"{names[i]} of {op}", _F32)
        want(rows_contiguous(given(inputs, i)), i, f"the rows of {names[i]} are contiguous: nb0 is {TYPES['f32'].size}")
    _same_shape(inputs, 0, tuple(tensors[1:]), names)
    for i in tensors[1:]:
        # ggml computes one offset for all of them.
        want(given(inputs, i).nb == w.nb, i, f"{names[i]} has the strides of src0, {dims(w.nb)}")
    want_type(inputs, last, f"params of {op}", _F32)
    count = 7 if op == "opt_step_adamw" else 2
    numbers = given(inputs, last)
    want(numbers.elements == count, last, f"params of {op} are {count} numbers, not {numbers.elements}")
    want(numbers.ne[0] == count and numbers.contiguous, last, f"params of {op} are one row, contiguous")
    return w.ne, "f32"


RULES: Mapping[str, Rule] = {
    "silu_back": _silu_back,
    "rms_norm_back": _rms_norm_back,
    "cross_entropy_loss": _cross_entropy_loss,
    "cross_entropy_loss_back": _cross_entropy_loss_back,
    "opt_step_adamw": _opt_step,
    "opt_step_sgd": _opt_step,
}
