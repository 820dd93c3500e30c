"""Runs neuronx-cc on HLO that holds output of NKI's compiler: writes its files beside the HLO first.

    python3 -m kernelgen.compilers.nki_program COMPILER compile HLO FLAGS...

The Bazel rules make `neuronx_cc_driver` run this for native kernels, and neuronx-cc itself for others. It runs in the driver's
scratch folder and leaves the HLO unchanged, so the command that the driver prints repeats a failed compile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelgen.compilers import nki_calls
from kernelgen.errors import KernelgenError


def main(argv: Sequence[str]) -> int:
    """Replaces this process with neuronx-cc; returns the exit status if that fails."""
    compiler, step, hlo, *flags = argv
    try:
        made = nki_calls.materialized(Path(hlo).read_bytes(), Path.cwd())
    except KernelgenError as error:
        print(*error.report(), sep="\n", file=sys.stderr)
        return error.exit_code
    given = Path("native.pb")
    given.write_bytes(made)
    # Remove the variables that the launcher script sets for Python; they are not neuronx-cc's.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERNELGEN_HOME")}
    environment["HOME"] = os.environ["KERNELGEN_HOME"]
    os.execve(compiler, [compiler, step, str(given), *flags], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
