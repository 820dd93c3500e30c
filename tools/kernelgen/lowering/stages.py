"""A kernel as text at each step from its language to XLA's code for the CPU: for people, and for tests of the emitted code."""

from __future__ import annotations

from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.lowering.kernel import Lowered

STAGES = ("traced", "hlo", "canonical", "optimized")
"""The language's operations in JAX; JAX's HLO; the canonical HLO for the compiler; XLA's optimized HLO for this machine's CPU."""


def text(lowered: Lowered, stage: str) -> str:
    """Returns a kernel at a stage, ending in a newline.

    Args:
        lowered: the traced kernel.
        stage: one of `STAGES`.
    """
    if stage == "traced":
        return f"{lowered.traced}\n"
    if stage == "hlo":
        return _hlo_text(lowered.hlo)
    hlo = canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases)
    if stage == "canonical":
        return _hlo_text(hlo)
    from kernelgen.hlo.execute import compile_for_cpu

    made: str = compile_for_cpu(hlo).loaded.hlo_modules()[0].to_string()
    return made.rstrip() + "\n"


def _hlo_text(hlo: bytes) -> str:
    from jaxlib import xla_client

    made: str = xla_client.XlaComputation(hlo).as_hlo_text()
    return made.rstrip() + "\n"
