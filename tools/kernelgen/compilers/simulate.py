"""Simulates one compile: checks that XLA compiles the HLO, and packs it into a simulated NEFF (`kernelgen.neff.container`).

    python -m kernelgen.compilers.simulate @ARGUMENTS          see `kernelgen.steps.protocol`

Bazel runs this program in place of neuronx-cc. The program and the modules that it imports are inputs of every simulated compile;
so they are few, and what changes often (planning, the lint, reports) is not among them. A simulated NEFF loads on no device.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.fileio import write_bytes
from kernelgen.hlo.cpu import check_compiles
from kernelgen.neff import container
from kernelgen.steps import protocol
from kernelgen.steps.protocol import Arguments, one

VERSION = "3"
"""Raised when the simulator makes other NEFFs of the same HLO; a test holds the bytes of one against it."""


_NATIVE = b"AwsNeuronCustomNativeKernel"


def identity() -> str:
    """Returns name and version: the simulator's own, and that of the XLA that it compiles with."""
    return f"simulator {VERSION} (jaxlib {importlib.metadata.version('jaxlib')})"


def simulate(hlo: bytes, flags: Sequence[str]) -> bytes:
    """Returns a simulated NEFF. Its bytes depend on the arguments and the identity alone.

    What XLA makes is not kept: the HLO is what runs, compiled for the machine that it runs on.

    Args:
        hlo: a serialized HloModuleProto.
        flags: the arguments that neuronx-cc would be given.

    Raises:
        KernelgenError: `hlo` can't be read, or XLA does not compile it.
    """
    if _NATIVE in hlo:
        message = "it calls what NKI's own compiler made of a kernel, which no CPU runs: use neuronx-cc, or 'lowering: interpreted'"
        raise KernelgenError(message, exit_code=EXIT_FAILED)
    try:
        check_compiles(hlo)
    except ValueError as error:
        raise KernelgenError(f"the simulator cannot compile it: {error}", exit_code=EXIT_FAILED) from None
    return container.write_simulated(hlo, flags, identity())


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
