"""The environment variables that a kernel's file sees while it is imported: those that its manifest names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables while the block lasts."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
