"""The files that an emitter's HLO may depend on: its module and the helpers that the module imports."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from kernelgen.emitters.library import BUILTIN_PACKAGE, Library, builtin_library
from kernelgen.emitters.scan import parse, statements
from kernelgen.errors import KernelgenError
from kernelgen.languages import LANGUAGES

INTERPRETER = "nki_interpreter"
"""The package beside kernelgen that NKI-only kernels use."""


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
            elif parts[:2] == ["kernelgen", "numpy"]:
                found.add("numpy")
    return frozenset(found)
