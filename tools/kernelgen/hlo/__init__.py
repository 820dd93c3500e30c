"""HLO: from an emitter to the canonical module that a compiler is given, and what can be said about such a module.

`emit` is the build step; `lint` says what neuronx-cc is known to refuse; `describe` reads a module for people; `execute` runs one
with XLA on the CPU. Which compiler follows is not known here. JAX is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelgen.kernel import KernelSpec


def emit(spec: KernelSpec, function: Callable[..., Any]) -> bytes:
    """Returns the kernel's canonical serialized `HloModuleProto`: the same bytes for the same meaning, anywhere.

    Args:
        spec: the kernel.
        function: its emitter (`kernelgen.emitters.loading`).

    Raises:
        KernelgenError: the emitter refuses the kernel or returns something else, or no target's compiler would take the HLO.
    """
    # Imported here: other steps read HLO, and must not be redone when lowering changes.
    from kernelgen.errors import Diagnostic, KernelgenError
    from kernelgen.hlo.canonicalize import canonicalize
    from kernelgen.hlo.lint import errors, lint
    from kernelgen.hlo.lower import lower, place

    lowered = lower(spec, function)
    hlo = canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases)
    findings = errors(lint(hlo))
    if findings:
        raise KernelgenError(
            [Diagnostic(f"kernel {spec.id}: {f}", place(function), f.hint) for f in findings],
            exit_code=1,
        )
    return hlo
