"""docs/reference/log.md: the messages that the backend prints, from its sources."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from regenerate.command import COMMAND

SOURCES = Path(__file__).parents[2] / "backend" / "ggml-neuron"

_CALL = re.compile(r'\bNEURON_(ERROR|WARN|LOG|DEBUG)\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh|h|ll|l|z)?[a-zA-Z]")
_WORD = re.compile(r"[A-Za-z]{3,}")

HEAD = f"""# Messages of the backend

This page lists the messages that the backend prints to stderr. Each line begins with `ggml-neuron: `. A message has at most
three lines: what happened, why, and what to type. The second and the third line are indented. `…` stands for a name or a number.
`{COMMAND}` generates the tables from the sources.

[failures.md](failures.md) describes what the backend does in case of an error. [groups.md](groups.md#messages-in-the-log),
[fallback.md](fallback.md#the-lines) and [memory.md](memory.md#what-a-token-moves-over-the-host) explain the lines of a run.

The backend prints a message once. It prints at most ten messages that differ only in names and numbers. `GGML_NEURON_LOG=2` prints
all of them.
"""
TITLES = {
    "ERROR": "## Errors\n\nThe backend always prints these messages, and also messages of libnrt that it passes on.",
    "WARN": "## Warnings\n\nThe backend always prints these messages.",
    "LOG": "## Details\n\nThe backend prints these messages with `GGML_NEURON_LOG=1`: a summary of the run.",
    "DEBUG": "## Debugging\n\nThe backend also prints these messages, such as each load, with `GGML_NEURON_LOG=2`.",
}


def lines(source: str) -> Iterator[tuple[str, str]]:
    """Yields (kind, message) of the messages that a C++ source prints; kind is ERROR, WARN, LOG or DEBUG.

    A message has a line break between its lines. Messages that only print a text from elsewhere are left out.
    """
    for kind, literals in _CALL.findall(source):
        text = (
            "".join(_LITERAL.findall(literals))
            .replace('\\"', '"')
            .removesuffix("\\n")
            .replace("\\n", "\n")
            .replace("%%", "%")
        )
        text = CONVERSION.sub("…", text)
        if _WORD.search(text.removeprefix("core …: ")):
            yield kind, text


def messages() -> Iterator[tuple[str, str, str]]:
    """Yields (kind, message, source) of the backend's messages, by their sources."""
    for path in sorted(SOURCES.rglob("*.cpp")):
        name = path.relative_to(SOURCES)
        if name.parts[0] not in ("tests", "build"):
            for kind, message in lines(path.read_text(encoding="utf-8")):
                yield kind, message, str(name)


def render() -> str:
    """Returns the text of log.md."""
    rows: dict[str, list[str]] = {kind: [] for kind in TITLES}
    for kind, message, name in messages():
        cell = message.strip().replace("|", "\\|").replace("`", "'").replace("\n", "`<br>`")
        rows[kind].append(f"| `{cell}` | `{name}` |")
    tables = [
        "\n".join([TITLES[kind], "", "| message | source |", "|---|---|", *found]) for kind, found in rows.items()
    ]
    return "\n".join([HEAD, "\n\n".join(tables), ""])
