"""Checks shapes and types of an op: ggml's assertions on a new graph node (ggml.c), as messages.

`check` checks a whole description and returns the parts that do not fit, so that a loader can point at them. It does not depend on
files. Ops without a rule here are accepted. Each family of ops has a module with its rules, named as the module in `kernels/` that
computes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes import (
    attention,
    convolution,
    elementwise,
    hyper_connections,
    image,
    layout,
    linalg,
    matmul,
    movement,
    norm,
    pooling,
    recurrent,
    reduction,
    rope,
    rows,
    sorting,
    training,
)
from kernelgen.ggml.shapes.common import ChosenRule, Inputs, Problem, Rule, ShapeError, text
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import WEIGHTS

__all__ = ["Problem", "check", "result"]

_RULES: Mapping[str, Rule] = {
    **attention.RULES,
    **convolution.RULES,
    **elementwise.RULES,
    **hyper_connections.RULES,
    **image.RULES,
    **layout.RULES,
    **linalg.RULES,
    **matmul.RULES,
    **movement.RULES,
    **norm.RULES,
    **pooling.RULES,
    **recurrent.RULES,
    **reduction.RULES,
    **rope.RULES,
    **rows.RULES,
    **sorting.RULES,
    **training.RULES,
}

_CHOSEN: Mapping[str, ChosenRule] = {
    **convolution.CHOSEN,
    **image.CHOSEN,
    **layout.CHOSEN,
    **movement.CHOSEN,
    **pooling.CHOSEN,
    **reduction.CHOSEN,
    **rows.CHOSEN,
    **sorting.CHOSEN,
}
"""Ops whose caller chooses the result's shape."""


def check(
    op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue], alias: int | None = None
) -> list[Problem]:
    """Returns the problems, empty if ggml would accept such a node.

    Args:
        op: ggml's name of the op (`rms_norm`, `relu`).
        inputs: at least the required ones, in ggml's order.
        output: the result.
        params: all parameters, including defaults.
        alias: the input whose memory holds the result.
    """
    wrong = _check_layouts(op, inputs, output)
    if wrong is not None:
        return [wrong]
    chosen, rule = _CHOSEN.get(op), _RULES.get(op)
    if chosen is None and rule is None:
        return []
    try:
        if chosen is not None:
            chosen(op, inputs, output, params)
        elif rule is not None:
            ne, dtype = rule(op, inputs, params)
            if output.ne != ne or output.dtype != dtype:
                have = text(output.ne, output.dtype)
                raise ShapeError("output", None, f"the result of {op} is {text(ne, dtype)}, not {have}")
        _check_strides(op, inputs, output, alias)
    except ShapeError as misfit:
        return [misfit.problem]
    return []


def _check_layouts(op: str, inputs: Inputs, output: TensorDesc) -> Problem | None:
    """Returns a problem if a tensor has a layout but is not a weight of an op that accepts one."""
    ops = " and ".join(WEIGHTS)
    for i, tensor in enumerate(inputs):
        if tensor is not None and tensor.layout and WEIGHTS.get(op) != i:
            return Problem("inputs", i, f"{tensor.type_text}: only the weights of {ops} have a layout, their input 0")
    return Problem("output", None, f"{output.type_text}: a result has no layout") if output.layout else None


def result(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> TensorDesc | None:
    """Returns ggml's result, or None if the inputs don't fit, or the caller chooses the result's shape."""
    rule = _RULES.get(op)
    if rule is None:
        return None
    try:
        ne, dtype = rule(op, inputs, params)
    except ShapeError:
        return None
    return TensorDesc.make(ne, dtype)


def _check_strides(op: str, inputs: Inputs, output: TensorDesc, alias: int | None) -> None:
    shared = inputs[alias] if alias is not None and alias < len(inputs) else None
    if op == "conv_2d_dw" and output == convolution.channels_last(output):
        return
    if not output.contiguous and (shared is None or shared.nb != output.nb):
        raise ShapeError("output", None, f"the result of {op} is contiguous: leave its strides out")
