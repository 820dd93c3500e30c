"""Errors that a user can correct, and the exit codes of every command.

A mistake in the input raises `KernelgenError`, which is printed without a traceback; any other exception that escapes is a bug.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_SHOWN = 100
"""Maximum number of mistakes shown, so that a report stays readable."""
MAX_TEXT = 1 << 16
"""Maximum number of characters shown of a step's output."""
_MAX_ERROR = 1 << 12
"""Maximum number of characters shown of an exception's message."""

EXIT_OK = 0
EXIT_FAILED = 1
"""A kernel failed to build, or is missing."""
EXIT_USAGE = 2
"""Wrong usage or bad input."""


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """A place in a text file; line and column count from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One mistake: its place, its description, and how to correct it."""

    message: str
    location: Location | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{where}error: {self.message}{hint}"


class KernelgenError(Exception):
    """One or more mistakes of the user, reported together.

    Args:
        diagnostics: the mistakes, or one message.
        exit_code: what the command exits with; `EXIT_USAGE` unless a build step failed.
    """

    def __init__(self, diagnostics: str | Diagnostic | Iterable[Diagnostic], *, exit_code: int = EXIT_USAGE) -> None:
        if isinstance(diagnostics, str):
            diagnostics = [Diagnostic(diagnostics)]
        elif isinstance(diagnostics, Diagnostic):
            diagnostics = [diagnostics]
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        self.exit_code = exit_code
        super().__init__("\n".join(self.report()))

    def report(self) -> list[str]:
        """Returns the mistakes as text; of a long list, the first ones and the number of the others."""
        shown = [str(diagnostic) for diagnostic in self.diagnostics[:MAX_SHOWN]]
        more = len(self.diagnostics) - len(shown)
        return [*shown, f"and {more} more"] if more else shown


def printable(text: str) -> str:
    """Returns text with its control characters escaped, except line ends and tabs: a file must not control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Returns the text, cut to about `limit` characters, with the number of characters that were cut."""
    more = len(text) - limit
    return f"{text[:limit]}\n… and {more} characters more" if more > 0 else text


def described(error: BaseException) -> str:
    """Returns an exception's type and its message, which is shortened; the message's own code may raise."""
    name = type(error).__name__
    try:
        text = str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"{name}, whose message can't be printed"
    return shortened(f"{name}: {text}" if text else name, _MAX_ERROR)


def signal_name(number: int) -> str:
    """Returns a signal's name; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def nearest(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """Returns the known name that `name` most likely stands for, or None.

    Args:
        name: what the user wrote.
        known: the valid names.
        aliases: names other tools use for the same thing ("softmax" for "soft_max"); they win over spelling distance.
    """
    folded = _folded(name)[:100]
    if aliases and folded in aliases:
        return aliases[folded]
    names = {_folded(one): one for one in known}
    near = difflib.get_close_matches(folded, names, n=1, cutoff=0.6)
    return names[near[0]] if near else None


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def did_you_mean(name: str, known: Sequence[str] | Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Returns ": did you mean 'x'?" for the known name nearest to `name` (see `nearest`), or an empty string."""
    near = nearest(name, known, aliases)
    return f": did you mean '{near}'?" if near else ""
