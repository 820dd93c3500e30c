"""The step `lint`: refuses HLO that neuronx-cc is known to refuse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kernelgen import fileio
from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_OK, Diagnostic, KernelgenError
from kernelgen.spec.filenames import kernel_of
from kernelgen.steps.common import warn
from kernelgen.steps.protocol import Arguments, one


def run(arguments: Arguments) -> None:
    """Refuses HLO that neuronx-cc is known to refuse: for each kernel an `--hlo`, and `--flags`, a JSON list of neuronx-cc's
    arguments for it. Writes the empty file `--stamp`.

    Prints warnings without refusing the kernel.

    Raises:
        KernelgenError: all errors of all kernels.
    """
    hlos = [Path(path) for path in arguments["hlo"]]
    configs = [CompileConfig.from_flags(json.loads(flags)) for flags in arguments["flags"]]
    if len(hlos) != len(configs):
        raise KernelgenError(f"lint: {len(hlos)} HLO, and the flags of {len(configs)}")
    warn(refuse_unsupported_hlo(hlos, configs))
    fileio.write_bytes(one(arguments, "stamp"), b"")


def refuse_unsupported_hlo(hlos: Sequence[Path], configs: Sequence[CompileConfig]) -> list[str]:
    """Returns the warnings of all kernels, each checked with its own settings."""
    mistakes: dict[Diagnostic, None] = {}
    warnings: list[str] = []
    code = EXIT_OK
    for path, config in zip(hlos, configs, strict=True):
        try:
            warnings += refuse_unsupported(path.read_bytes(), config, kernel_of(path))
        except KernelgenError as error:
            mistakes |= dict.fromkeys(error.diagnostics)
            code = max(code, error.exit_code)
    if mistakes:
        raise KernelgenError(mistakes, exit_code=code)
    return warnings
