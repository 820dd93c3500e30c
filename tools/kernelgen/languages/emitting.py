"""What is known while one kernel is emitted: the targets that it is for, and a place for notes about it.

A kernel that is called inside another, or by an emitter in JAX, finds both here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Emitting:
    """One kernel's emission.

    Attributes:
        targets: the targets that the kernel is built for; none when they are not known.
        notes: facts about the kernel as JSON values; the HLO does not depend on them.
    """

    targets: tuple[str, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


_CURRENT: ContextVar[Emitting | None] = ContextVar("emitting", default=None)


@contextlib.contextmanager
def emitting(targets: tuple[str, ...]) -> Iterator[Emitting]:
    """Makes one kernel's emission the current one while the block lasts."""
    made = Emitting(targets)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def targets() -> tuple[str, ...]:
    """Returns the targets that the kernel is built for; none when they are not known."""
    current = _CURRENT.get()
    return current.targets if current else ()


def add_notes(notes: Mapping[str, Any]) -> None:
    """Adds facts about the kernel that is being emitted. Lists of the same name are joined; of other values the last stays."""
    current = _CURRENT.get()
    if current is None:
        return
    for name, value in notes.items():
        known = current.notes.get(name)
        current.notes[name] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value
