"""The state of emitting one kernel: its targets, and its notes.

A kernel that another kernel or an emitter in JAX calls uses the same state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelEmission:
    """One kernel's emission.

    Attributes:
        targets: the kernel's targets; empty if they are not available.
        notes: facts about the kernel as JSON values; the HLO does not depend on them.
    """

    targets: tuple[str, ...] = ()
    notes: dict[str, Any] = field(default_factory=dict)


_CURRENT: ContextVar[KernelEmission | None] = ContextVar("emitting", default=None)


@contextlib.contextmanager
def emitting(targets: tuple[str, ...]) -> Iterator[KernelEmission]:
    """Makes one kernel's emission the current one until the block ends."""
    made = KernelEmission(targets)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def targets() -> tuple[str, ...]:
    """Returns the kernel's targets; empty if they are not available."""
    current = _CURRENT.get()
    return current.targets if current else ()


def add_notes(notes: Mapping[str, Any]) -> None:
    """Adds notes about the current kernel. Lists of the same name are joined; for other values the last one counts."""
    current = _CURRENT.get()
    if current is None:
        return
    for name, value in notes.items():
        known = current.notes.get(name)
        current.notes[name] = [*known, *value] if isinstance(known, list) and isinstance(value, list) else value
