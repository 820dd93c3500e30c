"""Instructions of both generations use, check or refuse every argument that a kernel gives."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from nki_interpreter import isa, modules
from nki_interpreter.errors import NkiError
from nki_interpreter.isa import newer, older

FILES = sorted(Path(isa.__file__).parent.glob("*.py"))


def unread(function: ast.FunctionDef) -> list[str]:
    """Returns the parameters whose value a function's body never reads."""
    given = function.args
    names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if a}
    read = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return sorted(names - read - {"self", "_"})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_parameter_is_read(file):
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    assert {f.name: unread(f) for f in functions if unread(f)} == {}


@pytest.mark.parametrize("module", [newer, older], ids=["newer", "older"])
def test_every_instruction_takes_a_name_and_nothing_that_it_does_not_know(module):
    own = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and ".isa." in f.__module__ and n[0] != "_"}
    assert len(own) > 30
    for name, instruction in modules._instructions(module).items():
        if name not in own:
            continue
        needed = [p for p in inspect.signature(own[name]).parameters.values() if p.default is p.empty]
        given = {p.name: None for p in needed}
        with pytest.raises(NkiError, match=f"err_arguments: {name}: got an unexpected keyword argument 'evil'"):
            instruction(**given, evil=1, name="n")
        with pytest.raises(NkiError, match="err_instruction_name: an instruction's name is text, not int"):
            instruction(**given, name=1)
