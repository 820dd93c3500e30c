"""The build steps that Bazel, CMake and `kernelgen build` run (`kernelgen.steps.protocol`).

A step is `emit`, `lint`, `compile`, `bundle` or `embed`, followed by `--name=value` arguments. It reads and writes
only the files in its arguments. With `--depfile` (a path) a step also writes a Makefile rule with the kernelgen sources that it
ran, for build tools that can't list them beforehand. With `--jax` (a version) it refuses any other version of JAX.

A worker imports JAX once. It imports an emitter again when its source changes (see `kernelgen.emitters.loading`), so an edit needs
no restart.

Bazel runs compilers through separate programs (`compilers.neuronx_cc_driver`, `steps.simulate`), so that changes here recompile
nothing. This is the narrow interface between the rules and kernelgen; people use `kernelgen` (`kernelgen.cli`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial

from kernelgen.steps import protocol
from kernelgen.steps.protocol import Arguments, Steps


def _run(module: str, arguments: Arguments) -> None:
    """Runs a step in its own module, which is imported now: no step depends on the imports of another."""
    importlib.import_module(f"kernelgen.steps.{module}").run(arguments)


STEPS: Steps = {name: partial(_run, name) for name in ("emit", "lint", "compile", "bundle", "embed")}


def run(words: Sequence[str]) -> tuple[int, str]:
    """Runs one step and returns its exit status and its output."""
    return protocol.run(STEPS, words)


def main(argv: Sequence[str]) -> int:
    # Steps multiply no matrices with NumPy, whose threads for that spin for a while wherever it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return protocol.main(STEPS, __doc__, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
