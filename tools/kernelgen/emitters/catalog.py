"""Chooses the emitter of an op; no other code chooses. A plan's kernels record the choice, and builds follow the plan.

Among the requested languages, in order, it takes the first with an emitter for the op, the inputs' types, the sizes and the target.
Without a request it prefers JAX, then any other language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from kernelgen.emitters.library import Library, emitters_of
from kernelgen.emitters.registration import Registration
from kernelgen.errors import Diagnostic, KernelgenError, did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import Op, Param
from kernelgen.languages import DEFAULT
from kernelgen.plan import Kernel
from kernelgen.spec.filenames import native_file
from kernelgen.spec.kernel import KernelSpec, SourceSpec, Spec


class Catalog:
    """The ops of some libraries; the first library that has an op computes it.

    Args:
        libraries: the libraries in order; users' libraries precede the built-in one. They are read on first use.
    """

    def __init__(self, libraries: Sequence[Library]) -> None:
        self.libraries = tuple(libraries)
        self.sources: dict[str, Library] = {}
        """Folders of the files that manifests name as kernel sources, by the plan's names for the folders."""
        self.files: dict[str, Path] = {}
        """These files, by kernel id."""
        self.packages: dict[str, Path | None] = {}
        """Their Python packages, by kernel id; None for none."""
        self.prebuilt: dict[str, Path | None] = {}
        """Folders with the output of NKI's compiler, by the ids of kernels with the lowering `native`; None for none."""

    @property
    def folders(self) -> tuple[Library, ...]:
        """Every folder that may hold a plan's kernels."""
        return (*self.libraries, *self.sources.values())

    @cached_property
    def by_op(self) -> Mapping[str, tuple[Library, Registration]]:
        """The library and the registration of each op if no language is requested.

        Raises:
            KernelgenError: a library can't be read; see `Library.scan`.
        """
        found: dict[str, tuple[Library, Registration]] = {}
        for library in self.libraries:
            for op, found_here in library.scan().items():
                known = found.setdefault(op, (library, found_here))
                if known[1].language != DEFAULT and found_here.language == DEFAULT:
                    found[op] = (library, found_here)
        return found

    @cached_property
    def _all(self) -> Mapping[str, list[tuple[Library, Registration]]]:
        found: dict[str, list[tuple[Library, Registration]]] = {}
        for library in self.libraries:
            for made in library.registrations:
                found.setdefault(made.op, []).append((library, made))
        return found

    def choose(self, spec: KernelSpec, languages: Sequence[str], target: str) -> tuple[Library, Registration] | None:
        """Returns the emitter of a kernel for a target, in the first of some languages that has one.

        Args:
            spec: the kernel.
            languages: the candidates, in order of preference; empty for JAX, then any other.
            target: the target.
        """
        there = [
            found
            for found in self._all.get(spec.op, ())
            if found[1].is_for(target) and found[1].takes_layouts(spec.inputs)
        ]
        if not languages:
            known = self.by_op.get(spec.op)
            if known in there:
                return known
            return min(there, key=lambda found: found[1].language != DEFAULT, default=None)
        for language in languages:
            of_language = [found for found in there if found[1].language == language]
            # Without a better choice, the emitter itself refuses what it does not declare.
            fitting = [found for found in of_language if found[1].fits(spec)] or (
                of_language if language == languages[-1] else []
            )
            if fitting:
                return fitting[0]
        return None

    def kernels(self, spec: KernelSpec, languages: Sequence[str], targets: Sequence[str]) -> list[Kernel]:
        """Returns a plan's kernels for a spec: one for all targets, or one for each group of targets with its own emitter.

        Raises:
            KernelgenError: no emitter computes it for one of the targets.
        """
        known = self.by_op.get(spec.op)
        if known and not languages and known[1].in_groups and known[1].takes_layouts(spec.inputs):
            return [self.kernel(spec)]
        chosen: dict[tuple[str, str, str], list[str]] = {}
        for target in targets:
            found = self.choose(spec, languages, target)
            if found is None:
                self.find(spec.op)
                self._check_layouts(spec, target)
                wanted = f" in {' or '.join(languages)}" if languages else ""
                there = sorted({r.language for _, r in self._all[spec.op]})
                raise KernelgenError(
                    Diagnostic(
                        f"no emitter computes op '{spec.op}'{wanted} for {target}",
                        hint=f"there is one in {', '.join(there)}; `languages` lists which may be used, in order of preference",
                    )
                )
            library, made = found
            chosen.setdefault((library.name, made.module, made.language), []).append(target)
        return [
            Kernel(spec, ((library, module),), language, () if len(chosen) == 1 and language == DEFAULT else tuple(of))
            for (library, module, language), of in chosen.items()
        ]

    def _check_layouts(self, spec: KernelSpec, target: str = "") -> None:
        """Checks that some emitter accepts the layouts of a kernel's weights.

        Raises:
            KernelgenError: none does.
        """
        if not any(made.takes_layouts(spec.inputs) for _, made in self._all.get(spec.op, ())):
            weight = next(t for t in spec.inputs if t is not None and t.layout)
            raise KernelgenError(
                Diagnostic(
                    f"no emitter of '{spec.op}' takes weights in the layout {weight.layout}{f' for {target}' * bool(target)}",
                    hint=f'leave {weight.layout} out of `weights`, or say layouts="{weight.layout}" at an emitter that takes it',
                )
            )

    def find(self, op: str) -> tuple[Library, Registration]:
        """Returns the library that computes `op`, and the registration.

        Raises:
            KernelgenError: no library computes it.
        """
        if op in self.by_op:
            return self.by_op[op]
        near = did_you_mean(op, self.by_op, dict(ggml_ops.ALIASES))
        roots = ", ".join(str(library.root) for library in self.libraries)
        raise KernelgenError(
            Diagnostic(
                f"no emitter computes op '{op}'{near}",
                hint=f"looked in {roots}; docs/guides/write-a-kernel.md adds one",
            )
        )

    def kernel(self, spec: Spec) -> Kernel:
        """Returns a plan's kernel: the spec with its emitters.

        Raises:
            KernelgenError: no emitter computes it.
        """
        if isinstance(spec, SourceSpec):
            raise KernelgenError(f"kernel {spec.id} is named by {spec.source}: give the manifest that names it")
        if isinstance(spec, KernelSpec):
            library, chosen = self.find(spec.op)
            if not chosen.takes_layouts(spec.inputs):
                self._check_layouts(spec)
                library, chosen = next(found for found in self._all[spec.op] if found[1].takes_layouts(spec.inputs))
            return Kernel(spec, ((library.name, chosen.module),), chosen.language)
        order = {library.name: i for i, library in enumerate(self.libraries)}
        found = {(library.name, made.module) for library, made in (self._of_group(spec, op) for op in spec.ops)}
        return Kernel(spec, tuple(sorted(found, key=lambda one: (order[one[0]], one[1]))))

    def _of_group(self, spec: Spec, op: str) -> tuple[Library, Registration]:
        """Returns the emitter of an op inside a graph kernel, for weights in their layouts there.

        Raises:
            KernelgenError: no emitter computes it.
        """
        nodes = [node for node in spec.nodes if node.op == op]
        tensors = {operand.tensor for node in nodes for operand in node.inputs if operand is not None}
        for library, made in self._all.get(op, ()):
            if made.in_groups and made.takes_layouts(tensors):
                return library, made
        self.find(op)
        for node in nodes:
            self._check_layouts(node.kernel)
        raise KernelgenError(
            Diagnostic(
                f"no emitter computes op '{op}' in {DEFAULT} for all targets",
                hint=f"a graph kernel is composed of emitters in {DEFAULT} that name no targets",
            )
        )

    def emitters(self, kernel: Kernel) -> list[tuple[Library, Registration]]:
        """Returns the library and the registration of each op of a plan's kernel, in the order of `spec_ops`.

        Raises:
            KernelgenError: a module that it names is missing or invalid.
        """
        libraries = {library.name: library for library in self.folders}
        return emitters_of(kernel.spec, [(libraries[name], libraries[name].file(m)) for name, m in kernel.emitters])

    def prebuilt_of(self, kernel: Kernel) -> Path | None:
        """Returns the folder with the output of NKI's compiler for a plan's kernel; None for a kernel without such a folder."""
        return self.sources[kernel.prebuilt].root / native_file(kernel.id) if kernel.prebuilt else None

    def op(self, name: str) -> Op | None:
        """Returns the definition of a ggml op, or of a library's custom op; None if neither exists."""
        if name in ggml_ops.OPS:
            return ggml_ops.OPS[name]
        known = ggml_ops.op(name)
        if name not in self.by_op:
            return None if known.custom else known
        _, chosen = self.by_op[name]
        # ggml's table does not describe its inputs: the emitter's signature is the definition.
        named = enumerate(chosen.params) if known.custom else ()
        params = tuple(Param(p.name, i, p.kind, p.default) for i, p in named)
        return replace(known, inputs=chosen.inputs, required=chosen.required, params=params)
