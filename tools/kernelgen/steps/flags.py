"""A step's `--flag` arguments as compiler settings."""

from __future__ import annotations

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.steps.protocol import Arguments


def config_of(arguments: Arguments) -> CompileConfig:
    try:
        return CompileConfig.from_flags(arguments["flag"])
    except ValueError as error:
        raise KernelgenError(f"--flag: {error}") from None
