"""Builds modules from names, to replace the packages that a kernel's file imports."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

PACKAGES = ("neuronxcc", "nki", "torch_neuronx")
"""The packages that the interpreter replaces."""

Maker = Callable[[], dict[str, types.ModuleType]]
_MAKERS: list[Maker] = []


def found_by_kernels(make: Maker) -> Maker:
    """Registers the function that builds the modules for kernels' imports.

    `modules` calls this. Registration avoids an import cycle: the recorder needs this module, because a kernel may import
    while it runs, and `modules` needs the recorder.
    """
    _MAKERS.append(make)
    return make


def made(names: Mapping[str, Mapping[str, Any]]) -> dict[str, types.ModuleType]:
    """Returns modules by name; each module is also an attribute of its parent.

    Args:
        names: each module's contents, by the module's full name. Parents without an entry are empty.
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
        found[full].__dict__.update(content)  # last: a package may use a submodule's name for something else
    return found


@contextlib.contextmanager
def standing_in(packages: Collection[str], modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """Makes imports of packages find only these modules while the context is active, and restores the old state afterwards.

    Args:
        packages: the packages to hide.
        modules: the modules that replace them, by name.
    """
    before = _taken(packages)
    sys.modules.update((name, module) for name, module in modules.items() if name.partition(".")[0] in packages)
    try:
        yield
    finally:
        _taken(packages)
        sys.modules.update(before)


def _taken(packages: Collection[str]) -> dict[str, types.ModuleType]:
    """Removes the imported modules of packages from sys.modules, and returns them."""
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in packages}


_ACTIVE: set[str] = set()
"""The packages that are replaced now."""


def absent(package: str) -> bool:
    """Returns whether a package is not installed.

    Empty placeholders from the public index do not count as installed, nor do plain folders of that name.
    """
    if package in sys.modules:
        return False
    try:
        spec = importlib.util.find_spec(package if package != "neuronxcc" else "neuronxcc.nki")
    except (ImportError, ValueError):
        return True
    return spec is None or spec.origin is None


@contextlib.contextmanager
def interpreter(*, replaced: bool = True) -> Iterator[None]:
    """Makes imports of NKI's packages resolve to the interpreter while the context is active, and restores them afterwards.

    Args:
        replaced: whether to replace also packages that are installed or imported.
    """
    if not _MAKERS:
        raise RuntimeError("import nki_interpreter.loading first: it has the modules that kernels import")
    wanted = {p for p in PACKAGES if p not in _ACTIVE and (replaced or absent(p))}
    _ACTIVE.update(wanted)
    try:
        with standing_in(wanted, {name: module for make in _MAKERS for name, module in make().items()}):
            yield
    finally:
        _ACTIVE.difference_update(wanted)
