"""Imports between the package's parts follow the levels of docs/reference/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
