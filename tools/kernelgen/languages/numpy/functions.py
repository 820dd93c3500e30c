"""Imports the modules that say how NumPy's functions are computed, each of which fills `tensor.FUNCTIONS`."""

from __future__ import annotations

from functools import cache


@cache
def load() -> None:
    """Fills the table, once."""
    from kernelgen.languages.numpy import creation, elementwise, gathering, layout, linalg, reductions  # noqa: F401
