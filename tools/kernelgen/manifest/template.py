"""`${…}` in a manifest's text: batch variables and integer arithmetic.

An expression has variables, integers, `+ - * //` and parentheses; nothing else is evaluated.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping

Value = int | float | str

_HOLE = re.compile(r"\$\{([^{}]*)\}")
_MAX_EXPRESSION = 100
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_HINT = "an expression has variables, integers, + - * // and ( )"


class TemplateError(ValueError):
    """A text is not a template, or can't be filled in with the given values."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Template:
    """A text with holes.

    Attributes:
        text: as written.
        names: the variables it uses, in order of appearance.
    """

    def __init__(self, text: str) -> None:
        """Parses `text`.

        Raises:
            TemplateError: a hole is not closed, or holds something that is not an expression.
        """
        self.text = text
        self.names: list[str] = []
        self._parts: list[str | ast.expr] = []
        at = 0
        for hole in _HOLE.finditer(text):
            self._parts.append(text[at : hole.start()])
            self._parts.append(self._expression(hole.group(1)))
            at = hole.end()
        rest = text[at:]
        if "${" in "".join(p for p in self._parts if isinstance(p, str)) + rest:
            raise TemplateError("'${' without its '}'", "write ${n}")
        self._parts.append(rest)
        self._whole = len(self._parts) == 3 and not self._parts[0] and not rest

    def fill(self, values: Mapping[str, Value]) -> Value:
        """Returns the text with every hole replaced; a text that is one hole gives the hole's value with its type.

        Raises:
            TemplateError: arithmetic with a value that is not an integer, a division by 0, or a result that is too large.
        """
        filled = [p if isinstance(p, str) else _evaluate(p, values) for p in self._parts]
        return filled[1] if self._whole else "".join(map(str, filled))

    def _expression(self, text: str) -> ast.expr:
        if len(text) > _MAX_EXPRESSION:
            raise TemplateError(f"an expression has at most {_MAX_EXPRESSION} characters, not {len(text)}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # `2and` is refused without a warning
                body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError):
            raise TemplateError(f"'{text}' is not an expression", _HINT) from None
        for node in ast.walk(body):
            if isinstance(node, ast.Name):
                if node.id not in self.names:
                    self.names.append(node.id)
            elif isinstance(node, ast.BinOp):
                if type(node.op) not in _OPERATORS:
                    raise TemplateError(f"'{text}' is not an expression", _HINT)
            elif isinstance(node, ast.UnaryOp):
                if not isinstance(node.op, ast.USub):
                    raise TemplateError(f"'{text}' is not an expression", _HINT)
            elif isinstance(node, ast.Constant):
                if type(node.value) is not int:
                    raise TemplateError(f"'{text}' is not an expression", _HINT)
            elif not isinstance(node, ast.expr_context | ast.operator | ast.unaryop):
                raise TemplateError(f"'{text}' is not an expression", _HINT)
        return body


def _evaluate(node: ast.expr, values: Mapping[str, Value]) -> Value:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return node.value
    if isinstance(node, ast.UnaryOp):
        return -_integer(_evaluate(node.operand, values))
    assert isinstance(node, ast.BinOp)
    left, right = _integer(_evaluate(node.left, values)), _integer(_evaluate(node.right, values))
    if isinstance(node.op, ast.FloorDiv) and right == 0:
        raise TemplateError(f"'{ast.unparse(node)}' divides by 0")
    value = _OPERATORS[type(node.op)](left, right)
    if abs(value) >= 2**63:
        raise TemplateError(f"'{ast.unparse(node)}' is beyond 64 bits")
    return value


def _integer(value: Value) -> int:
    if not isinstance(value, int):
        raise TemplateError(f"arithmetic is for integers, not '{value}'")
    return value
