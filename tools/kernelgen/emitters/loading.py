"""Imports emitters: each library as a package under a name of its own, from its sources alone.

So two libraries may have modules of the same name, and relative imports work in each.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kernelgen.emitters.dependencies import dependencies
from kernelgen.emitters.library import BUILTIN, BUILTIN_PACKAGE, Library, builtin_library
from kernelgen.emitters.registration import Registration
from kernelgen.errors import Diagnostic, KernelgenError, Location


def load_function(library: Library, registration: Registration) -> Callable[..., Any]:
    """Imports the emitter's module and returns the function; a module whose source changed since is imported anew.

    Raises:
        KernelgenError: the module raises while it is imported.
    """
    _FINDER.install()
    package = _package_name(library)
    _FINDER.roots[package] = library.root
    # By name, not by path: a worker sees the same library under another path from one action to the next.
    digests = {
        (package if file.parent == library.root else BUILTIN_PACKAGE, file.name): hashlib.sha256(
            file.read_bytes()
        ).digest()
        for file in dependencies(library, registration.module)
    }
    if any(_LOADED.get(key, digest) != digest for key, digest in digests.items()):
        # Modules hold on to what they imported, so a changed helper makes all of them stale.
        packages = {BUILTIN_PACKAGE, *(name for name, _ in _LOADED)}
        for stale in [m for m in sys.modules if m in packages or m.rpartition(".")[0] in packages]:
            del sys.modules[stale]
        _LOADED.clear()
    try:
        module = importlib.import_module(f"{package}.{registration.module}")
    except Exception as error:
        raise _import_error(registration, error) from error
    _LOADED.update(digests)
    return getattr(module, registration.function)  # type: ignore[no-any-return]


class _SourceLoader(importlib.abc.SourceLoader):
    """Loads a module from its source alone.

    Cached bytecode is neither read nor written: its staleness check trusts a file's time and size, which sandboxes with linked
    inputs do not keep, and a build must leave nothing beside its sources.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return Path(path if isinstance(path, str) else path.decode()).read_bytes()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds libraries' packages, and the modules in them, under the names that `_package_name` gives."""

    def __init__(self) -> None:
        self.roots: dict[str, Path] = {}

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            # An action of a user's emitter that imports no built-in helper has no built-in library among its inputs.
            with contextlib.suppress(KernelgenError):
                self.roots[BUILTIN_PACKAGE] = builtin_library().root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.roots:
            root = self.roots[fullname]
            init = root / "__init__.py"
            loader = _SourceLoader(init) if init.is_file() else None
            spec = importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
            spec.submodule_search_locations = [str(root)]
            return spec
        package, _, name = fullname.rpartition(".")
        if package in self.roots:
            file = self.roots[package] / f"{name}.py"
            if file.is_file():
                return importlib.util.spec_from_file_location(fullname, file, loader=_SourceLoader(file))
        return None


_FINDER = _Finder()
_LOADED: dict[tuple[str, str], bytes] = {}
"""The digest of every file that was imported, by package and file name."""


def _package_name(library: Library) -> str:
    if library.name == BUILTIN:
        return BUILTIN_PACKAGE
    return f"_kernelgen_library_{hashlib.sha256(str(library.root.resolve()).encode()).hexdigest()[:16]}"


def _import_error(registration: Registration, error: Exception) -> KernelgenError:
    # The innermost frame inside the library is where the user looks.
    line, trace = 1, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(registration.file):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    message = f"can't import the emitter of '{registration.op}': {type(error).__name__}: {error}"
    return KernelgenError(Diagnostic(message, Location(str(registration.file), line, 1)))
