"""Kernel libraries: folders of emitters.

A library is read without importing it, so planning needs no JAX and takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from kernelgen.emitters import scan
from kernelgen.emitters.registration import Registration
from kernelgen.emitters.sources import of_source
from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.languages import DEFAULT
from kernelgen.spec.kernel import GraphSpec, SourceSpec, Spec

BUILTIN = "kernelgen"
"""Name of kernelgen's own library."""

BUILTIN_PACKAGE = "kernelgen.kernels"
"""The package that contains its modules; user libraries may import its helpers by this name."""


@dataclass(frozen=True)
class Library:
    """A folder of emitters.

    Attributes:
        name: short name, unique among the libraries of a build; `kernelgen` is kernelgen's own library.
        root: the folder; its `*.py` files are its modules.
        package: whether the folder is a Python package, with modules also in its subfolders: `core.norm` is core/norm.py. They
            import each other by relative names, and by the folder's name.
    """

    name: str
    root: Path
    package: bool = False

    def file(self, module: str) -> Path:
        """Returns the path of a module, whether or not it exists."""
        return self.root / f"{module.replace('.', '/') if self.package else module}.py"

    def resolved(self) -> Library:
        """Returns the library with a path without links; a package keeps the name of its folder as given."""
        return replace(
            self, root=self.root.resolve() if not self.package else self.root.parent.resolve() / self.root.name
        )

    def module(self, file: Path) -> str:
        """Returns the module name of a file of the library."""
        return ".".join(file.relative_to(self.root).with_suffix("").parts) if self.package else file.stem

    def place(self, file: Path) -> tuple[bool, str]:
        """Returns (whether a file of `dependencies` is in the library, its name there); else its name in the built-in library."""
        own = file.is_relative_to(self.root) if self.package else file.parent == self.root
        return own, file.relative_to(self.root).as_posix() if own else file.name

    def scan(self) -> dict[str, Registration]:
        """Returns the library's ops, by name, in order of module and line. The folder is read once.

        For an op in several languages this is the JAX emitter, or else the first; `registrations` has all.

        Raises:
            KernelgenError: a module does not parse, or a registration is wrong (lists all mistakes of all modules).
        """
        found: dict[str, Registration] = {}
        for registration in self.registrations:
            known = found.setdefault(registration.op, registration)
            if known.language != DEFAULT and registration.language == DEFAULT:
                found[registration.op] = registration
        return found

    @cached_property
    def registrations(self) -> tuple[Registration, ...]:
        """Every emitter of every op, in order of module and line.

        Raises:
            KernelgenError: see `scan`.
        """
        if not self.root.is_dir():
            raise KernelgenError(f"kernel library '{self.name}': {self.root} is not a folder")
        found: dict[str, list[Registration]] = {}
        mistakes: list[Diagnostic] = []
        for file in sorted(self.root.glob("*.py")):
            registrations, wrong = scan.scan(file)
            mistakes += wrong
            for registration in registrations:
                others = found.setdefault(registration.op, [])
                mistakes += [_twice(other, registration) for other in others if _meet(other, registration)][:1]
                others.append(registration)
        if mistakes:
            raise KernelgenError(mistakes)
        return tuple(registration for of_op in found.values() for registration in of_op)


def _meet(one: Registration, other: Registration) -> bool:
    """Returns whether nothing distinguishes two emitters of an op: a step names a module, a manifest names a language."""
    if one.file == other.file:
        return True
    return one.language == other.language and (
        not one.targets or not other.targets or bool({*one.targets} & {*other.targets})
    )


def _twice(first: Registration, second: Registration) -> Diagnostic:
    return Diagnostic(
        f"op '{second.op}' already has the emitter '{first.function}' at {first.file}:{first.line}",
        Location(str(second.file), second.line, 1),
        "an op has one emitter in a module, and one for a language and target in a library; rename or remove one of them",
    )


def builtin_library() -> Library:
    """Returns kernelgen's own library: inside the package when installed, beside `tools/` in a checkout.

    Raises:
        KernelgenError: the installation lacks it.
    """
    # Not resolved: the target of a sandbox's link is not an input of the action.
    package = Path(__file__).absolute().parent.parent
    for root in (package / "kernels", package.parent.parent / "kernels"):
        if root.is_dir():
            return Library(BUILTIN, root)
    raise KernelgenError(
        f"kernelgen's own kernels are missing: neither {package}/kernels nor a checkout's kernels/ exists"
    )


def emitters_of(spec: Spec, modules: Sequence[tuple[Library, Path]]) -> list[tuple[Library, Registration]]:
    """Returns the library and the registration of each op of a kernel, in the order of `spec_ops`.

    Args:
        spec: the kernel.
        modules: the modules that a plan names for it, with their libraries: the first module that has an op computes it.

    Raises:
        KernelgenError: no module has an op, or a module is wrong.
    """
    if isinstance(spec, SourceSpec):
        ((library, file),) = modules
        return [(library, replace(of_source(spec, file), module=library.module(file)))]
    group = isinstance(spec, GraphSpec)
    found = []
    for op in spec.ops:
        having = [
            (library, file)
            for library, file in modules
            if any(r.op == op and (r.in_groups or not group) for r in scan.scan(file)[0])
        ]
        library, file = (having or modules)[0]
        registration = scan.registration(file, op)
        if group and not registration.in_groups:
            where = Location(str(file), registration.line, 1)
            message = f"kernel {spec.id}: a graph kernel is composed of emitters in {DEFAULT} that name no targets"
            raise KernelgenError(Diagnostic(f"{message}; that of '{op}' is not", where))
        found.append((library, registration))
    return found
