"""The protocol of all compilers, and their common checks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.hlo.lint import errors, lint
from kernelgen.targets import TARGETS


class Compiler(Protocol):
    """A compiler from HLO to NEFF. One object serves any number of threads."""

    @property
    def name(self) -> str:
        """`neuronx-cc` or `simulator`."""

    @property
    def identity(self) -> str:
        """Name and version. A NEFF depends only on this, the HLO and the settings."""

    @property
    def note(self) -> str:
        """A message about the choice of this compiler, to be printed once; empty if there is none."""

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
        """Returns the NEFF.

        Args:
            hlo: a serialized HloModuleProto.
            config: target and settings.
            kernel: the kernel's name, for errors and for the files kept after a failure.
            log_dir: folder for the files kept after a failure; a successful compile writes nothing there.
            timeout: seconds; None for no limit.
            memory_mb: MiB of memory that the compiler may use; None for no limit.
            log: file for the compiler's output, written on success if the compiler prints anything.

        Raises:
            KernelgenError: the compiler failed (exit code 1).
        """


def refuse_unsupported(hlo: bytes, config: CompileConfig, kernel: str) -> list[str]:
    """Raises for HLO that neuronx-cc is known to refuse with these settings: without an SDK, and without minutes of compiling.

    Every check of HLO before a compile, or instead of one, calls this: the flags decide what the compiler accepts.

    Returns the lint's warnings, one line each: code that compiles but may not do what its author meant.

    Raises:
        KernelgenError: one diagnostic for each error, with the rule's name; or `hlo` is not HLO.
    """
    target = config.target
    if target not in TARGETS:
        raise KernelgenError(f"unknown target '{target}' (known: {', '.join(TARGETS)})")
    try:
        findings = lint(hlo, TARGETS[target], flags=config.extra_flags, lnc=config.lnc)
    except ValueError as error:
        raise KernelgenError(f"kernel {kernel}: {error}") from None
    refused = errors(findings)
    if refused:
        raise KernelgenError(
            [Diagnostic(f"kernel {kernel} for {target}: {f}", hint=f.hint or None) for f in refused],
            exit_code=EXIT_FAILED,
        )
    return [f"kernel {kernel} for {target}: {f} ({f.hint})" for f in findings]
