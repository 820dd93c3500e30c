"""Runs tests of a checkout of AWS's NKI repositories with kernelgen's interpreter in place of the SDK; fetches nothing.

PYTHONPATH=tools python benchmarks/nki_suites.py CHECKOUT/nki/test [pytest's options]

In the tests' process, imports of `neuronxcc.nki`, `nki` and `torch_neuronx` resolve to the interpreter wherever those packages are
absent. docs/kernels-in-nki.md has the commands and what they print.
"""

from __future__ import annotations

import sys

import pytest

from kernelgen.languages.nki.loading import PACKAGES, absent, interpreter


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    present = [package for package in PACKAGES if not absent(package)]
    if present:
        print(f"installed, so not replaced: {', '.join(present)}", file=sys.stderr)
    with interpreter():
        return int(pytest.main(["-p", "no:cacheprovider", "-q", "--tb=short", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
