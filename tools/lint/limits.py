"""Measures the size of the project and compares it with limits.txt, so that it does not grow by accident.

limits.txt has a line for each measure: its limit, its name, and after `#` the reason if a limit was raised. Anyone may
lower a limit.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

LIMITS = Path(__file__).with_name("limits.txt")
MAX_FUNCTION_LINES = 60
_CPP = (".c", ".cc", ".cpp", ".h", ".inc")
_CODE_BLOCK = re.compile(r"^```[^\n]*\n.*?^```$|^    [^\n]*$", re.DOTALL | re.MULTILINE)


def measure(files: Sequence[str]) -> Counter[str]:
    """Returns the value of each measure.

    Args:
        files: tracked files, relative to the current folder, which is the checkout's root.
    """
    sizes: Counter[str] = Counter()
    for file in files:
        top = "/".join(file.split("/")[:2]) if file.startswith(("tools/", "backend/")) else file.split("/")[0]
        if file.endswith(".py"):
            text = Path(file).read_text(encoding="utf-8")
            lines = text.count("\n")
            sizes[f"lines of Python in {top}"] += lines
            sizes["lines of Python"] += lines
            sizes[f"functions of more than {MAX_FUNCTION_LINES} lines"] += sum(long_functions(text))
        elif file.endswith(_CPP):
            lines = Path(file).read_text(encoding="utf-8").count("\n")
            sizes[f"lines of C++ in {top}"] += lines
            sizes["lines of C++"] += lines
        elif file.endswith((".yaml", ".yml")):
            sizes["lines of YAML"] += Path(file).read_text(encoding="utf-8").count("\n")
        elif file.endswith(".md"):
            sizes["words in pages"] += len(_CODE_BLOCK.sub("", Path(file).read_text(encoding="utf-8")).split())
    return sizes


def long_functions(text: str) -> Iterator[bool]:
    """Yields whether each function of a module has more than `MAX_FUNCTION_LINES` lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES


def read_limits(text: str) -> dict[str, int]:
    """Returns the limit of each measure."""
    rows = (line.partition("#")[0].split(maxsplit=1) for line in text.splitlines())
    return {name.strip(): int(limit) for limit, name in filter(None, rows)}


def exceeded(sizes: Counter[str], limits: dict[str, int]) -> Iterator[str]:
    """Yields an error for each measure that exceeds its limit, or has none."""
    for name, size in sorted(sizes.items()):
        limit = limits.get(name)
        if limit is None:
            yield f"{LIMITS.name}: no limit for '{name}', which is {size}"
        elif size > limit:
            yield f"{name}: {size}, more than the limit of {limit} in tools/lint/{LIMITS.name}: remove some"
