"""Sets the environment variables of a kernel's file, which its manifest defines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def environment(env: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables until the block ends."""
    with _restored():
        os.environ.update(env)
        yield


@contextlib.contextmanager
def only(env: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables and hides all others until the block ends."""
    with _restored():
        os.environ.clear()
        os.environ.update(env)
        yield


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
