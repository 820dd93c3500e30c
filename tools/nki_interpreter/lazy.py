"""Modules that are imported at their first use. Recording and checking a kernel needs no JAX; only lowering does."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Replaces a module, and imports it at the first use of one of its names."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._name), name)
        setattr(self, name, value)
        return value


jnp: Any = LazyModule("jax.numpy")
lax: Any = LazyModule("jax.lax")
jax: Any = LazyModule("jax")
