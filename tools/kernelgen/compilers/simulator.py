"""The simulator as a `Compiler`, for machines without a Neuron SDK. `simulate` does the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelgen.compilers import simulate
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError


@dataclass(frozen=True, slots=True)
class Simulator:
    """The simulator as a `Compiler`.

    Attributes:
        note: a message to print once.
    """

    note: str = ""

    @property
    def name(self) -> str:
        return "simulator"

    @property
    def identity(self) -> str:
        return simulate.identity()

    def compile(
        self,
        hlo: bytes,
        config: CompileConfig,
        *,
        kernel: str,
        log_dir: Path,
        timeout: float | None = None,
        memory_mb: int | None = None,
        log: Path | None = None,
    ) -> bytes:
        """Returns a simulated NEFF.

        It runs in this process: `timeout` and `memory_mb` do not apply, and the error has all the information.
        """
        try:
            return simulate.simulate(hlo, config.flags())
        except KernelgenError as error:
            message = error.diagnostics[0].message
            raise KernelgenError(f"kernel {kernel} for {config.target}: {message}", exit_code=error.exit_code) from None
