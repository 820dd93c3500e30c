"""Simulates one compile: checks that XLA compiles the HLO, and packs it into a simulated NEFF (`kernelgen.neff.container`)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.hlo.cpu import check_compiles
from kernelgen.hlo.custom_calls import TARGET
from kernelgen.neff import container

VERSION = "4"
"""Version of the simulator's NEFFs. Raise it when the same HLO gives other bytes; a test compares one NEFF's bytes."""


def identity() -> str:
    """Returns name and version of the simulator, and of the XLA that it compiles with."""
    return f"simulator {VERSION} (jaxlib {importlib.metadata.version('jaxlib')})"


def simulate(hlo: bytes, flags: Sequence[str]) -> bytes:
    """Returns a simulated NEFF. Its bytes depend only on the arguments and the identity.

    XLA's output is discarded: the simulated device compiles the HLO for its own machine.

    Args:
        hlo: a serialized HloModuleProto.
        flags: neuronx-cc's arguments.

    Raises:
        KernelgenError: `hlo` can't be read, or XLA does not compile it.
    """
    if TARGET.encode() in hlo:
        message = "it calls what NKI's own compiler made of a kernel, which no CPU runs: use neuronx-cc, or 'lowering: interpreted'"
        raise KernelgenError(message, exit_code=EXIT_FAILED)
    try:
        check_compiles(hlo)
    except ValueError as error:
        raise KernelgenError(f"the simulator cannot compile it: {error}", exit_code=EXIT_FAILED) from None
    return container.write_simulated(hlo, flags, identity())
