"""neuronx-cc as a `Compiler`: settings and errors around its driver (`neuronx_cc_driver`).

`CompileConfig.flags` passes every setting explicitly. It omits `--native-int64` and `--implicit-integer-downcast`: releases without
them refuse them, and they change nothing, because the HLO that kernelgen emits has no 64-bit integers (I64 tensors arrive as pairs
of i32). A manifest whose own emitters need them sets `extra_flags`, which are part of the NEFF's key.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernelgen.compilers import neuronx_cc_driver as driver
from kernelgen.compilers import nki_calls
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, EXIT_USAGE, Diagnostic, KernelgenError

NAME = driver.NAME


@dataclass(frozen=True, slots=True)
class NeuronxCC:
    """A `Compiler` that `open` returns.

    Attributes:
        executable: absolute path of the program.
        version: its version as it prints it.
        note: a message to print once.
    """

    executable: Path
    version: str
    note: str = ""

    @staticmethod
    def open(executable: str | Path) -> NeuronxCC:
        """Returns the compiler at a path, after reading its version.

        Raises:
            KernelgenError: it cannot be run, or does not print a version of the NeuronX Compiler.
        """
        path = Path(executable).absolute()  # not resolved: a virtual environment's program may be a link
        try:
            return NeuronxCC(path, driver.version(path))
        except driver.CompileFailure as failure:
            raise _error(failure.message, failure, EXIT_USAGE) from None

    @property
    def name(self) -> str:
        return NAME

    @property
    def identity(self) -> str:
        return f"{NAME} {self.version}"

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
        """Returns the NEFF; see `Compiler.compile`, and the driver's `compile_hlo` for the files kept after a failure."""
        try:
            with tempfile.TemporaryDirectory(prefix="kernelgen-native-") as folder:
                return driver.compile_hlo(
                    nki_calls.materialized(hlo, Path(folder)),
                    self.executable,
                    config.flags(),
                    neff=f"{kernel}.{config.key}",
                    log_dir=log_dir,
                    timeout=timeout,
                    memory_mb=memory_mb,
                    log=log,
                )
        except driver.CompileFailure as failure:
            raise _error(f"kernel {kernel} for {config.target}: {failure.message}", failure, EXIT_FAILED) from None


def _error(message: str, failure: driver.CompileFailure, exit_code: int) -> KernelgenError:
    hint = failure.hint.replace("\n", "\n    ") or None
    return KernelgenError(Diagnostic(message, hint=hint), exit_code=exit_code)
