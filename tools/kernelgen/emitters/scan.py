"""Reads emitters from a module's source with `ast`, without importing it: its registrations, and every mistake in it.

A function that a manifest names in a file is read in the same way, with the language that the file's imports show.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kernelgen.emitters import CONTEXT
from kernelgen.emitters.registration import BINARY, COMPARE, EmitterCondition, ParamSpec, Registration, Row
from kernelgen.errors import Diagnostic, KernelgenError, Location, did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.types import GROUPS, TYPES
from kernelgen.ggml.weight_layouts import LAYOUTS
from kernelgen.languages import DEFAULT, LANGUAGES
from kernelgen.spec.kernel import SourceSpec
from kernelgen.targets import TARGETS

_CHOICES: Mapping[str, Collection[str]] = {"language": LANGUAGES, "targets": TARGETS, "layouts": LAYOUTS}
_MODULE = "kernelgen.emitters"
_KEYWORDS = ("types", "language", "targets", "where", "layouts")
_NKI = ("nki", "neuronxcc", "torch_neuronx", "nki_cpu_simulator")
_NUMPY = ("kernelgen.languages.numpy", "nkipy", "nkigen")
_SAME = "same"
_KINDS: dict[str, type[int] | type[float] | type[bool]] = {"int": int, "float": float, "bool": bool}


def scan(file: Path) -> tuple[tuple[Registration, ...], tuple[Diagnostic, ...]]:
    """Returns a module's registrations in order of lines, and its mistakes."""
    try:
        source = file.read_bytes()
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
    return tuple(module.registrations), tuple(module.mistakes)


class _ScannedModule:
    """A module during the scan."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.registrations: list[Registration] = []
        self.mistakes: list[Diagnostic] = []

    def fail(self, node: ast.AST, message: str) -> None:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        self.mistakes.append(Diagnostic(message, Location(str(self.file), line, column)))

    def read(self, tree: ast.Module) -> None:
        top = set(map(id, tree.body))
        # The expressions by which the module may refer to `kernelgen.emitters.emitter`.
        names = {f"{_MODULE}.emitter"}
        for statement in tree.body:
            if isinstance(statement, ast.ImportFrom) and statement.level == 0:
                for alias in statement.names:
                    if statement.module == _MODULE and alias.name == "emitter":
                        names.add(alias.asname or "emitter")
                    elif f"{statement.module}.{alias.name}" == _MODULE:
                        names.add(f"{alias.asname or alias.name}.emitter")
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
        before = len(self.mistakes)
        ops = self._op_names(node, decorator)
        words = self._keywords(decorator)
        a = node.args
        inputs = tuple(arg.arg for arg in (*a.posonlyargs, *a.args))
        rows: list[Row] = []
        for text, _ in words["types"]:
            found, problems = _type_rows(text, len(inputs))
            rows += found
            for problem in problems:
                self.fail(decorator, problem)
        for arg in (a.vararg, a.kwarg):
            if arg:
                self.fail(arg, f"emitter '{node.name}' takes *{arg.arg}: every input and parameter has a name")
        for default in a.defaults:
            if not (isinstance(default, ast.Constant) and default.value is None):
                self.fail(default, f"an optional input's default is None, not {ast.unparse(default)}")
        params = [
            param
            for arg, value in zip(a.kwonlyargs, a.kw_defaults, strict=True)
            if arg.arg not in CONTEXT and (param := self._param(arg, value))
        ]
        sizes = [f"{name}_ne{i}" for name in inputs for i in range(4)]
        known = frozenset((*sizes, *(p.name for p in params if p.kind is int)))
        for text, word in words["where"]:
            if problem := _condition_problem(text, known):
                self.fail(word, problem)
        if len(self.mistakes) > before:
            return
        for op in ops:
            registration = Registration(
                op,
                self.file.stem,
                self.file,
                node.name,
                inputs,
                len(inputs) - len(a.defaults),
                tuple(params),
                tuple(arg.arg for arg in a.kwonlyargs if arg.arg in CONTEXT),
                node.lineno,
                tuple(rows),
                next((text for text, _ in words["language"]), DEFAULT),
                tuple(dict.fromkeys(text for text, _ in words["targets"])),
                tuple(EmitterCondition(text) for text, _ in words["where"]),
                layouts=tuple(dict.fromkeys(text for text, _ in words["layouts"])),
            )
            problems = tuple(_signature_problems(registration))
            for problem in problems:
                self.fail(node, problem)
            if not problems:
                self.registrations.append(registration)

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

    def _keywords(self, decorator: ast.expr) -> Mapping[str, list[tuple[str, ast.expr]]]:
        """Returns the string literals of each keyword, one or a tuple of them, with their nodes."""
        words: dict[str, list[tuple[str, ast.expr]]] = {name: [] for name in _KEYWORDS}
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else []:
            name = keyword.arg
            if name not in words:
                listed = f"{', '.join(map(repr, _KEYWORDS[:-1]))} and {_KEYWORDS[-1]!r}"
                self.fail(keyword, f"@emitter has no keyword '{name}'; it has {listed}")
                continue
            for item in keyword.value.elts if isinstance(keyword.value, ast.Tuple) else [keyword.value]:
                singular = name.removesuffix("s")
                if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
                    self.fail(item, f"{singular}: expected a string literal, not {ast.unparse(item)}")
                    continue
                text, known = item.value, _CHOICES.get(name)
                if known is None or text in known:
                    words[name].append((text, item))
                else:
                    listed = f"{singular}s are {', '.join(known)}"
                    self.fail(item, f"unknown {singular} '{text}'{did_you_mean(text, known)} ({listed})")
        return words

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


def _type_rows(text: str, n_inputs: int) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Returns the rows of a text of `@emitter(types=…)`, and its problems; one of both is empty.

    A text has one entry per input, separated by commas: one or several of ggml's type names and of the groups in
    `kernelgen.ggml.types.GROUPS`, or `same`, the first input's type: the result has a row for each of these.
    """
    if not n_inputs and not text:
        return ((),), ()
    columns = [entry.split() for entry in text.split(",")]
    if len(columns) != n_inputs or not all(columns):
        example = ", ".join([*["float"][:n_inputs], *[_SAME] * (n_inputs - 1)])
        rule = f"types has an entry for each of {n_inputs} inputs, separated by commas"
        return (), (f'{rule}, such as types="{example}", not types="{text}"',)
    known = [*TYPES, *GROUPS, _SAME]
    unknown = [word for column in columns for word in column if word not in known]
    if unknown:
        return (), tuple(f"unknown type '{word}'{did_you_mean(word, known)} in types '{text}'" for word in unknown)
    if _SAME in columns[0]:
        return (), (f"'{_SAME}' is the first input's type: it can't be that of '{text}'",)
    expanded = [[t for word in column for t in GROUPS.get(word, (word,))] for column in columns]
    firsts = [[t] for t in expanded[0]] if any(_SAME in column for column in columns) else [expanded[0]]
    rows: list[Row] = []
    for first in firsts:
        rest = [dict.fromkeys(first[0] if t == _SAME else t for t in column) for column in expanded[1:]]
        rows.append((tuple(dict.fromkeys(first)), *map(tuple, rest)))
    return tuple(rows), ()


def _condition_problem(text: str, known: frozenset[str]) -> str:
    """Returns the problem of a text of `@emitter(where=…)`, which uses the known names; empty if there is none."""
    problem = f"where: expected a comparison as 'x_ne0 <= 4096', not '{text}'"
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return problem
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in COMPARE:
        return problem
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in known:
            return f"where: unknown name '{node.id}' in '{text}'; there are {', '.join(sorted(known))}"
    return "" if all(map(_is_sum, (tree.left, tree.comparators[0]))) else problem


def _is_sum(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in BINARY and _is_sum(node.left) and _is_sum(node.right)
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)


def _signature_problems(r: Registration) -> list[str]:
    """Returns the differences between an emitter's signature and ggml's op; a custom op has no definition to differ from."""
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
    # An emitter would silently ignore a parameter that it does not declare.
    missing = [name for name in op.by_name if name not in {p.name for p in r.params}]
    if missing:
        problems.append(f"emitter '{r.function}' lacks parameters of ggml's {r.op}: {', '.join(missing)}")
    return problems


# --- functions in files ---------------------------------------------------------------------------------------------


def of_source(spec: SourceSpec, file: Path) -> Registration:
    """Returns the registration of a kernel's function; see `of_function`."""
    return replace(of_function(file, spec.function), op=spec.op, env=spec.env, lowering=spec.lowering)


def of_function(file: Path, function: str) -> Registration:
    """Returns the registration of a function in a file: a definition, a value or an imported name.

    Raises:
        KernelgenError: the file can't be read, is not Python, or nothing in it has the function's name.
    """
    try:
        source = file.read_bytes()
    except OSError as error:
        raise KernelgenError(f"can't read '{file}': {error.strerror or error}") from None
    lines = _names(source, str(file))
    if function not in lines:
        near = did_you_mean(function, lines)
        raise KernelgenError(Diagnostic(f"there is no '{function}'{near}", Location(str(file), 1, 1)))
    return Registration(
        op=function,
        module=file.stem,
        file=file,
        function=function,
        inputs=(),
        required=0,
        params=(),
        context=(),
        line=lines[function],
        language=language_of(source, str(file)),
    )


@lru_cache(maxsize=256)
def _names(source: bytes, file: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in ast.walk(parse(source, file)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.setdefault(node.name, node.lineno)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, node.lineno)
        elif isinstance(node, ast.alias):
            found.setdefault(node.asname or node.name, node.lineno)
    return found


def language_of(source: bytes, file: str) -> str:
    """Returns a file's language: `nki`, `numpy` or `jax`.

    A file that imports NKI is in NKI. One that imports `kernelgen.languages.numpy`, or NumPy and not JAX, is in NumPy.

    Args:
        source: the file's bytes.
        file: its name in messages.

    Raises:
        KernelgenError: it is not valid Python.
    """
    names: set[str] = set()
    for node in ast.walk(parse(source, file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    roots = {name.partition(".")[0] for name in names}
    if roots & {*_NKI}:
        return "nki"
    if roots & {*_NUMPY} or names & {*_NUMPY} or ("numpy" in roots and "jax" not in roots):
        return "numpy"
    return "jax"
