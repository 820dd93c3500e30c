"""Which emitter computes an op: the one place that chooses. A plan's kernels carry its answer, and builds follow the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from kernelgen.emitters.library import Library, emitters_of
from kernelgen.emitters.registration import Registration
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import Op, Param
from kernelgen.graph_kernel import Spec, spec_ops
from kernelgen.plan import Kernel


class Catalog:
    """What some libraries compute: of those that have an op, the first computes it.

    Args:
        libraries: in this order; users' libraries come before the built-in one. They are read when something is asked.
    """

    def __init__(self, libraries: Sequence[Library]) -> None:
        self.libraries = tuple(libraries)

    @cached_property
    def by_op(self) -> Mapping[str, tuple[Library, Registration]]:
        """The library and the registration that are chosen for each op.

        Raises:
            KernelgenError: a library can't be read, as of `Library.scan`.
        """
        found: dict[str, tuple[Library, Registration]] = {}
        for library in self.libraries:
            for op, found_here in library.scan().items():
                found.setdefault(op, (library, found_here))
        return found

    def find(self, op: str) -> tuple[Library, Registration]:
        """Returns the library that computes `op`, and where.

        Raises:
            KernelgenError: none does.
        """
        if op in self.by_op:
            return self.by_op[op]
        near = did_you_mean(op, self.by_op, dict(ggml_ops.ALIASES))
        roots = ", ".join(str(library.root) for library in self.libraries)
        raise KernelgenError(
            Diagnostic(
                f"no emitter computes op '{op}'{near}", hint=f"looked in {roots}; docs/adding-a-kernel.md adds one"
            )
        )

    def kernel(self, spec: Spec) -> Kernel:
        """Returns a plan's kernel: the spec, and what computes it.

        Raises:
            KernelgenError: nothing does.
        """
        order = {library.name: i for i, library in enumerate(self.libraries)}
        chosen = {(library.name, found.module) for library, found in map(self.find, spec_ops(spec))}
        (library, module), *more = sorted(chosen, key=lambda one: (order[one[0]], one[1]))
        return Kernel(spec, module, library, tuple(more))

    def emitters(self, kernel: Kernel) -> list[tuple[Library, Registration]]:
        """Returns the library and the registration of each op of a plan's kernel, in the order of `spec_ops`.

        Raises:
            KernelgenError: a module that it names is not there any more, or is wrong.
        """
        libraries = {library.name: library for library in self.libraries}
        return emitters_of(kernel.spec, [(libraries[name], libraries[name].file(m)) for name, m in kernel.emitters])

    def op(self, name: str) -> Op | None:
        """Returns the definition of a ggml op, or of a custom op that a library has; None when there is no such op."""
        if name in ggml_ops.OPS:
            return ggml_ops.OPS[name]
        known = ggml_ops.op(name)
        if name not in self.by_op:
            return None if known.custom else known
        _, chosen = self.by_op[name]
        # ggml's table says nothing of its inputs: the emitter's signature is the definition.
        named = enumerate(chosen.params) if known.custom else ()
        params = tuple(Param(p.name, i, p.kind, p.default) for i, p in named)
        return replace(known, inputs=chosen.inputs, required=chosen.required, params=params)
