"""Reads emitters from a module's source with `ast`, without importing it: its registrations, and every mistake in it."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from kernelgen import fileio
from kernelgen.emitters import CONTEXT, conditions, signature, type_rows
from kernelgen.emitters.registration import ParamSpec, Registration
from kernelgen.emitters.type_rows import Row
from kernelgen.errors import Diagnostic, KernelgenError, Location, did_you_mean
from kernelgen.ggml.weight_layouts import LAYOUTS
from kernelgen.languages import DEFAULT, LANGUAGES
from kernelgen.targets import TARGETS

MAX_SOURCE = 16 * 1024 * 1024
"""Maximum bytes of a Python file with kernels."""

_KEYWORDS = ("types", "language", "targets", "where", "layouts")
_KEYWORDS_TEXT = "'types', 'language', 'targets', 'where' and 'layouts'"
_KNOWN_LANGUAGES = f"languages are {', '.join(LANGUAGES)}"
_KNOWN_TARGETS = f"targets are {', '.join(TARGETS)}"
_KNOWN_LAYOUTS = f"layouts are {', '.join(LAYOUTS)}"
_KINDS: dict[str, type[int] | type[float] | type[bool]] = {"int": int, "float": float, "bool": bool}


def scan(file: Path) -> tuple[tuple[Registration, ...], tuple[Diagnostic, ...]]:
    """Returns a module's registrations in order of lines, and its mistakes."""
    try:
        source = fileio.read_input(file, MAX_SOURCE)
    except OSError as error:
        where = Location(str(file), 1, 1)
        return (), (Diagnostic(f"can't read the module: {error.strerror or error}", where),)
    return _scan(source, file)


def registration(file: Path, op: str) -> Registration:
    """Returns the registration of `op` in one module, without reading the rest of its library.

    Raises:
        KernelgenError: the module does not parse, a registration in it is wrong, or it does not compute the op.
    """
    registrations, mistakes = scan(file)
    if mistakes:
        raise KernelgenError(mistakes)
    found = {r.op: r for r in registrations}
    if op not in found:
        raise KernelgenError(Diagnostic(f"{file} has no emitter of '{op}'{did_you_mean(op, found)}"))
    return found[op]


def parse(source: bytes, file: str) -> ast.Module:
    """Returns a module's tree; `file` is its name in messages.

    Raises:
        KernelgenError: it is not valid Python.
    """
    try:
        return ast.parse(source, filename=file)
    except SyntaxError as error:
        where = Location(file, error.lineno or 1, error.offset or 1)
        raise KernelgenError(Diagnostic(f"not valid Python: {error.msg}", where)) from None
    except ValueError as error:  # a null byte
        raise KernelgenError(Diagnostic(f"not valid Python: {error}", Location(file, 1, 1))) from None


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields a module's statements and those inside them, outer ones first, in `ast.walk`'s order.

    Skips expressions, which are most of a tree and contain no statements.
    """
    pending: deque[ast.AST] = deque([tree])
    while pending:
        node = pending.popleft()
        if isinstance(node, ast.stmt):
            yield node
        for name in node._fields:
            if name in _BLOCKS:
                pending.extend(getattr(node, name))


_BLOCKS = frozenset(("body", "orelse", "finalbody", "handlers", "cases"))
"""The fields of statements, handlers and cases that hold statements."""


# A worker requests the same module for every kernel.
@lru_cache(maxsize=1024)
def _scan(source: bytes, file: Path) -> tuple[tuple[Registration, ...], tuple[Diagnostic, ...]]:
    try:
        tree = parse(source, str(file))
    except KernelgenError as error:
        return (), error.diagnostics
    module = _ScannedModule(file)
    module.read(tree)
    return tuple(module.found), tuple(module.mistakes)


_MODULE = "kernelgen.emitters"
"""The module of the decorator."""


def _decorator_names(tree: ast.Module) -> set[str]:
    """Returns the expressions by which the module may refer to `kernelgen.emitters.emitter`."""
    names = {f"{_MODULE}.emitter"}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                if node.module == _MODULE and alias.name == "emitter":
                    names.add(alias.asname or "emitter")
                elif f"{node.module}.{alias.name}" == _MODULE:
                    names.add(f"{alias.asname or alias.name}.emitter")
    return names


class _ScannedModule:
    """A module during the scan."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: list[Registration] = []
        self.mistakes: list[Diagnostic] = []

    def fail(self, node: ast.AST, message: str) -> None:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        self.mistakes.append(Diagnostic(message, Location(str(self.file), line, column)))

    def read(self, tree: ast.Module) -> None:
        top = set(map(id, tree.body))
        names = _decorator_names(tree)
        for node in statements(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for decorator in node.decorator_list:
                call = decorator.func if isinstance(decorator, ast.Call) else decorator
                # Compare texts, because a name may have dots: `kernelgen.emitters.emitter`.
                if ast.unparse(call) not in names:
                    continue
                if id(node) not in top or isinstance(node, ast.AsyncFunctionDef):
                    self.fail(node, f"emitter '{node.name}' is not a plain function at the module's top level")
                else:
                    self._read_emitter(node, decorator)

    def _read_emitter(self, node: ast.FunctionDef, decorator: ast.expr) -> None:
        """Adds a registration for each op, unless the decorator or the signature is wrong."""
        ops = self._op_names(node, decorator)
        before = len(self.mistakes)
        types = self._types(node, decorator)
        language = self._language(decorator)
        targets = self._targets(decorator)
        a = node.args
        for arg in (a.vararg, a.kwarg):
            if arg:
                self.fail(arg, f"emitter '{node.name}' takes *{arg.arg}: every input and parameter has a name")
        for default in a.defaults:
            if not (isinstance(default, ast.Constant) and default.value is None):
                self.fail(default, f"an optional input's default is None, not {ast.unparse(default)}")
        params: list[ParamSpec] = []
        context: list[str] = []
        for arg, value in zip(a.kwonlyargs, a.kw_defaults, strict=True):
            if arg.arg in CONTEXT:
                context.append(arg.arg)
            elif param := self._param(arg, value):
                params.append(param)
        layouts = self._layouts(decorator)
        where = self._where(decorator, [arg.arg for arg in (*a.posonlyargs, *a.args)], params)
        if len(self.mistakes) > before:
            return
        inputs = tuple(arg.arg for arg in (*a.posonlyargs, *a.args))
        for op in ops:
            registration = Registration(
                op,
                self.file.stem,
                self.file,
                node.name,
                inputs,
                len(inputs) - len(a.defaults),
                tuple(params),
                tuple(context),
                node.lineno,
                types,
                language,
                targets,
                where,
                layouts=layouts,
            )
            problems = signature.check(registration)
            for message in problems:
                self.fail(node, message)
            if not problems:
                self.found.append(registration)

    def _op_names(self, node: ast.FunctionDef, decorator: ast.expr) -> list[str]:
        if not isinstance(decorator, ast.Call) or not decorator.args:
            self.fail(decorator, f"name the ops that '{node.name}' computes: @emitter(\"rms_norm\")")
            return []
        names = []
        for arg in decorator.args:
            if not (isinstance(arg, ast.Constant) and isinstance(arg.value, str)):
                self.fail(arg, f"op names are string literals, not {ast.unparse(arg)}")
            elif not arg.value.isidentifier() or arg.value != arg.value.lower():
                self.fail(arg, f"op names are lower-case identifiers, not '{arg.value}'")
            else:
                names.append(arg.value)
        return names

    def _types(self, node: ast.FunctionDef, decorator: ast.expr) -> tuple[Row, ...]:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
            if keyword.arg not in _KEYWORDS:
                self.fail(keyword, f"@emitter has no keyword '{keyword.arg}'; it has {_KEYWORDS_TEXT}")
        rows: list[Row] = []
        for text, _ in self._words(decorator, "types"):
            found, problems = type_rows.read(text, len(node.args.posonlyargs) + len(node.args.args))
            rows += found
            for message in problems:
                self.fail(decorator, message)
        return tuple(rows)

    def _words(self, decorator: ast.expr, name: str) -> list[tuple[str, ast.expr]]:
        """Returns the string literals of a keyword, one or a tuple of them, with their nodes."""
        found: list[tuple[str, ast.expr]] = []
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
            if keyword.arg != name:
                continue
            for item in keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]:
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    found.append((item.value, item))
                else:
                    self.fail(item, f"{name.removesuffix('s')}: expected a string literal, not {ast.unparse(item)}")
        return found

    def _language(self, decorator: ast.expr) -> str:
        for name, node in self._words(decorator, "language"):
            if name in LANGUAGES:
                return name
            self.fail(node, f"unknown language '{name}'{did_you_mean(name, LANGUAGES)} ({_KNOWN_LANGUAGES})")
        return DEFAULT

    def _targets(self, decorator: ast.expr) -> tuple[str, ...]:
        found = self._words(decorator, "targets")
        for name, node in found:
            if name not in TARGETS:
                self.fail(node, f"unknown target '{name}'{did_you_mean(name, TARGETS)} ({_KNOWN_TARGETS})")
        return tuple(dict.fromkeys(name for name, _ in found))

    def _layouts(self, decorator: ast.expr) -> tuple[str, ...]:
        found = self._words(decorator, "layouts")
        for name, node in found:
            if name not in LAYOUTS:
                self.fail(node, f"unknown layout '{name}'{did_you_mean(name, LAYOUTS)} ({_KNOWN_LAYOUTS})")
        return tuple(dict.fromkeys(name for name, _ in found))

    def _where(
        self, decorator: ast.expr, inputs: Sequence[str], params: Sequence[ParamSpec]
    ) -> tuple[conditions.EmitterCondition, ...]:
        sizes = [f"{name}_ne{i}" for name in inputs for i in range(4)]
        known = frozenset((*sizes, *(p.name for p in params if p.kind is int)))
        found = []
        for text, node in self._words(decorator, "where"):
            condition, problem = conditions.read(text, known)
            if condition is None:
                self.fail(node, problem)
            else:
                found.append(condition)
        return tuple(found)

    def _param(self, arg: ast.arg, value: ast.expr | None) -> ParamSpec | None:
        kind = _KINDS.get(ast.unparse(arg.annotation)) if arg.annotation else None
        if kind is None:
            self.fail(arg, f"parameter '{arg.arg}' is annotated as int, float or bool")
            return None
        if value is None:
            return ParamSpec(arg.arg, kind)
        try:
            default = ast.literal_eval(value)
        except ValueError:
            default = None
        # In Python a bool is an int.
        if isinstance(default, int) and kind is float and not isinstance(default, bool):
            default = float(default)
        if type(default) is not kind:
            self.fail(value, f"the default of '{arg.arg}' is a literal {kind.__name__}, not {ast.unparse(value)}")
            return None
        return ParamSpec(arg.arg, kind, default)
