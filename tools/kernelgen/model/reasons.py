"""Finds the reason why a kernel can't be built: a lack of the emitters, or a rule of the op."""

from __future__ import annotations

from collections.abc import Sequence

from kernelgen.emitters.catalog import Catalog
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml import shapes
from kernelgen.manifest.values import check_param
from kernelgen.model.derived import DerivedKernel
from kernelgen.model.graphs import ExportedNode
from kernelgen.spec.kernel import KernelSpec


class Reasons:
    """Finds the reasons, for the emitters of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._nodes: dict[int, str] = {}

    def of_node(self, node: ExportedNode) -> str:
        """Returns the reason, or an empty string if the kernel can be built."""
        if id(node) not in self._nodes:
            empty = f"{node.op}: a tensor without elements"
            self._nodes[id(node)] = empty if node.empty else self.of_spec(node.spec()) or ""
        return self._nodes[id(node)]

    def of_entry(self, entry: DerivedKernel) -> str | None:
        """Returns the reason, or None if all kernels of the entry can be built."""
        specs = sorted(entry.specs(), key=lambda spec: spec.id)
        if not specs:
            return f"{entry.kernel.op}: a tensor without elements"
        return next((reason for reason in map(self.of_spec, specs) if reason), None)

    def of_spec(self, spec: KernelSpec) -> str | None:
        """Returns the reason, or None if the kernel can be built."""
        why = self._why(spec)
        return f"{spec.op}: {why}" if why else None

    def _why(self, spec: KernelSpec) -> str | None:
        if spec.op not in self._catalog.by_op:
            return "no emitter for this op"
        _, registration = self._catalog.by_op[spec.op]
        if not registration.required <= len(spec.inputs) <= len(registration.inputs):
            return "no emitter for these inputs"
        why = self.of_types(spec)
        if why is not None:
            return why
        params = ggml_ops.op(spec.op).by_name
        for name, value in spec.params:
            if name not in params:  # a parameter of a newer ggml
                return f"word {name.removeprefix('word')} of op_params is {value}, and has no meaning here"
            wrong = check_param(params[name], value, str(value))
            if wrong:
                return wrong
        problems = shapes.check(spec.op, spec.inputs, spec.output, dict(spec.params), spec.alias)
        return problems[0].message if problems else None

    def of_types(self, spec: KernelSpec) -> str | None:
        """Returns the reason if the op's emitter does not support the kernel's types, or None."""
        _, registration = self._catalog.by_op[spec.op]
        types = [None if t is None else t.dtype for t in spec.inputs]
        if not registration.types or any(_takes(row, types) for row in registration.types):
            return None
        return f"no emitter for these types: {', '.join(t or 'absent' for t in types)}"


def _takes(row: Sequence[Sequence[str]], types: Sequence[str | None]) -> bool:
    return all(t is None or t in names for t, names in zip(types, row, strict=False))
