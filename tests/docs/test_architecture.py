"""Imports between the package's modules follow the levels of docs/reference/architecture.md, without circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tools" / "kernelgen"
PAGE = (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
LEVELS = re.findall(r"^\d+\. `(\w+)`", PAGE.partition("## Levels")[2].partition("\n## ")[0], re.MULTILINE)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the package or module of kernelgen that each import names, and its line, also for imports inside functions."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node):
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "kernelgen":
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif node.module.startswith("kernelgen."):
                yield node.module.split(".")[1], node.lineno
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("kernelgen.")]
            yield from ((name.split(".")[1], node.lineno) for name in names)
        yield from imported(node)


def upward(path: Path, text: str) -> list[str]:
    """Returns a module's imports of a level above its own, each with its line."""
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    allowed = LEVELS[: LEVELS.index(own) + 1]
    return [
        f"{path.name}:{line}: {name}"
        for name, line in imported(ast.parse(text))
        if name in LEVELS and name not in allowed
    ]


def test_every_part_of_the_package_has_a_level() -> None:
    parts = {
        path.name.removesuffix(".py")
        for path in PACKAGE.iterdir()
        if (path / "__init__.py").exists() or path.suffix == ".py"
    }
    assert parts - {"__init__", "__main__"} == set(LEVELS)
    assert len(LEVELS) == len(set(LEVELS))


def test_imports_go_down() -> None:
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in LEVELS]
    assert len(modules) > 200
    assert [wrong for path in modules for wrong in upward(path, path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line", ["from kernelgen.cli import frame", "from kernelgen import build", "import kernelgen.plan"]
)
def test_an_import_that_goes_up_is_found(line: str) -> None:
    assert len(upward(PACKAGE / "hlo" / "proto.py", f"def f():\n    {line}\n")) == 1
    assert upward(PACKAGE / "cli" / "plan.py", line) == []


def modules_imported(tree: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    """Yields the modules of a package that a module imports, also inside functions and by a name in a string."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node):
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call):  # LazyModule("a.b"), importlib.import_module("a.b")
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and a.value in known)
        yield from modules_imported(node, known)


def circle(texts: Mapping[str, str], known: Mapping[str, Path]) -> list[str]:
    """Returns the modules of a circle of imports, with the first repeated at the end; [] if there is none."""
    graph = {name: {*modules_imported(ast.parse(text), known)} & known.keys() - {name} for name, text in texts.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def modules_of(package: Path) -> dict[str, Path]:
    """Returns the files of a package by module name."""
    return {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }


MODULES, OF_INTERPRETER = modules_of(PACKAGE), modules_of(PACKAGE.with_name("nki_interpreter"))


def texts(modules: Mapping[str, Path]) -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in modules.items()}


@pytest.mark.parametrize(("modules", "count"), [(MODULES, 200), (OF_INTERPRETER, 30)], ids=["kernelgen", "interpreter"])
def test_no_modules_import_each_other(modules: Mapping[str, Path], count: int) -> None:
    assert len(modules) > count
    assert circle(texts(modules), modules) == []


def test_a_circle_is_found_also_through_a_function_a_package_and_a_text() -> None:
    of_kernelgen, of_interpreter = texts(MODULES), texts(OF_INTERPRETER)
    line = "def f():\n    from kernelgen.cli import doctor\n"
    changed = of_kernelgen | {"kernelgen.cli.simulate": of_kernelgen["kernelgen.cli.simulate"] + line}
    assert set(circle(changed, MODULES)) == {"kernelgen.cli.doctor", "kernelgen.cli.simulate"}
    changed = of_kernelgen | {
        "kernelgen.bundle.pack": "from kernelgen import bundle",
        "kernelgen.bundle": "import kernelgen.bundle.pack",
    }
    assert set(circle(changed, MODULES)) == {"kernelgen.bundle", "kernelgen.bundle.pack"}
    line = 'indexing = LazyModule("nki_interpreter.indexing")\n'
    changed = of_interpreter | {"nki_interpreter.tensors": of_interpreter["nki_interpreter.tensors"] + line}
    assert set(circle(changed, OF_INTERPRETER)) == {"nki_interpreter.indexing", "nki_interpreter.tensors"}
