"""The simulator as a compiler: what is used where there is no Neuron SDK.

It compiles the HLO with XLA for the CPU, so that a kernel that does not compile fails here too, throws the result away, and
packs the HLO into a simulated NEFF (`kernelgen.neff`). Its NEFFs load on no device.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from kernelgen import neff
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.hlo.cpu import check_compiles

VERSION = "1"
"""Raised when the simulator makes other NEFFs of the same HLO."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """A `Compiler`; see there.

    Attributes:
        note: what to tell the user once.
    """

    note: str = ""

    @property
    def name(self) -> str:
        return "simulator"

    @property
    def identity(self) -> str:
        return f"simulator {VERSION} (jaxlib {importlib.metadata.version('jaxlib')})"

    def compile(
        self,
        hlo: bytes,
        config: CompileConfig,
        *,
        kernel: str,
        log_dir: Path,
        timeout: float | None = None,
        memory_mb: int | None = None,
    ) -> bytes:
        """Returns a simulated NEFF.

        It works in this process: `timeout` and `memory_mb` do not apply, and the error holds all there is to know.
        """
        refuse_unsupported(hlo, config, kernel)
        try:
            # What comes out is not kept: the HLO is what runs, compiled for the machine that it runs on.
            check_compiles(hlo)
        except ValueError as error:
            raise KernelgenError(
                f"kernel {kernel} for {config.target}: the simulator cannot compile it: {error}", exit_code=EXIT_FAILED
            ) from None
        return neff.write_simulated(hlo, config, self.identity)
