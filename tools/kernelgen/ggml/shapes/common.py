"""Common parts of the rules of all families: problems, and helpers for their messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES

Inputs = Sequence[TensorDesc | None]

FLOATS = frozenset({"f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        part: `inputs`, `output` or `params`.
        which: the input's index or the parameter's name; None for the output.
        message: the problem, and the requirement.
    """

    part: str
    which: int | str | None
    message: str


class ShapeError(Exception):
    """Ends a rule at the first problem: later checks would only repeat it."""

    def __init__(self, part: str, which: int | str | None, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(part, which, message)


Rule = Callable[[str, Inputs, Mapping[str, ParamValue]], tuple[Dims, str]]
"""A function of op, inputs and all parameters; returns the result's shape and type, or raises `ShapeError`."""

ChosenRule = Callable[[str, Inputs, TensorDesc, Mapping[str, ParamValue]], None]
"""A rule for an op whose caller chooses the result's shape, from op, inputs, result and parameters; raises `ShapeError`."""


def count(ne: Dims) -> int:
    return ne[0] * ne[1] * ne[2] * ne[3]


def text(ne: Dims, dtype: str) -> str:
    return f"{dims(ne)}/{dtype}"


def dims(ne: Dims) -> str:
    return f"({ne[0]},{ne[1]},{ne[2]},{ne[3]})"


def given(inputs: Inputs, i: int) -> TensorDesc:
    tensor = inputs[i]
    if tensor is None:
        raise ShapeError("inputs", i, "this input can't be absent")
    return tensor


def optional(inputs: Inputs, i: int) -> TensorDesc | None:
    return inputs[i] if i < len(inputs) else None


def want_type(inputs: Inputs, i: int, what: str, allowed: frozenset[str]) -> None:
    tensor = inputs[i]
    if tensor is not None and tensor.dtype not in allowed:
        names = " or ".join(sorted(allowed, key=lambda name: TYPES[name].number))
        raise ShapeError("inputs", i, f"{what} is {names}, not {tensor.dtype}")


def want(condition: bool, i: int, message: str) -> None:
    if not condition:
        raise ShapeError("inputs", i, message)


def at_least(params: Mapping[str, ParamValue], name: str, least: int) -> int:
    """Returns an integer parameter; ggml or its CPU backend requires at least `least`."""
    value = int(params[name])
    if value < least:
        raise ShapeError("params", name, f"{name} is at least {least}, not {value}")
    return value


def want_output(condition: bool, message: str) -> None:
    if not condition:
        raise ShapeError("output", None, message)


def rows_contiguous(t: TensorDesc) -> bool:
    """`ggml_is_contiguous_rows`: the elements of a row are adjacent."""
    return t.ne[0] == TYPES[t.dtype].block or t.nb[0] == TYPES[t.dtype].size


def contiguous_but_rows(t: TensorDesc) -> bool:
    """`ggml_is_contiguous_1`: rows may have gaps between them, outer dimensions may not."""
    return rows_contiguous(t) and all(t.ne[i] == 1 or t.nb[i] == t.nb[i - 1] * t.ne[i - 1] for i in (2, 3))


def elementwise(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, f"src0 of {op}", FLOATS)
    return a.ne, a.dtype
