"""Runs the tests of a checkout of AWS's NKI repositories with kernelgen's interpreter in place of the SDK; fetches nothing.

PYTHONPATH=tools python benchmarks/nki_suites.py CHECKOUT/nki/test [--each N] [--seconds S] [pytest's options]

In the tests' process, imports of `neuronxcc.nki`, `nki` and `torch_neuronx` resolve to the interpreter, and the suites'
other imports to `suites`. `--each 2` takes the first two cases of each test function, and `--seconds 60` fails a test
that takes more CPU seconds. All tests run in one process: pytest-xdist is disabled even if it is installed.
docs/results/nki-suites.md has the commands and their output.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import Counter
from collections.abc import Generator

import pytest

import suites.nki_library
import suites.nkipy
from nki_interpreter.loading import absent, interpreter
from nki_interpreter.standing_in import made
from suites.modules import installed


class _XdistHooks:
    """The hooks of pytest-xdist that suites implement; it is disabled, because its processes would lack the interpreter."""

    @pytest.hookspec(firstresult=True)
    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> int | None:
        return None

    def pytest_configure_node(self, node: object) -> None:
        return None


class _Plugin:
    def pytest_addoption(self, parser: pytest.Parser) -> None:
        parser.addoption("--each", type=int, default=0, help="run only this many cases of each test function; 0: all")
        parser.addoption("--seconds", type=float, default=0.0, help="the limit of a test's CPU seconds; 0: none")

    @pytest.hookimpl(trylast=True)  # after the selection by the tests and by pytest's marks
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        each = config.getoption("--each")
        if not each:
            return
        met: Counter[str] = Counter()
        left: list[pytest.Item] = []
        for item in items:
            function = item.nodeid.partition("[")[0]
            met[function] += 1
            if met[function] <= each:
                left.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        seconds = item.config.getoption("--seconds")

        def late(*_: object) -> None:
            raise TimeoutError(f"the test takes more than {seconds:g} CPU seconds")

        before = signal.signal(signal.SIGPROF, late)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def pytest_addhooks(self, pluginmanager: pytest.PytestPluginManager) -> None:
        pluginmanager.add_hookspecs(_XdistHooks)

    def pytest_collection_finish(self) -> None:
        suites.nki_library.mend()


def _is_absent(name: str) -> bool:
    if name in sys.modules or name in ("test", "test.utils"):
        return False
    return name.startswith(("nki.", "test.")) or absent(name.partition(".")[0])


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    with interpreter(), contextlib.ExitStack() as stack:
        for names in (suites.nkipy.names(), suites.nki_library.names()):
            kept = {name: module for name, module in made(names).items() if _is_absent(name)}
            stack.enter_context(installed(kept))
        own = "-p no:cacheprovider -p no:xdist --continue-on-collection-errors -o addopts= -q --tb=short".split()
        return int(pytest.main([*own, *arguments], plugins=[_Plugin()]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
