"""The protocol of all compilers, and what they share."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.hlo.lint import errors, lint
from kernelgen.targets import TARGETS


class Compiler(Protocol):
    """A compiler of HLO to NEFF. One object serves any number of threads."""

    @property
    def name(self) -> str:
        """`neuronx-cc` or `simulator`."""

    @property
    def identity(self) -> str:
        """Name and version: with the HLO and the settings, all that a NEFF depends on."""

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
            hlo: serialized HloModuleProto.
            config: target and settings.
            kernel: the kernel's name, for errors and for the files kept of a failure.
            log_dir: where those are kept; nothing is written there when all goes well.
            timeout: seconds; None for no limit.
            memory_mb: MiB of memory that the compiler may use; None for no limit.
            log: the file for what the compiler prints, written when all goes well; a compiler that prints nothing writes none.

        Raises:
            KernelgenError: the compiler failed (exit code 1).
        """


def refuse_unsupported(hlo: bytes, config: CompileConfig, kernel: str) -> list[str]:
    """Raises what neuronx-cc is known to refuse with these settings, without an SDK and before minutes of compiling.

    Everything that checks HLO before a compile, or in its place, asks here: with some flags the compiler takes more.

    Returns the lint's warnings, a line of text each: what the compiler takes and may not do what was meant.

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
