"""Runs tests of a checkout of AWS's NKI repositories with kernelgen's interpreter in place of the SDK; fetches nothing.

PYTHONPATH=tools python benchmarks/nki_suites.py CHECKOUT/nki/test [pytest's options]

In the tests' process, imports of `neuronxcc.nki`, `nki` and `torch_neuronx` resolve to the interpreter wherever those packages are
absent, and what else the suites import to `suites`. docs/kernels-in-nki.md has the commands and what they print.
"""

from __future__ import annotations

import contextlib
import sys

import pytest

import suites.nki_library
import suites.nkipy
from kernelgen.languages.nki.loading import PACKAGES, absent, interpreter
from suites.modules import installed, made


class _XdistHooks:
    """The hooks that suites implement for pytest-xdist, which is not needed."""

    @pytest.hookspec(firstresult=True)
    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> int | None:
        return None

    def pytest_configure_node(self, node: object) -> None:
        return None


class _Plugin:
    def pytest_addhooks(self, pluginmanager: pytest.PytestPluginManager) -> None:
        if not pluginmanager.hasplugin("xdist"):
            pluginmanager.add_hookspecs(_XdistHooks)


def _is_absent(name: str) -> bool:
    if name in sys.modules or name in ("test", "test.utils"):
        return False
    return name.startswith(("nki.", "test.")) or absent(name.partition(".")[0])


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    present = [package for package in PACKAGES if not absent(package)]
    if present:
        print(f"installed, so not replaced: {', '.join(present)}", file=sys.stderr)
    with interpreter(), contextlib.ExitStack() as stack:
        parts = [suites.nkipy.names()]
        if "nki" not in present:
            parts.append(suites.nki_library.names())
        for names in parts:
            # What is inside of the interpreter's `nki` is absent from a package that is installed under that name.
            kept = {name: module for name, module in made(names).items() if _is_absent(name)}
            stack.enter_context(installed(kept))
        own = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-o", "addopts=", "-q", "--tb=short"]
        return int(pytest.main([*own, *arguments], plugins=[_Plugin()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
