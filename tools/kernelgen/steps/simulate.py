"""Simulates one compile; Bazel runs this program instead of neuronx-cc.

    python -m kernelgen.steps.simulate @ARGUMENTS          see `kernelgen.steps.protocol`

The program and its imported modules are inputs of every simulated compile; so they are few, and exclude code that changes often
(planning, the lint, reports). A simulated NEFF loads on no device.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kernelgen.compilers.simulate import simulate
from kernelgen.errors import KernelgenError
from kernelgen.fileio import write_bytes
from kernelgen.steps import protocol
from kernelgen.steps.protocol import Arguments, one


def step(arguments: Arguments) -> None:
    """Simulates one compile: `--hlo`, `--output`, and a `--flag` for each of neuronx-cc's arguments."""
    output = Path(one(arguments, "output"))
    try:
        made = simulate(Path(one(arguments, "hlo")).read_bytes(), arguments["flag"])
    except KernelgenError as error:
        raise KernelgenError(
            f"{output.name.removesuffix('.neff')}: {error.diagnostics[0].message}", exit_code=error.exit_code
        ) from None
    write_bytes(output, made)


if __name__ == "__main__":
    sys.exit(protocol.main({"compile": step}, __doc__, sys.argv[1:]))
