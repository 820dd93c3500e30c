"""Which files an emitter's HLO may depend on: its module and the helpers that this imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from kernelgen.emitters.library import BUILTIN_PACKAGE, Library, builtin_library
from kernelgen.emitters.scan import parse, statements
from kernelgen.errors import KernelgenError


def dependencies(library: Library, module: str) -> list[Path]:
    """Returns the files that an emitter's result may depend on: its module and the helpers it imports, transitively.

    Helpers are modules of the same library (`from .common import …`, `from . import common`) and of the built-in library
    (`from kernelgen.kernels.common import …`).

    Returns:
        Files that exist, the module's own first, the others sorted.

    Raises:
        KernelgenError: the module is missing or one of them does not parse.
    """
    first = library.file(module)
    if not first.is_file():
        raise KernelgenError(f"kernel library '{library.name}' has no module '{module}' ({first})")
    seen: dict[Path, None] = {}
    pending = [first]
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen[file] = None
        pending.extend(_local_imports(file))
    init = library.root / "__init__.py"
    if init.is_file():
        seen[init] = None
    del seen[first]
    return [first, *sorted(seen)]


def _local_imports(file: Path) -> Iterator[Path]:
    for builtin, name in _imported(file.read_bytes(), str(file)):
        path = (builtin_library().root if builtin else file.parent) / f"{name}.py"
        if path.is_file():
            yield path


@lru_cache(maxsize=1024)
def _imported(source: bytes, name: str) -> tuple[tuple[bool, str], ...]:
    """Returns (whether of the built-in library, name) of what may be a kernel module in a source's imports."""
    found: list[tuple[bool, str]] = []
    for node in statements(parse(source, name)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [(False, node.module.split(".")[0])] if node.module else [(False, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == BUILTIN_PACKAGE:
            found += [(True, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [(True, m.split(".")[2]) for m in modules if m and m.startswith(BUILTIN_PACKAGE + ".")]
    return tuple(found)
