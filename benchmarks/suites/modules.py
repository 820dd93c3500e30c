"""Builds modules in place of packages that are not installed."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def installed(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Makes imports of these modules find them while the context is active."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if parent in sys.modules and not hasattr(sys.modules[parent], own):
            setattr(sys.modules[parent], own, module)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
