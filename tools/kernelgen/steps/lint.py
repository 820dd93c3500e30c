"""`lint`: refuses HLO that neuronx-cc is known to refuse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kernelgen import fileio
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.errors import EXIT_OK, Diagnostic, KernelgenError
from kernelgen.spec.filenames import kernel_of
from kernelgen.steps.common import warn
from kernelgen.steps.protocol import Arguments, one


def run(arguments: Arguments) -> None:
    """Refuses what neuronx-cc is known to refuse for a `--target`: an `--hlo` a kernel. Writes the empty file `--stamp`.

    Warnings are printed, and refuse nothing.

    Raises:
        KernelgenError: all errors of all kernels.
    """
    warn(refuse_unsupported_hlo(map(Path, arguments["hlo"]), one(arguments, "target")))
    fileio.write_bytes(one(arguments, "stamp"), b"")


def refuse_unsupported_hlo(hlos: Iterable[Path], target: str) -> list[str]:
    """Returns the warnings of all kernels."""
    mistakes: dict[Diagnostic, None] = {}
    warnings: list[str] = []
    code = EXIT_OK
    for path in hlos:
        try:
            warnings += refuse_unsupported(path.read_bytes(), target, kernel_of(path))
        except KernelgenError as error:
            mistakes |= dict.fromkeys(error.diagnostics)
            code = max(code, error.exit_code)
    if mistakes:
        raise KernelgenError(mistakes, exit_code=code)
    return warnings
