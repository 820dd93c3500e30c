"""The language of `@emitter(where=…)`: comparisons that a kernel's sizes and parameters must satisfy for the emitter to accept it.

A comparison has two sides of integers, names, `+ - * // %` and parentheses. The names are `<input>_ne0` to `<input>_ne3`, the sizes
of an input under the emitter's name for it, and the op's integer parameters. A comparison that names an absent input is ignored.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class EmitterCondition:
    """One comparison as written in the emitter's source; `read` has checked it."""

    text: str

    def holds(self, values: Mapping[str, int]) -> bool:
        """Returns whether the comparison holds; it holds if a name has no value or a divisor is 0."""
        comparison = ast.parse(self.text, mode="eval").body
        assert isinstance(comparison, ast.Compare)
        try:
            left, right = (_value(side, values) for side in (comparison.left, comparison.comparators[0]))
        except (KeyError, ZeroDivisionError):
            return True
        return _COMPARE[type(comparison.ops[0])](left, right)


def read(text: str, known: frozenset[str]) -> tuple[EmitterCondition | None, str]:
    """Returns the condition in a text, or None and the problem.

    Args:
        text: such as `x_ne0 <= 4096`.
        known: the valid names.
    """
    wanted = f"where: expected a comparison as 'x_ne0 <= 4096', not '{text}'"
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None, wanted
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _COMPARE:
        return None, wanted
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in known:
            return None, f"where: unknown name '{node.id}' in '{text}'; there are {', '.join(sorted(known))}"
    if not all(map(_is_sum, (tree.left, tree.comparators[0]))):
        return None, wanted
    return EmitterCondition(text), ""


def _is_sum(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BINARY and _is_sum(node.left) and _is_sum(node.right)
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        result: int = _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
        return result
    if isinstance(node, ast.Name):
        return values[node.id]
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value
