"""Kernel libraries: folders of emitters, and which function in them computes which op.

A library is read without importing it: registrations and signatures come from the source by `ast`, so planning needs no JAX and
takes milliseconds. Only `load_function` imports an emitter, as part of a package under a name of the library's own, so that two
libraries may have modules of the same name and relative imports work in each.

What computes a kernel once it is found is the business of `kernelgen.hlo`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kernelgen.emitter import CONTEXT
from kernelgen.errors import Diagnostic, KernelgenError, Location, did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.types import GROUPS, TYPES

BUILTIN = "kernels"
"""Name of the library that comes with kernelgen."""

BUILTIN_PACKAGE = "kernelgen.kernels"
"""The package its modules are imported as; user libraries may import its helpers by this name."""

_KINDS: dict[str, type[int] | type[float] | type[bool]] = {"int": int, "float": float, "bool": bool}


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One keyword-only parameter of an emitter.

    Attributes:
        name: its name.
        kind: `int`, `float` or `bool`.
        default: its value when a manifest gives none; None when it must be given.
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
        required: how many inputs must be there.
        params: its keyword-only arguments without those that the framework fills in.
        context: the keyword-only arguments that the framework fills in (`out`, `inputs`, `op`).
        line: the function's line, counted from 1.
        types: the types that inputs may have, as rows of one tuple of ggml's type names per input; empty when not declared.
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
    types: tuple[tuple[tuple[str, ...], ...], ...] = ()

    @property
    def custom(self) -> bool:
        """Whether ggml has no such op, so that this signature is the op's definition."""
        return ggml_ops.op(self.op).custom


@dataclass(frozen=True)
class Library:
    """A folder of emitters.

    Attributes:
        name: short name, unique among the libraries of a build; `kernels` is kernelgen's own.
        root: the folder; its `*.py` files are its modules.
    """

    name: str
    root: Path

    def scan(self) -> dict[str, Registration]:
        """Returns what the library computes, by op name, in order of module and line. The folder is read once.

        Raises:
            KernelgenError: a module does not parse, or a registration is wrong (all mistakes of all modules).
        """
        return self._registrations

    @cached_property
    def _registrations(self) -> dict[str, Registration]:
        if not self.root.is_dir():
            raise KernelgenError(f"kernel library '{self.name}': {self.root} is not a folder")
        found: dict[str, Registration] = {}
        mistakes: list[Diagnostic] = []
        for file in sorted(self.root.glob("*.py")):
            for registration in _scan_module(file, mistakes):
                other = found.setdefault(registration.op, registration)
                if other is not registration:
                    mistakes.append(
                        Diagnostic(
                            f"op '{registration.op}' already has the emitter '{other.function}' at "
                            f"{other.file}:{other.line}",
                            Location(str(file), registration.line, 1),
                            "an op has one emitter in a library; rename or remove one of them",
                        )
                    )
        if mistakes:
            raise KernelgenError(mistakes)
        return found


def builtin_library() -> Library:
    """Returns the library that comes with kernelgen: inside the package when installed, beside `tools/` in a checkout.

    Raises:
        KernelgenError: the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for root in (package / "kernels", package.parent.parent / "kernels"):
        if root.is_dir():
            return Library(BUILTIN, root)
    raise KernelgenError(
        f"kernelgen's own kernels are missing: neither {package}/kernels nor a checkout's kernels/ exists"
    )


def find(op: str, libraries: Sequence[Library]) -> tuple[Library, Registration]:
    """Returns the first library that computes `op`, and where; users' libraries come before the built-in one.

    Raises:
        KernelgenError: none does.
    """
    for library in libraries:
        registration = library.scan().get(op)
        if registration:
            return library, registration
    known = [name for library in libraries for name in library.scan()]
    near = did_you_mean(op, known, dict(ggml_ops.ALIASES))
    roots = ", ".join(str(library.root) for library in libraries)
    raise KernelgenError(
        Diagnostic(f"no emitter computes op '{op}'{near}", hint=f"looked in {roots}; docs/adding-a-kernel.md adds one")
    )


def registration(file: Path, op: str) -> Registration:
    """Returns where one module computes `op`, without reading the rest of its library.

    Raises:
        KernelgenError: the module does not parse, a registration in it is wrong, or it does not compute the op.
    """
    mistakes: list[Diagnostic] = []
    found = {r.op: r for r in _scan_module(file, mistakes)}
    if mistakes:
        raise KernelgenError(mistakes)
    if op not in found:
        raise KernelgenError(Diagnostic(f"{file} has no emitter of '{op}'{did_you_mean(op, found)}"))
    return found[op]


def dependencies(library: Library, module: str) -> list[Path]:
    """Returns the files that an emitter's result may depend on: its module and the helpers it imports, transitively.

    Helpers are modules of the same library (`from .common import …`, `from . import common`) and of the built-in library
    (`from kernelgen.kernels.common import …`).

    Returns:
        Files that exist, the module's own first, the others sorted.

    Raises:
        KernelgenError: the module is missing or one of them does not parse.
    """
    first = library.root / f"{module}.py"
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


# --- reading a module -----------------------------------------------------------------------------------------------------


def _parse(source: bytes, file: str) -> ast.Module:
    try:
        return ast.parse(source, filename=file)
    except SyntaxError as error:
        where = Location(file, error.lineno or 1, error.offset or 1)
        raise KernelgenError(Diagnostic(f"not valid Python: {error.msg}", where)) from None
    except ValueError as error:  # a null byte
        raise KernelgenError(Diagnostic(f"not valid Python: {error}", Location(file, 1, 1))) from None


def _scan_module(file: Path, mistakes: list[Diagnostic]) -> tuple[Registration, ...]:
    found, wrong = _scan(file.read_bytes(), file)
    mistakes.extend(wrong)
    return found


@lru_cache(maxsize=1024)
def _scan(source: bytes, file: Path) -> tuple[tuple[Registration, ...], tuple[Diagnostic, ...]]:
    """Returns a module's registrations and what is wrong with it. A worker asks for the same module with every kernel."""
    try:
        tree = _parse(source, str(file))
    except KernelgenError as error:
        return (), error.diagnostics
    found: list[Registration] = []
    mistakes: list[Diagnostic] = []
    top = set(map(id, tree.body))
    names = _decorator_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(call) not in names:
                continue
            if id(node) not in top or isinstance(node, ast.AsyncFunctionDef):
                mistakes.append(
                    _at(file, node, f"emitter '{node.name}' is not a plain function at the module's top level")
                )
            else:
                found += _registrations(file, node, decorator, mistakes)
    return tuple(found), tuple(mistakes)


def _decorator_names(tree: ast.Module) -> set[str]:
    """Returns the expressions by which the module may call `kernelgen.emitter.emitter`."""
    names = {"kernelgen.emitter.emitter"}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                if (node.module, alias.name) == ("kernelgen.emitter", "emitter"):
                    names.add(alias.asname or "emitter")
                elif (node.module, alias.name) == ("kernelgen", "emitter"):
                    names.add(f"{alias.asname or 'emitter'}.emitter")
    return names


def _registrations(
    file: Path, node: ast.FunctionDef, decorator: ast.expr, mistakes: list[Diagnostic]
) -> Iterator[Registration]:
    ops = _op_names(file, node, decorator, mistakes)
    before = len(mistakes)
    types = _types(file, node, decorator, mistakes)
    a = node.args
    for arg in (a.vararg, a.kwarg):
        if arg:
            mistakes.append(
                _at(file, arg, f"emitter '{node.name}' takes *{arg.arg}: every input and parameter has a name")
            )
    positional = [*a.posonlyargs, *a.args]
    for default in a.defaults:
        if not (isinstance(default, ast.Constant) and default.value is None):
            mistakes.append(_at(file, default, f"an optional input's default is None, not {ast.unparse(default)}"))
    params: list[ParamSpec] = []
    context: list[str] = []
    for arg, value in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        if arg.arg in CONTEXT:
            context.append(arg.arg)
        else:
            params.extend(_param(file, arg, value, mistakes))
    if len(mistakes) > before:
        return
    inputs = tuple(arg.arg for arg in positional)
    for op in ops:
        registration = Registration(
            op,
            file.stem,
            file,
            node.name,
            inputs,
            len(inputs) - len(a.defaults),
            tuple(params),
            tuple(context),
            node.lineno,
            types,
        )
        problems = _check_signature(registration)
        mistakes.extend(_at(file, node, message) for message in problems)
        if not problems:
            yield registration


def _op_names(file: Path, node: ast.FunctionDef, decorator: ast.expr, mistakes: list[Diagnostic]) -> list[str]:
    if not isinstance(decorator, ast.Call) or not decorator.args:
        mistakes.append(_at(file, decorator, f"name the ops that '{node.name}' computes: @emitter(\"rms_norm\")"))
        return []
    names = []
    for arg in decorator.args:
        if not (isinstance(arg, ast.Constant) and isinstance(arg.value, str)):
            mistakes.append(_at(file, arg, f"op names are string literals, not {ast.unparse(arg)}"))
        elif not arg.value.isidentifier() or arg.value != arg.value.lower():
            mistakes.append(_at(file, arg, f"op names are lower-case identifiers, not '{arg.value}'"))
        else:
            names.append(arg.value)
    return names


def _types(
    file: Path, node: ast.FunctionDef, decorator: ast.expr, mistakes: list[Diagnostic]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Returns the rows of `types=`, `same` written out: a row for each of the first input's types then."""
    texts: list[str] = []
    for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
        if keyword.arg != "types":
            mistakes.append(_at(file, keyword, f"@emitter has no keyword '{keyword.arg}'; it has 'types'"))
            continue
        items = keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]
        for item in items:
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                texts.append(item.value)
            else:
                mistakes.append(_at(file, item, f"types are string literals, not {ast.unparse(item)}"))
    n_inputs = len(node.args.posonlyargs) + len(node.args.args)
    rows: list[tuple[tuple[str, ...], ...]] = []
    for text in texts:
        if not n_inputs and not text:
            rows.append(())
            continue
        columns = [entry.split() for entry in text.split(",")]
        if len(columns) != n_inputs or not all(columns):
            mistakes.append(
                _at(file, decorator, f"types name one entry for each of the {n_inputs} inputs, not '{text}'")
            )
            continue
        unknown = [w for column in columns for w in column if w not in TYPES and w not in GROUPS and w != "same"]
        for word in unknown:
            near = did_you_mean(word, [*TYPES, *GROUPS, "same"])
            mistakes.append(_at(file, decorator, f"unknown type '{word}'{near} in types '{text}'"))
        if unknown or "same" in columns[0]:
            if not unknown:
                mistakes.append(_at(file, decorator, f"'same' is the first input's type: it can't be that of '{text}'"))
            continue
        expanded = [[t for word in column for t in GROUPS.get(word, (word,))] for column in columns]
        firsts = [[t] for t in expanded[0]] if any("same" in column for column in columns) else [expanded[0]]
        for first in firsts:
            rest = [dict.fromkeys(first[0] if t == "same" else t for t in column) for column in expanded[1:]]
            rows.append((tuple(dict.fromkeys(first)), *map(tuple, rest)))
    return tuple(rows)


def _param(file: Path, arg: ast.arg, value: ast.expr | None, mistakes: list[Diagnostic]) -> Iterator[ParamSpec]:
    kind = _KINDS.get(ast.unparse(arg.annotation)) if arg.annotation else None
    if kind is None:
        mistakes.append(_at(file, arg, f"parameter '{arg.arg}' is annotated as int, float or bool"))
        return
    default: ParamValue | None = None
    if value is not None:
        try:
            literal = ast.literal_eval(value)
        except ValueError:
            literal = None
        if isinstance(literal, int) and kind is float and not isinstance(literal, bool):
            literal = float(literal)
        if type(literal) is not kind:
            mistakes.append(
                _at(file, value, f"the default of '{arg.arg}' is a literal {kind.__name__}, not {ast.unparse(value)}")
            )
            return
        default = literal
    yield ParamSpec(arg.arg, kind, default)


def _check_signature(r: Registration) -> list[str]:
    """Returns how an emitter's signature disagrees with ggml's op; a custom op has nothing to disagree with."""
    op = ggml_ops.op(r.op)
    if op.custom:
        return []
    problems = []
    if op.inputs and (len(r.inputs) != len(op.inputs) or r.required != op.required):
        want = ", ".join([*op.inputs[: op.required], *(f"{name}=None" for name in op.inputs[op.required :])])
        have = ", ".join([*r.inputs[: r.required], *(f"{name}=None" for name in r.inputs[r.required :])])
        problems.append(f"ggml's {r.op} has the inputs ({want}); emitter '{r.function}' takes ({have})")
    for p in r.params:
        known = op.by_name.get(p.name)
        word = p.name.removeprefix("word")
        if known is None and not (p.name.startswith("word") and word.isdecimal() and int(word) < ggml_ops.N_WORDS):
            names = ", ".join(op.by_name) or "none"
            near = did_you_mean(p.name, op.by_name)
            problems.append(f"ggml's {r.op} has no parameter '{p.name}'{near} (it has: {names})")
        elif known is not None and known.kind is not p.kind:
            problems.append(f"parameter '{p.name}' of ggml's {r.op} is {known.kind.__name__}, not {p.kind.__name__}")
    # A parameter that an emitter does not take is one it would silently ignore.
    missing = [name for name in op.by_name if name not in {p.name for p in r.params}]
    if missing:
        problems.append(f"emitter '{r.function}' lacks parameters of ggml's {r.op}: {', '.join(missing)}")
    return problems


def _local_imports(file: Path) -> Iterator[Path]:
    for builtin, name in _imported(file.read_bytes(), str(file)):
        path = (builtin_library().root if builtin else file.parent) / f"{name}.py"
        if path.is_file():
            yield path


@lru_cache(maxsize=1024)
def _imported(source: bytes, name: str) -> tuple[tuple[bool, str], ...]:
    """Returns (whether of the built-in library, name) of what may be a kernel module in a source's imports."""
    found: list[tuple[bool, str]] = []
    for node in ast.walk(_parse(source, name)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [(False, node.module.split(".")[0])] if node.module else [(False, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == BUILTIN_PACKAGE:
            found += [(True, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [(True, m.split(".")[2]) for m in modules if m and m.startswith(BUILTIN_PACKAGE + ".")]
    return tuple(found)


def _at(file: Path, node: ast.AST, message: str) -> Diagnostic:
    return Diagnostic(message, Location(str(file), getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1))


# --- importing ------------------------------------------------------------------------------------------------------------


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
