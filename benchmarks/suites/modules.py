"""Modules that are made of names, for packages that are absent."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any


def made(names: Mapping[str, Mapping[str, Any]]) -> dict[str, types.ModuleType]:
    """Returns modules by name; a module is also an attribute of the one it is in.

    Args:
        names: what each module has, by the module's full name. Parents that are not named are empty.
    """
    found: dict[str, types.ModuleType] = {}
    for full in names:
        parts = full.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name in found:
                continue
            found[name] = types.ModuleType(name)
            found[name].__path__ = []
            if end > 1:
                setattr(found[".".join(parts[: end - 1])], parts[end - 1], found[name])
    for full, content in names.items():
        found[full].__dict__.update(content)  # last: what a package has of a module's name is not always the module
    return found


@contextlib.contextmanager
def installed(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """While it is active, imports of these modules find them."""
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
