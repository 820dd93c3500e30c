"""Errors that a user can mend, and the exit codes of every command.

A mistake in the input is raised as `KernelgenError` and printed without a traceback; anything else that escapes is a bug.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_SHOWN = 100
"""How many mistakes are shown at most: a report is to be read."""
MAX_TEXT = 1 << 16
"""How many characters of what a step says are shown at most."""
_MAX_ERROR = 1 << 12
"""How many characters of what an exception says are shown at most."""

EXIT_OK = 0
EXIT_FAILED = 1
"""A kernel failed to build, or one is missing."""
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
    """One mistake: where, what, and how to mend it."""

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
        """Returns the mistakes as text; of very many the first, and how many more there are."""
        shown = [str(diagnostic) for diagnostic in self.diagnostics[:MAX_SHOWN]]
        more = len(self.diagnostics) - len(shown)
        return [*shown, f"and {more} more"] if more else shown


class TookTooLong(BaseException):
    """Something was stopped at its time limit. It is not an `Exception`, so code that catches those does not catch it.

    Args:
        seconds: the limit.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it took longer than its time limit and was stopped after {seconds:g} s")


def printable(text: str) -> str:
    """Returns text with its control characters written out, except for line ends and tabs: a file must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text of at most about `limit` characters: the beginning of a longer one, and how much more there is."""
    more = len(text) - limit
    return f"{text[:limit]}\n… and {more} characters more" if more > 0 else text


def described(error: BaseException) -> str:
    """Returns the type of an exception and what it says, which may be long and may raise itself."""
    if isinstance(error, TookTooLong):
        return str(error)
    name = type(error).__name__
    try:
        text = str(error).strip()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"{name}, whose message can't be printed"
    return shortened(f"{name}: {text}" if text else name, _MAX_ERROR)


def signal_name(number: int) -> str:
    """Returns what a signal is called; real-time signals have numbers only."""
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
