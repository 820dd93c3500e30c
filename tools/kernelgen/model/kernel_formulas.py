"""Kernels and tensors whose integers are formulas of a call's sizes, fitted to the nodes of graphs of several sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.model.formulas import Fitter, Formula
from kernelgen.model.graphs import ExportedNode, Shape
from kernelgen.model.sizes import NAMES
from kernelgen.spec.kernel import KernelSpec

Point = Mapping[str, int]
"""The sizes of a call by name."""


class HasFormulas(Protocol):
    """An object with formulas of sizes."""

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes on which it depends."""


F = TypeVar("F", bound=HasFormulas)


@dataclass
class RequestedKernel(Generic[F]):
    """A kernel with the calls that need it.

    Attributes:
        kernel: the kernel with its formulas.
        points: the sizes of the calls that need it.
        name: a name for readers.
        reason: why it can't be built; None if it can.
        as_ggml: whether its weights have ggml's layout, even if the manifest requests other layouts.
    """

    kernel: F
    points: list[Point]
    name: str
    reason: str | None = None
    as_ggml: bool = False

    @property
    def values(self) -> dict[tuple[int, ...], Point]:
        """The points, by the values of the sizes on which the kernel depends."""
        names = self.kernel.names
        return {tuple(point[name] for name in names): point for point in self.points}


@dataclass(frozen=True, slots=True)
class TensorFormula:
    """A tensor at any size.

    Attributes:
        dtype: ggml's type name.
        ne: elements per dimension.
        nb: strides in bytes; None for a contiguous tensor.
    """

    dtype: str
    ne: tuple[Formula, ...]
    nb: tuple[Formula, ...] | None

    def at(self, point: Point) -> TensorDesc:
        """Returns the tensor at these sizes.

        Raises:
            ValueError: no kernel can have the tensor at these sizes.
        """
        ne = [f.value(point) for f in self.ne]
        return TensorDesc.make(ne, self.dtype, None if self.nb is None else [f.value(point) for f in self.nb])

    @property
    def formulas(self) -> tuple[Formula, ...]:
        return (*self.ne, *(self.nb or ()))


@dataclass(frozen=True, slots=True)
class KernelFormula:
    """A kernel at any size.

    Attributes:
        op, inputs, output, alias: as in `KernelSpec`.
        params: the parameters that differ from the op's defaults; an integer may be a formula.
    """

    op: str
    inputs: tuple[TensorFormula | None, ...]
    output: TensorFormula
    params: tuple[tuple[str, ParamValue | Formula], ...]
    alias: int | None

    def at(self, point: Point) -> KernelSpec:
        """Returns the kernel at these sizes.

        Raises:
            ValueError: no kernel can have the tensor at these sizes.
        """
        return KernelSpec.make(
            self.op,
            [None if t is None else t.at(point) for t in self.inputs],
            self.output.at(point),
            {name: v.value(point) if isinstance(v, Formula) else v for name, v in self.params},
            self.alias,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes on which it depends, in the order of `NAMES`."""
        formulas = [f for t in (*self.inputs, self.output) if t is not None for f in t.formulas]
        formulas += [v for _, v in self.params if isinstance(v, Formula)]
        used = {name for formula in formulas for name in formula.names}
        return tuple(name for name in NAMES if name in used)


def fit(column: Sequence[ExportedNode], points: Sequence[Point], fitter: Fitter) -> KernelFormula | None:
    """Returns the kernel with formulas that equals each node of a column at its point, or None."""
    first = column[0]
    inputs: list[TensorFormula | None] = []
    for i, source in enumerate(first.inputs):
        if source is None:
            inputs.append(None)
            continue
        tensor = fit_tensor([s for node in column if (s := node.inputs[i]) is not None], fitter)
        if tensor is None:
            return None
        inputs.append(tensor)
    output = fit_tensor([node.output for node in column], fitter)
    params = _fit_params(column, fitter)
    if output is None or params is None:
        return None
    kernel = KernelFormula(first.op, tuple(inputs), output, params, first.alias)
    try:
        right = all(_is_at(kernel, point, node) for point, node in zip(points, column, strict=True))
    except ValueError:
        # No kernel has a tensor without elements. If all nodes are so, the formula is kept for the report.
        return kernel if all(node.empty for node in column) else None
    return kernel if right else None


def fit_tensor(column: Sequence[Shape], fitter: Fitter) -> TensorFormula | None:
    """Returns the tensor with formulas that equals each shape of a column at its point, or None."""
    dtype = column[0].dtype
    ne = [fitter.fit([t.ne[i] for t in column]) for i in range(4)]
    if None in ne:
        return None
    found = tuple(f for f in ne if f is not None)
    if all(_is_dense(t) for t in column):
        return TensorFormula(dtype, found, None)
    # The stride of a dimension with one element has no meaning and is not fitted. A dimension that has one element in all shapes
    # gets the stride of a contiguous tensor.
    least = (TYPES[dtype].block, 1, 1, 1)
    always = [all(t.ne[i] <= least[i] for t in column) for i in range(4)]
    plain = [all(always[i] or t.ne[i] > least[i] for i in range(4)) for t in column]
    nb = []
    for i in range(4):
        if always[i]:
            values = [_canonical(t)[i] if p else None for t, p in zip(column, plain, strict=True)]
        else:
            values = [t.nb[i] if t.ne[i] > least[i] else None for t in column]
        formula = fitter.fit(values)
        if formula is None:
            return None
        nb.append(formula)
    return TensorFormula(dtype, found, tuple(nb))


def _canonical(t: Shape) -> tuple[int, ...]:
    if 0 in t.ne:
        return t.nb
    return TensorDesc.make(t.ne, t.dtype, t.nb).nb


def _is_dense(t: Shape) -> bool:
    return 0 in t.ne or TensorDesc.make(t.ne, t.dtype, t.nb).contiguous


def _fit_params(column: Sequence[ExportedNode], fitter: Fitter) -> tuple[tuple[str, ParamValue | Formula], ...] | None:
    op = ggml_ops.op(column[0].op)
    known = {p.word: p for p in op.params}
    found: dict[str, ParamValue | Formula] = {
        name: value for name, value in op.decode(column[0].words).items() if value != op.with_defaults({}).get(name, 0)
    }
    for name, param in op.by_name.items():
        if param.default is None:
            found.setdefault(name, op.decode(column[0].words)[name])
    for word in range(ggml_ops.N_WORDS):
        values = [node.words[word] for node in column]
        if len(set(values)) > 1:
            formula = fitter.fit(values)
            if formula is None or (word in known and known[word].kind is not int):
                return None
            found[known[word].name if word in known else f"word{word}"] = formula
    return tuple(sorted(found.items()))


def constant(spec: KernelSpec) -> KernelFormula:
    """Returns a kernel with constants in place of formulas."""
    op = ggml_ops.op(spec.op)
    defaults = op.with_defaults({})
    required = {p.name for p in op.params if p.default is None}
    params = tuple((name, value) for name, value in spec.params if name in required or value != defaults.get(name))
    inputs = tuple(None if t is None else _constant_tensor(t) for t in spec.inputs)
    alias = None if spec.alias == op.alias else spec.alias
    return KernelFormula(spec.op, inputs, _constant_tensor(spec.output), params, alias)


def _constant_tensor(t: TensorDesc) -> TensorFormula:
    nb = None if t.contiguous else tuple(map(Formula, t.nb))
    return TensorFormula(t.dtype, tuple(map(Formula, t.ne)), nb)


def _is_at(kernel: KernelFormula, point: Point, node: ExportedNode) -> bool:
    """Returns whether a node is the kernel at these sizes. Comparing specs gives the same result and takes longer.

    Raises:
        ValueError: no kernel can have one of the tensors.
    """
    tensors = [None if t is None else t.at(point) for t in (*kernel.inputs, kernel.output)]
    op = ggml_ops.op(node.op)
    params = {name: v.value(point) if isinstance(v, Formula) else v for name, v in kernel.params}
    return tensors == node.tensors() and op.with_defaults(params) == op.decode(node.words)
