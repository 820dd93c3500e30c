"""Kernel libraries: folders of emitters, and the files that an emitter's HLO may depend on.

A library is read without importing it, so planning needs no JAX and takes milliseconds.
"""

from __future__ import annotations

import ast
import hashlib
import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from kernelgen.emitters import scan
from kernelgen.emitters.registration import Registration
from kernelgen.emitters.scan import of_source, parse, statements
from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.languages import DEFAULT, LANGUAGES
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.kernel import GraphSpec, SourceSpec, Spec

BUILTIN = "kernelgen"
"""Name of kernelgen's own library."""

BUILTIN_PACKAGE = "kernelgen.kernels"
"""The package that contains its modules; user libraries may import its helpers by this name."""

INTERPRETER = "nki_interpreter"
"""The package beside kernelgen that NKI-only kernels use."""


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


# --- dependencies --------------------------------------------------------------------------------------------------


def dependencies(library: Library, module: str) -> list[Path]:
    """Returns the files that an emitter's result may depend on: its module and the helpers that it imports, transitively.

    Helpers are modules of the same library (`from .common import …`, `from . import common`) and of the built-in library (`from
    kernelgen.kernels.common import …`). In a library that is a package (`Library.package`), they are all modules of the package
    that a module imports, with the `__init__.py` of each folder on the path.

    Returns:
        Existing files, the module's own first, the others sorted.

    Raises:
        KernelgenError: the module is missing or one of them does not parse.
    """
    first = library.file(module)
    if not first.is_file():
        raise KernelgenError(f"kernel library '{library.name}' has no module '{module}' ({first})")
    seen: dict[Path, None] = {}
    # Python imports the package before its module.
    pending = [first, *_there(library.root, module.split(".")[:-1])]
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen[file] = None
        pending.extend(_local_imports(library, file))
    del seen[first]
    return [first, *sorted(seen)]


def _local_imports(library: Library, file: Path) -> Iterator[Path]:
    for level, module, names in _imported(file.read_bytes(), str(file)):
        parts = module.split(".") if module else []
        if level == 0 and f"{module}.".startswith(f"{BUILTIN_PACKAGE}."):
            folder, heads = builtin_library().root, parts[2:3] or names
        elif library.package and file.is_relative_to(library.root):
            yield from _imports_within(library, file, level, parts, names)
            continue
        elif level == 1:
            folder, heads = file.parent, parts[:1] or names
        else:
            continue
        yield from (path for path in (folder / f"{head}.py" for head in heads) if path.is_file())


def _imports_within(library: Library, file: Path, level: int, parts: list[str], names: Sequence[str]) -> Iterator[Path]:
    """Yields the files of a package that an import in one of its modules runs; none if it imports from elsewhere."""
    own = file.relative_to(library.root).parts[:-1]
    if level == 0 and parts[0] == library.root.name:
        base = parts[1:]
    elif 0 < level <= len(own) + 1:
        base = [*own[: len(own) + 1 - level], *parts]
    else:
        return
    yield from _there(library.root, base)
    for name in names:
        if name != "*":
            yield from _there(library.root, [*base, name])
        else:  # with modules in `__all__`, too
            yield from sorted(library.root.joinpath(*base).glob("*.py"))


def _there(root: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yields the files that importing a module of a package runs: its own, and the `__init__.py` of its packages."""
    for end in range(len(parts) + 1):
        path = root.joinpath(*parts[:end])
        files = [path / "__init__.py", *([path.with_name(f"{path.name}.py")] if end else [])]
        yield from (file for file in files if file.is_file())


@lru_cache(maxsize=1024)
def _imported(source: bytes, name: str) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Returns (level, module, names) of each import in a source: its leading dots, the module, and the imported names."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in statements(parse(source, name)):
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
    return tuple(found)


def language_of_file(file: Path) -> str:
    """Returns the one language that a file of kernelgen or its NKI interpreter belongs to, or "". The path is from `tools/`."""
    package, *parts = file.parts
    if package == INTERPRETER:
        return "" if parts == ["standing_in.py"] else "nki"  # NumPy's language replaces modules, too
    return parts[1] if parts[0] == "languages" and parts[1] in LANGUAGES else ""


def languages_of(files: Iterable[Path]) -> set[str]:
    """Returns the kernelgen languages whose modules some files import directly; all languages if that is unclear."""
    return set().union(*(_languages_imported(file.read_bytes()) for file in files))


@lru_cache(maxsize=1024)
def _languages_imported(source: bytes) -> frozenset[str]:
    """Returns the languages whose modules a source imports directly; all languages if that is unclear."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "kernelgen" and parts[1:2] in ([], ["*"], ["languages"]):
                found |= {*parts[2:3]} & {*LANGUAGES} or {*LANGUAGES}
            elif parts[0] == INTERPRETER:
                found.add("nki")
    return frozenset(found)


_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
"""Tokens that change nothing."""


def of_sources(library: Library, module: str) -> str:
    """Returns a digest of a module and the modules that it imports, in hexadecimal; edits of comments and empty lines keep it.

    It hashes texts, not Python's parse of them, so that every version of Python gives the same digest.

    Raises:
        KernelgenError: one of them can't be read, or is not Python.
    """
    files = dependencies(library, module)
    texts = [[*library.place(file), _bare(file.read_bytes(), str(file))] for file in files]
    return hashlib.sha256(canonical_json(texts).encode()).hexdigest()


def _bare(source: bytes, file: str) -> str:
    """Returns a source without comments and without lines that hold nothing else; lines inside a string stay."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    lines = source.decode(encoding).splitlines(keepends=True)
    empty: set[int] = set()
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(source).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        raise KernelgenError(f"{file}: {error}") from None
    filled = {row for t in tokens if t.type not in _BLANK for row in range(t.start[0], t.end[0] + 1)}
    for token in tokens:
        row, column = token.start
        if token.type == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
        if token.type in (tokenize.COMMENT, tokenize.NL) and row not in filled:
            empty.add(row)
    return "".join(line for row, line in enumerate(lines, 1) if row not in empty)
