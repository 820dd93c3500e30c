"""The simulator as a `Compiler`, for machines without a Neuron SDK. `simulate` does the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelgen.compilers import simulate
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError


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

        It works in this process: `timeout` and `memory_mb` do not apply, and the error holds all there is to know.
        """
        try:
            return simulate.simulate(hlo, config.flags())
        except KernelgenError as error:
            message = error.diagnostics[0].message
            raise KernelgenError(f"kernel {kernel} for {config.target}: {message}", exit_code=error.exit_code) from None
