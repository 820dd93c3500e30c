"""Which shapes and types fit an op: what ggml asserts when a graph node is made (ggml.c), as messages.

`check` looks at a whole description and names the part that does not fit, so that a loader can point at it. It knows nothing of
files. Ops without a rule here are accepted as they are. Each family of ops has a module with its rules, named as the module in
`kernels/` that computes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes import attention, elementwise, layout, matmul, norm, rope, rows
from kernelgen.ggml.shapes.common import Inputs, Misfit, Problem, Rule, count, text
from kernelgen.plan import Dims, TensorDesc

__all__ = ["Problem", "check", "result"]

_RULES: Mapping[str, Rule] = {
    **attention.RULES,
    **elementwise.RULES,
    **layout.RULES,
    **matmul.RULES,
    **norm.RULES,
    **rope.RULES,
    **rows.RULES,
}

_SHAPE_IS_CHOSEN = frozenset({"reshape", "cont"})
"""Ops whose caller chooses the result's shape; the number of elements is kept."""


def check(
    op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue], alias: int | None = None
) -> list[Problem]:
    """Returns what does not fit, empty when ggml would make such a node.

    Args:
        op: ggml's name of the op (`rms_norm`, `relu`).
        inputs: at least the required ones, in ggml's order.
        output: the result.
        params: all parameters, defaults filled in.
        alias: the input whose memory the result is written to.
    """
    rule = _RULES.get(op)
    if rule is None:
        return []
    try:
        ne, dtype = rule(op, inputs, params)
        _check_output(op, inputs, output, ne, dtype, alias)
    except Misfit as misfit:
        return [misfit.problem]
    return []


def result(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> TensorDesc | None:
    """Returns the result that ggml would make, or None when the inputs don't fit, or the caller chooses the result's shape."""
    rule = _RULES.get(op)
    if rule is None or op in _SHAPE_IS_CHOSEN:
        return None
    try:
        ne, dtype = rule(op, inputs, params)
    except Misfit:
        return None
    return TensorDesc.make(ne, dtype)


def _check_output(op: str, inputs: Inputs, output: TensorDesc, ne: Dims, dtype: str, alias: int | None) -> None:
    if op in _SHAPE_IS_CHOSEN:
        if output.dtype != dtype or output.elements != count(ne):
            raise Misfit(
                "output",
                None,
                f"the result of {op} has {count(ne)} elements of {dtype}, not {output.elements} of {output.dtype}",
            )
    elif output.ne != ne or output.dtype != dtype:
        raise Misfit("output", None, f"the result of {op} is {text(ne, dtype)}, not {text(output.ne, output.dtype)}")
    shared = inputs[alias] if alias is not None and alias < len(inputs) else None
    if not output.contiguous and (shared is None or shared.nb != output.nb):
        raise Misfit("output", None, f"the result of {op} is contiguous: leave its strides out")
