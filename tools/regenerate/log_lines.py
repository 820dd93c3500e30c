"""docs/reference/log.md: the lines that the backend prints, from its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from regenerate.command import COMMAND

SOURCES = Path(__file__).parents[2] / "backend" / "ggml-neuron"

_CALL = re.compile(r'\bNEURON_(ERROR|WARN|LOG)\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z)?[a-zA-Z]")
_WORD = re.compile(r"[A-Za-z]{3,}")

HEAD = f"""# Lines that the backend prints

Each line begins with `ggml-neuron: ` and goes to stderr. `…` stands for a name or a number. `{COMMAND}` generates the
tables from the sources.

[failures.md](failures.md) says what the backend does when something is wrong. [groups.md](groups.md#what-the-log-says),
[fallback.md](fallback.md#the-lines) and [memory.md](memory.md#what-a-token-moves-over-the-host) explain the lines of a run.

The backend prints a line once. Of lines that differ only in names and numbers it prints ten. `GGML_NEURON_LOG=2` prints
all of them.
"""
TITLES = {
    "ERROR": "## Errors\n\nThe backend always prints these. The table leaves out lines that only pass on a message of libnrt.",
    "WARN": "## Warnings\n\nThe backend always prints these.",
    "LOG": "## Details\n\n`GGML_NEURON_LOG=1` prints these.",
}


def lines(source: str) -> Iterator[tuple[str, str]]:
    """Yields (kind, line) of the lines that a C++ source prints; kind is ERROR, WARN or LOG.

    It leaves out lines that only print a text from elsewhere.
    """
    for kind, literals in _CALL.findall(source):
        text = "".join(_LITERAL.findall(literals)).replace('\\"', '"').removesuffix("\\n").replace("%%", "%")
        text = _CONVERSION.sub("…", text)
        if _WORD.search(text.removeprefix("core …: ")):
            yield kind, text


def render() -> str:
    """Returns the text of log.md."""
    rows: dict[str, list[str]] = {kind: [] for kind in TITLES}
    for path in sorted(SOURCES.rglob("*.cpp")):
        name = path.relative_to(SOURCES)
        if name.parts[0] not in ("tests", "build"):
            for kind, line in lines(path.read_text(encoding="utf-8")):
                cell = line.replace("|", "\\|").replace("`", "'")
                rows[kind].append(f"| `{cell}` | `{name}` |")
    tables = ["\n".join([TITLES[kind], "", "| line | source |", "|---|---|", *found]) for kind, found in rows.items()]
    return "\n".join([HEAD, "\n\n".join(tables), ""])
