"""The names in messages exist: options of the command line and environment variables.

A message is a string in a source that contains a space and is not a docstring.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click

import kernelgen
from kernelgen.cli import frame
from kernelgen.compilers.settings import CompileConfig

PACKAGE = Path(kernelgen.__file__).parent
INTERPRETER = PACKAGE.parent / "nki_interpreter"
ROOT = Path(__file__).resolve().parents[2]

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
VARIABLE = re.compile(r"\b(?:GGML_)?NEURON_(?!KERNELS_)[A-Z_]+\b")

OF_OTHERS = {
    "--build": "of cmake",
    "--install": "of cmake",
    "--prefix": "of cmake",
    "--name": "of a build step, of any name",
    "--version": "of neuronx-cc",
    "--native-int64": "likewise",
    "--rerank": "of llama.cpp",
    "--output-format": "of neuron-profile",
    "--lora-scaled": "of llama.cpp and export-graphs",
}


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of a Python source's strings with a space; `{}` replaces the fields of an f-string."""
    tree = ast.parse(source)
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield node.lineno, text


def messages() -> list[tuple[str, str]]:
    return [
        (f"{path.relative_to(PACKAGE.parent)}:{line}", text)
        for path in sorted([*PACKAGE.rglob("*.py"), *INTERPRETER.rglob("*.py")])
        for line, text in prose(path.read_text())
    ]


def options(command: click.Command) -> set[str]:
    """Returns the options of a command and of its subcommands."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union({"--help"}, *map(options, below))


def known_options() -> set[str]:
    commands = [importlib.import_module(frame.module_of(name)).command for name in frame.COMMANDS]
    neuronx_cc = {word for word in CompileConfig.make("trn1").flags() if word.startswith("--")}
    return neuronx_cc.union(OF_OTHERS, *map(options, commands))


def unknown(pattern: re.Pattern[str], known: set[str], said: list[tuple[str, str]]) -> list[str]:
    """Returns the places where texts contain unknown names."""
    return [f"{where}: {name}" for where, text in said for name in pattern.findall(text) if name not in known]


def test_options_that_messages_name_exist() -> None:
    assert unknown(OPTION, known_options(), messages()) == []


def test_variables_that_messages_name_are_read_and_documented() -> None:
    pages = "\n".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    sources = [p for p in (ROOT / "backend").rglob("*") if p.suffix in (".cpp", ".h", ".c") and "tests" not in p.parts]
    texts = [
        (str(p.relative_to(ROOT)), text)
        for p in sources
        for text in re.findall(r'"((?:[^"\\\n]|\\.)*)"', p.read_text())
    ]
    alone = {text for _, text in texts} | {
        node.value
        for path in [*PACKAGE.rglob("*.py"), *INTERPRETER.rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    rules = "\n".join(p.read_text() for p in (ROOT / "rules").rglob("*") if p.suffix in (".cmake", ".bzl", ".py"))
    read = {name for name in alone if VARIABLE.fullmatch(name)} | set(VARIABLE.findall(rules))
    said = [(where, text) for where, text in [*texts, *messages()] if " " in text]
    assert unknown(VARIABLE, read, said) == []
    named = {name for _, text in said for name in VARIABLE.findall(text)}
    assert len(named) >= 10 and "GGML_NEURON_KERNEL_DIR" in named
    assert [name for name in sorted(named) if name not in pages] == []
