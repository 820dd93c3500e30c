"""Compile settings of kernels: a target and the compiler's settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.spec.canonical import canonical_json
from kernelgen.targets import TARGETS


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """Compile settings of kernels: a target and neuronx-cc's settings, under its own names.

    A NEFF's key has only these, the HLO's bytes and the compiler's identity. The defaults are neuronx-cc's.

    Attributes:
        target: `--target`.
        optlevel: `--optlevel`, 1 to 3.
        auto_cast: `--auto-cast`: none, matmult or all.
        auto_cast_type: `--auto-cast-type`: bf16, fp16, tf32 or fp8_e4m3.
        model_type: `--model-type`: generic, transformer or unet-inference.
        lnc: `--lnc`; `make` replaces None by the target's default.
        extra_flags: further flags, in the given order.
    """

    target: str
    optlevel: int = 2
    auto_cast: str = "none"
    auto_cast_type: str = "bf16"
    model_type: str = "generic"
    lnc: int = 1
    extra_flags: tuple[str, ...] = ()

    @staticmethod
    def make(target: str, *, lnc: int | None = None, **settings: Any) -> CompileConfig:
        """Returns the settings for `target`, with the target's default `--lnc` unless one is given."""
        return CompileConfig(target, lnc=TARGETS[target].lnc if lnc is None else lnc, **settings)

    def flags(self) -> list[str]:
        """Returns neuronx-cc's arguments for these settings, in a fixed order, every one explicit."""
        return [
            "--framework",
            "XLA",
            "--target",
            self.target,
            "--optlevel",
            str(self.optlevel),
            "--model-type",
            self.model_type,
            "--auto-cast",
            self.auto_cast,
            "--auto-cast-type",
            self.auto_cast_type,
            "--lnc",
            str(self.lnc),
            *self.extra_flags,
        ]

    @staticmethod
    def from_flags(flags: Sequence[str]) -> CompileConfig:
        """Returns the settings from which `flags` made these arguments.

        Raises:
            ValueError: `flags` does not make such arguments.
        """
        if len(flags) >= 14:
            target, optlevel, model_type, auto_cast, cast_type, lnc = flags[3:14:2]
            if optlevel.isdecimal() and lnc.isdecimal():
                config = CompileConfig(
                    target, int(optlevel), auto_cast, cast_type, model_type, int(lnc), tuple(flags[14:])
                )
                if config.flags() == list(flags):
                    return config
        raise ValueError(f"not all of neuronx-cc's flags, in kernelgen's order: {' '.join(flags)}")

    @property
    def key(self) -> str:
        """A short name for files and targets: `trn1`, or `trn1-3f9a2c5d7e10` when settings differ from the defaults."""
        if self == CompileConfig.make(self.target):
            return self.target
        return f"{self.target}-{hashlib.sha256(canonical_json(self.flags()).encode()).hexdigest()[:12]}"
