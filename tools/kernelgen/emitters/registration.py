"""The registration of one op in a kernel library, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.emitters.conditions import EmitterCondition
from kernelgen.emitters.type_rows import Row
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.languages import DEFAULT
from kernelgen.spec.kernel import KernelSpec


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

    def takes_layouts(self, spec: KernelSpec) -> bool:
        """Returns whether the layouts of a kernel's inputs match the declared layouts."""
        return all(t is None or not t.layout or t.layout in self.layouts for t in spec.inputs)

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
