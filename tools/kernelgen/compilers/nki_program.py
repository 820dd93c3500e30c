"""neuronx-cc for HLO that holds what NKI's own compiler made: its files are put beside the HLO, and neuronx-cc is run on that.

    python3 -m kernelgen.compilers.nki_program COMPILER compile HLO FLAGS...

The rules for Bazel have `neuronx_cc_driver` run this where a kernel is native, and neuronx-cc itself elsewhere. It is run in the
driver's scratch folder, whose HLO stays as it is: so a failed compile can be repeated by the command that the driver prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelgen.compilers import nki_calls
from kernelgen.errors import KernelgenError


def main(argv: Sequence[str]) -> int:
    """Replaces this process by neuronx-cc; returns the exit status if that fails."""
    compiler, step, hlo, *flags = argv
    try:
        made = nki_calls.materialized(Path(hlo).read_bytes(), Path.cwd())
    except KernelgenError as error:
        print(*error.report(), sep="\n", file=sys.stderr)
        return error.exit_code
    given = Path("native.pb")
    given.write_bytes(made)
    # What the script that runs this has changed for Python, and is not neuronx-cc's.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KERNELGEN_HOME")}
    environment["HOME"] = os.environ["KERNELGEN_HOME"]
    os.execve(compiler, [compiler, step, str(given), *flags], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
