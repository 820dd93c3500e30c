"""Imports emitters: each library as a package under a unique name, only from its sources.

So two libraries may have modules of the same name, and relative imports work in each.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from kernelgen import languages
from kernelgen.emitters.library import BUILTIN, BUILTIN_PACKAGE, Library, builtin_library, dependencies
from kernelgen.emitters.registration import Registration
from kernelgen.emitters.scan import of_function
from kernelgen.errors import Diagnostic, KernelgenError, Location, described
from kernelgen.hlo.cpu import import_jax
from kernelgen.languages import only


def load_function(library: Library, registration: Registration) -> Callable[..., Any]:
    """Imports an emitter's module and returns the function, as `load_functions`."""
    return load_functions([(library, registration)])[0]


def load_functions(
    emitters: Sequence[tuple[Library, Registration]], data: Sequence[Path] = ()
) -> list[Callable[..., Any]]:
    """Imports emitters' modules and returns the functions; imports a module again if its sources or its data have changed.

    Args:
        emitters: the library and registration of each emitter.
        data: the files and folders that the emitters read besides their sources: their modules may keep what they read.

    Raises:
        KernelgenError: a module raises during its import.
    """
    _FINDER.install()
    # By name, not by path: a worker gets the same library under another path from one action to the next.
    digests = {}
    data_files = sorted(file for path in data for file in (path, *path.rglob("*")) if file.is_file())
    data_digest = hashlib.sha256(repr([_size_and_time(file) for file in data_files]).encode()).digest()
    for library, registration in emitters:
        package = _package_name(library, registration)
        _FINDER.libraries[package] = library
        digests[package, ""] = data_digest
        for file in dependencies(library, registration.module):
            own, name = library.place(file)
            key = (package if own else BUILTIN_PACKAGE, name)
            digests[key] = _digest(file)
    if any(_LOADED.get(key, digest) != digest for key, digest in digests.items()):
        # Modules keep what they imported, so one changed file makes all of them stale.
        packages = {BUILTIN_PACKAGE, *(name for name, _ in _LOADED)}
        for stale in [m for m in sys.modules if any(f"{m}.".startswith(f"{name}.") for name in packages)]:
            del sys.modules[stale]
        _LOADED.clear()
    functions = []
    for library, registration in emitters:
        try:
            with (
                environment(registration),
                languages.get(registration.language).loading(
                    registration.file, dict(registration.env or ()), registration.lowering
                ),
            ):
                module = importlib.import_module(f"{_package_name(library, registration)}.{registration.module}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, too: user code may raise anything
            raise _import_error(library, registration, error) from error
        functions.append(_function(module, registration))
    _LOADED.update(digests)
    return functions


def _function(module: ModuleType, registration: Registration) -> Callable[..., Any]:
    """Returns a function of a module, or the object that a decorator made from one."""
    name, where = registration.function, Location(str(registration.file), registration.line, 1)
    try:
        found = getattr(module, name)
    except AttributeError:
        raise KernelgenError(Diagnostic(f"there is no '{name}' in the module", where)) from None
    if not callable(found) or not hasattr(inspect.unwrap(found), "__code__"):
        what = "a module" if isinstance(found, ModuleType) else "a class" if isinstance(found, type) else None
        message = f"'{name}' is {what or f'of type {type(found).__name__}'}, not a function"
        raise KernelgenError(Diagnostic(message, where, "name a function, or the result of a decorator"))
    made: Callable[..., Any] = found
    return made


def load_file(file: Path, function: str) -> tuple[str, Callable[..., Any]]:
    """Imports a file outside any kernel library, and returns its language and one of its functions.

    Raises:
        KernelgenError: the function is missing, or the file raises during its import.
    """
    made = of_function(file, function)
    return made.language, load_function(Library(file.parent.name or "kernels", file.parent), made)


def _size_and_time(file: Path) -> tuple[str, int, int]:
    """Returns a file's name, size and time, which stand for its content: data may be large."""
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


def _digest(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Loads a module only from its source.

    Does not read or write cached bytecode: its staleness check relies on a file's time and size, which sandboxes with linked inputs
    change, and a build must leave no files beside its sources.

    Args:
        fullname: the module's name in this process.
        file: its file.
        names: the name of its package in its own imports, and in this process; None outside packages.
    """

    def __init__(self, fullname: str, file: Path, names: tuple[str, str] | None) -> None:
        super().__init__(fullname, str(file))
        self._names = names

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        if self._names:
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(_import, *self._names)}
        super().exec_module(module)


def _import(
    name: str,
    package: str,
    module: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` for modules of a package: it is `name` in its own imports and `package` in this process, hidden from others.

    The other parameters are the same as of Python's `__import__`.
    """
    if level == 0 and f"{module}.".startswith(f"{name}."):
        module = f"{package}{module[len(name) :]}"
    return builtins.__import__(module, globals, locals, fromlist or (), level)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds libraries' packages and their modules under the names that `_package_name` gives."""

    def __init__(self) -> None:
        self.libraries: dict[str, Library] = {}

    def install(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
            # If a user's emitter imports no built-in helper, its Bazel action has no built-in library among its inputs.
            with contextlib.suppress(KernelgenError):
                self.libraries[BUILTIN_PACKAGE] = builtin_library()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = next((p for p in self.libraries if f"{fullname}.".startswith(f"{p}.")), None)
        if package is None:
            return None
        library, parts = self.libraries[package], fullname[len(package) + 1 :].split(".") if fullname != package else []
        names = (library.root.name, package) if library.package else None
        folder = library.root.joinpath(*parts)
        init, file = folder / "__init__.py", folder.parent / f"{folder.name}.py"  # the current folder has no name
        if (
            not parts
            or (library.package and init.is_file())
            or (library.package and not file.is_file() and folder.is_dir())
        ):
            loader = _SourceLoader(fullname, init, names) if init.is_file() else None
            spec = importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        if (library.package or len(parts) == 1) and file.is_file():
            return importlib.util.spec_from_file_location(fullname, file, loader=_SourceLoader(fullname, file, names))
        if library.package:
            # No other finder may search the folder: kernelgen does not track imports of anything but sources.
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


_FINDER = _Finder()
_LOADED: dict[tuple[str, str], bytes] = {}
"""The digest of every imported file, by package and file name, and of each package's data, by package and an empty name."""


def environment(registration: Registration) -> contextlib.AbstractContextManager[None]:
    """Returns a context that hides this process's environment variables from a kernel that has its own."""
    if registration.env is None:
        return contextlib.nullcontext()
    import_jax()  # JAX reads this process's own variables
    return only(dict(registration.env))


def _package_name(library: Library, registration: Registration | None = None) -> str:
    if library.name == BUILTIN:
        return BUILTIN_PACKAGE
    # A module's content may depend on the environment during its import, and on the NKI that it imports.
    what = str(library.root.resolve())
    if registration is not None and registration.env is not None:
        what += f"\0{registration.env}\0{registration.lowering}"
    return f"_kernelgen_library_{hashlib.sha256(what.encode()).hexdigest()[:16]}"


def _import_error(library: Library, registration: Registration, error: BaseException) -> KernelgenError:
    # Report the innermost frame inside the library: that is the user's code.
    line, trace = 1, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(registration.file):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    own = _package_name(library, registration)
    said = described(error).replace(own, library.root.name)
    message = f"can't import the emitter of '{registration.op}': {said}"
    hint = None
    if isinstance(error, ModuleNotFoundError) and error.name and not f"{error.name}.".startswith(f"{own}."):
        hint = (
            f"install it for the Python that runs kernelgen, {sys.executable}; "
            f"a file beside this one is imported with a dot: from .{error.name.partition('.')[0]} import …"
        )
    return KernelgenError(Diagnostic(message, Location(str(registration.file), line, 1), hint))
