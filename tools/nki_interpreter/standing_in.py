"""Modules that are made of names, and stand in for packages that a kernel's file imports."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Collection, Iterator, Mapping
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
def standing_in(packages: Collection[str], modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """While it is active, imports of packages find these modules and nothing else; afterwards all is what it was before.

    Args:
        packages: whose modules are not seen meanwhile.
        modules: those of them that are, by name.
    """
    before = _taken(packages)
    sys.modules.update((name, module) for name, module in modules.items() if name.partition(".")[0] in packages)
    try:
        yield
    finally:
        _taken(packages)
        sys.modules.update(before)


def _taken(packages: Collection[str]) -> dict[str, types.ModuleType]:
    """Removes what is imported of packages, and returns it."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in packages}
