"""Estimates of programs, by kernel and settings: `kernelgen plan --estimate` prints them, and refuses programs above a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernelgen.cli.emit import emitted
from kernelgen.cli.units import binary_size
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo.estimate import MAX_DESCRIPTORS, Estimate, estimate
from kernelgen.plan import Kernel, Plan
from kernelgen.spec.kernel import Spec
from kernelgen.targets import MAX_INSTRUCTIONS

LIMITS = (
    ("instructions", "total", MAX_INSTRUCTIONS, "neuronx-cc takes"),
    ("DMA descriptors", "dma_descriptors", MAX_DESCRIPTORS, "the runtime loads"),
)
"""Attributes of `Estimate`, their limits, and the sources of the limits."""


@dataclass(frozen=True, slots=True)
class EstimatedKernel:
    """A kernel with settings, and the estimate of its program."""

    kernel: Kernel
    config: CompileConfig
    estimate: Estimate

    def __str__(self) -> str:
        e = self.estimate
        engines = ", ".join(f"{engine} {n:,}" for engine, n in e.instructions.items())
        text = (
            f"{self.kernel.id}  {self.config.key}  {e.total:,} instructions ({engines}), {e.dma_descriptors:,} DMA descriptors, "
            f"code {binary_size(e.code_bytes)}, rings {binary_size(e.ring_bytes)}, compile {binary_size(e.compile_memory_mb << 20)}"
        )
        return text + (f"; not counted: {', '.join(e.uncounted)}" if e.uncounted else "")

    def above(self, part: float) -> Iterator[tuple[str, str]]:
        """Yields each figure above a fraction of its limit: its description, and a hint."""
        for what, name, limit, taker in LIMITS:
            value = getattr(self.estimate, name)
            if value > part * limit:
                text = f"kernel {self.kernel.id} for {self.config.key}: about {value:,} {what}; {taker} {limit:,}"
                yield text, _would_do(self.kernel.spec, value / limit)


def estimates(plan: Plan, catalog: Catalog) -> Iterator[EstimatedKernel]:
    """Yields an estimate for each compile of a plan; every kernel is emitted.

    Raises:
        KernelgenError: an emitter refuses its kernel, or does not emit HLO.
    """
    configs = {config.key: config for config in plan.configs}
    for kernel in plan.kernels:
        made = emitted(kernel, catalog)
        for neff in plan.neffs:
            if neff.kernel == kernel.id:
                config = configs[neff.config]
                found = estimate(made.hlo, config.target, config.lnc, model_type=config.model_type)
                yield EstimatedKernel(kernel, config, found)


def refuse(found: Sequence[EstimatedKernel]) -> list[str]:
    """Returns a warning for each program that is above half of a limit.

    Raises:
        KernelgenError: one is above a limit.
    """
    above = [Diagnostic(text, hint=hint) for one in found for text, hint in one.above(1)]
    if above:
        raise KernelgenError(above, exit_code=EXIT_FAILED)
    return [f"{text}, an estimate that may be wrong by half" for one in found for text, _ in one.above(0.5)]


def _would_do(spec: Spec, factor: float) -> str:
    """Returns advice for a kernel that exceeds a limit by `factor`: how to make it smaller."""
    tokens = max((tensor.ne[1] for tensor in _results(spec)), default=1)
    fewer = 1 << max(int(tokens / factor).bit_length() - 1, 0)
    if tokens > 1 and tokens / factor >= 1:
        return f"{fewer} {'token' if fewer == 1 else 'tokens'} in place of {tokens} would do, or fewer layers in one kernel"
    return "no number of tokens would do: fewer layers in one kernel, or smaller weights"


def _results(spec: Spec) -> list[TensorDesc]:
    return [node.output for node in spec.nodes if node.escapes or len(spec.nodes) == 1]
