"""Notes Python code that the newer NKI's tracer refuses, although AWS's simulator and this interpreter run it.

Observed with nki 0.6.0; `REFUSED` holds its messages. A kernel that this package lowers to HLO never runs in that tracer.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nki_interpreter.errors import is_own

REFUSED = {
    "comprehension": "a comprehension",
    "keys": "a dictionary with a key that is not text (expected (str, dict))",
    "expansion": "`**` in a call (keyword expansion is not supported)",
    "partial": "functools.partial",
    "inner": "a call of an inner function in the body of a device's loop (inner functions can only be used as fori_loop/while_loop "
    "body arguments)",
}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_LOOPS = frozenset(("fori_loop", "while_loop"))


def notes(function: Callable[..., Any]) -> Iterator[str]:
    """Yields a note for each place that the tracer refuses, in a kernel and in the functions that it calls by name."""
    left, seen = [function], set()
    while left:
        one = inspect.unwrap(left.pop())
        code = getattr(one, "__code__", None)
        if not isinstance(code, types.CodeType) or code in seen or is_own(code.co_filename):
            continue
        seen.add(code)
        found, called = _looked_through(code, _source(code.co_filename, one.__globals__))
        yield from (f"{code.co_filename}:{line}: AWS's tracer refuses {REFUSED[what]}" for what, line in found)
        others = (one.__globals__.get(name) for name in called)
        left += [getattr(other, "function", other) for other in others if callable(other)]


def _source(file: str, module: Mapping[str, Any]) -> str:
    """Returns the source of a module's file. Prefers the loader's copy, which needs no file."""
    try:
        get_source = getattr(module.get("__loader__"), "get_source", None)
        # The two paths may differ in form, one relative and one absolute, so this compares file names.
        if get_source is not None and Path(str(module.get("__file__"))).name == Path(file).name:
            return get_source(module["__name__"]) or ""
        return Path(file).read_text(encoding="utf-8")
    except (ImportError, OSError, ValueError):  # interactive code, or the file no longer exists
        return ""


@functools.lru_cache(1 << 10)
def _looked_through(code: types.CodeType, source: str) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Returns the refused code of a function with its lines, and the names of the functions it calls."""
    node = _definition(code, source)
    if node is None:
        return (), ()
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return tuple(_refused(node)), tuple({call.func.id for call in calls if isinstance(call.func, ast.Name)})


@functools.lru_cache(1 << 5)
def _parsed(source: str) -> ast.AST:
    return ast.parse(source)


def _definition(code: types.CodeType, source: str) -> ast.FunctionDef | None:
    try:
        tree = _parsed(source)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            if first == code.co_firstlineno:
                return node
    return None


def _refused(function: ast.FunctionDef) -> Iterator[tuple[str, int]]:
    for node in (found for statement in function.body for found in ast.walk(statement)):
        if isinstance(node, _COMPREHENSIONS):
            yield "comprehension", node.lineno
        elif isinstance(node, ast.Dict):
            if any(isinstance(key, ast.Constant) and not isinstance(key.value, str) for key in node.keys):
                yield "keys", node.lineno
        elif isinstance(node, ast.Call):
            if any(word.arg is None for word in node.keywords):
                yield "expansion", node.lineno
            if _name(node.func) == "partial":
                yield "partial", node.lineno
    yield from (("inner", call.lineno) for call in _inner_calls(function))


def _inner_calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Yields the calls of functions that are defined within this one from the bodies of loops that a device runs."""
    inside = list(ast.walk(function))[1:]
    inner = {node.name: node for node in inside if isinstance(node, ast.FunctionDef)}
    bodies: list[ast.AST] = []
    for node in inside:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and _name(node.iter.func) == "dynamic_range":
            bodies += node.body
        elif isinstance(node, ast.Call) and _name(node.func) in _LOOPS:
            given = [*node.args, *(word.value for word in node.keywords)]
            bodies += [inner[_name(one)] for one in given if _name(one) in inner]
    for node in dict.fromkeys(found for body in bodies for found in ast.walk(body)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in inner:
            yield node


def _name(node: ast.AST) -> str:
    """Returns the last part of a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
