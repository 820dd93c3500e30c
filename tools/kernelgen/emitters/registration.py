"""The registration of one op in a kernel library, and the conditions of its emitter, as values."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.languages import DEFAULT
from kernelgen.spec.kernel import KernelSpec

COMPARE: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
}
BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
"""The operators of `@emitter(where=…)`."""

Row = tuple[tuple[str, ...], ...]
"""The names of each input's allowed types."""


@dataclass(frozen=True, slots=True)
class EmitterCondition:
    """A comparison that a kernel's sizes and parameters must satisfy for the emitter to accept it; `scan` has checked it.

    It has two sides of integers, names, `+ - * // %` and parentheses. The names are `<input>_ne0` to `<input>_ne3`, the sizes of an
    input under the emitter's name for it, and the op's integer parameters. A comparison that names an absent input is ignored.
    """

    text: str

    def holds(self, values: Mapping[str, int]) -> bool:
        """Returns whether the comparison holds; it holds if a name has no value or a divisor is 0."""
        comparison = ast.parse(self.text, mode="eval").body
        assert isinstance(comparison, ast.Compare)
        try:
            left, right = (_value(side, values) for side in (comparison.left, comparison.comparators[0]))
        except (KeyError, ZeroDivisionError):
            return True
        return COMPARE[type(comparison.ops[0])](left, right)


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        result: int = BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
        return result
    if isinstance(node, ast.Name):
        return values[node.id]
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One keyword-only parameter of an emitter.

    Attributes:
        name: its name.
        kind: `int`, `float` or `bool`.
        default: its value if a manifest gives none; None if a manifest must give it.
    """

    name: str
    kind: type[int] | type[float] | type[bool]
    default: ParamValue | None = None


@dataclass(frozen=True, slots=True)
class Registration:
    """One op that a library computes.

    Attributes:
        op: the op's name.
        module: the module inside the library (`rope` for rope.py).
        file: the module's file.
        function: the emitter's name.
        inputs: its positional arguments, the op's inputs in the order of ggml's `src[0…]`.
        required: number of inputs that must be present.
        params: its keyword-only arguments, except those that the framework fills in.
        context: the keyword-only arguments that the framework fills in (`out`, `inputs`, `op`).
        line: the function's line, counted from 1.
        types: the supported types of the inputs, in rows; empty if not declared.
        language: the kernel's language.
        targets: its targets; empty for all.
        layouts: the supported layouts of the op's weights besides ggml's own (`kernelgen.ggml.weight_layouts`).
        where: conditions on the kernel's sizes and parameters; another emitter computes kernels that violate them.
        env: (name, value) of all environment variables that its file gets; None for this process's own.
        lowering: see `SourceSpec`.
    """

    op: str
    module: str
    file: Path
    function: str
    inputs: tuple[str, ...]
    required: int
    params: tuple[ParamSpec, ...]
    context: tuple[str, ...]
    line: int
    types: tuple[Row, ...] = ()
    language: str = DEFAULT
    targets: tuple[str, ...] = ()
    where: tuple[EmitterCondition, ...] = ()
    env: tuple[tuple[str, str], ...] | None = None
    lowering: str = "interpreted"
    layouts: tuple[str, ...] = ()

    @property
    def in_groups(self) -> bool:
        """Whether graph kernels can contain it: it is in JAX, and equal for all targets."""
        return self.language == DEFAULT and not self.targets

    def is_for(self, target: str) -> bool:
        """Returns whether it computes the op on a target."""
        return not self.targets or target in self.targets

    def takes(self, types: Sequence[str | None]) -> bool:
        """Returns whether inputs of these types (None for an absent one) match the declared types."""
        if not self.types:
            return True
        return any(
            len(types) <= len(row) and all(t is None or t in allowed for t, allowed in zip(types, row, strict=False))
            for row in self.types
        )

    def takes_layouts(self, tensors: Iterable[TensorDesc | None]) -> bool:
        """Returns whether the layouts of an op's inputs match the declared layouts."""
        return all(t is None or not t.layout or t.layout in self.layouts for t in tensors)

    def fits(self, spec: KernelSpec) -> bool:
        """Returns whether a kernel's input types match the declared types, and its sizes and parameters satisfy `where`."""
        if not self.takes([None if t is None else t.dtype for t in spec.inputs]):
            return False
        values = {
            f"{name}_ne{i}": n
            for name, t in zip(self.inputs, spec.inputs, strict=False)
            if t is not None
            for i, n in enumerate(t.ne)
        }
        values |= {p.name: p.default for p in self.params if type(p.default) is int}
        values |= {name: value for name, value in spec.params if type(value) is int}
        return all(condition.holds(values) for condition in self.where)

    @property
    def custom(self) -> bool:
        """Whether ggml lacks the op, so that this signature is the op's definition."""
        return ggml_ops.op(self.op).custom
