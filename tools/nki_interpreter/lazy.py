"""Modules that are imported when they are first used: a kernel is recorded and checked without JAX; only its lowering needs it."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module, and imports it at the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


jnp: Any = LazyModule("jax.numpy")
lax: Any = LazyModule("jax.lax")
jax: Any = LazyModule("jax")
