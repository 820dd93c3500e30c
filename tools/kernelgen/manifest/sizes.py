"""A manifest's `sizes:` and `where:`: variables that all entries of `kernels:` share, and conditions on their combinations."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kernelgen.manifest.document import Report, YamlNode, short
from kernelgen.manifest.template import Template, TemplateError, Value

_OPERATORS: Mapping[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
UNKNOWN_HINT = "the variables are those of sizes and batch"
_COMPARISON = re.compile(r"([^<>=!]+)(<=|>=|==|!=|<|>)([^<>=!]+)")


@dataclass(frozen=True, slots=True)
class SizeCondition:
    """A comparison of two expressions.

    Attributes:
        node: its node.
        left, right: the expressions, as templates with one hole.
        compare: the operator.
    """

    node: YamlNode
    left: Template
    right: Template
    compare: Callable[[int, int], bool]

    @property
    def names(self) -> frozenset[str]:
        """The variables that it uses."""
        return frozenset((*self.left.names, *self.right.names))

    def holds(self, values: Mapping[str, Value]) -> bool:
        """Returns whether it holds for these values.

        Raises:
            TemplateError: a side has no value, or one that is not an integer.
        """
        sides = (self.left.fill(values), self.right.fill(values))
        for side in sides:
            if not isinstance(side, int):
                raise TemplateError(f"a comparison takes integers, not '{side}'")
        left, right = sides
        assert isinstance(left, int)
        assert isinstance(right, int)
        return self.compare(left, right)


def conditions(node: YamlNode | None, known: Collection[str], report: Report) -> tuple[SizeCondition, ...]:
    """Returns the comparisons of a `where:` with these variables; adds mistakes to `report`."""
    found = (condition(item, known, report) for item in (node.value if node else ()))
    return tuple(one for one in found if one is not None)


def condition(item: YamlNode, known: Collection[str] | None, report: Report) -> SizeCondition | None:
    """Returns a comparison, or None if it has a mistake.

    Args:
        item: its node.
        known: the valid variables; None if they are not available.
        report: receives mistakes.
    """
    match = _COMPARISON.fullmatch(item.text)
    assert match is not None
    try:
        left, right = (Template("${" + side.strip() + "}") for side in match.group(1, 3))
    except TemplateError as error:
        report.fail(item, f"{error}: '{short(item.text)}'", error.hint)
        return None
    unknown = [name for name in (*left.names, *right.names) if known is not None and name not in known]
    if unknown:
        report.fail(item, f"unknown variable '{unknown[0]}'", UNKNOWN_HINT)
        return None
    return SizeCondition(item, left, right, _OPERATORS[match.group(2)])
