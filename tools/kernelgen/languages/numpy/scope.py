"""The state of a trace: the kernel, and the bodies of its loops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Trace:
    """One kernel during its trace.

    Attributes:
        targets: the targets whose limits apply to knobs.
        knobs: the recorded knobs, as JSON values, in order.
    """

    targets: tuple[str, ...]
    knobs: list[dict[str, Any]] = field(default_factory=list)


TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The current trace; None outside a kernel."""

_bodies: list[object] = [object()]


@contextlib.contextmanager
def loop_body() -> Iterator[None]:
    """Makes the body of a loop the innermost one until the block ends: a value of a body must not leave it."""
    _bodies.append(object())
    try:
        yield
    finally:
        _bodies.pop()


def body() -> object:
    """Returns the innermost loop body, an object equal only to itself."""
    return _bodies[-1]
