"""Lowering: from an emitter to the canonical HLO of a kernel.

`emit` and the functions like it take an emitter; `emission` finds a kernel's emitter, and build steps call it. Functions that need
JAX import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelgen.errors import Location
    from kernelgen.lowering.op import Lowered
    from kernelgen.spec.graph_kernel import GraphSpec
    from kernelgen.spec.op_kernel import KernelSpec
    from kernelgen.spec.source_kernel import SourceSpec


@dataclass(frozen=True, slots=True)
class EmittedKernel:
    """The result of emitting a kernel.

    Attributes:
        hlo: the canonical serialized `HloModuleProto`.
        notes: its language's notes about it, as JSON values.
    """

    hlo: bytes
    notes: Mapping[str, Any]


def emit(spec: KernelSpec, function: Callable[..., Any]) -> bytes:
    """Returns the canonical serialized `HloModuleProto` of a kernel in JAX; see `emit_in`."""
    return emit_in("jax", spec, function).hlo


def emit_in(
    language: str, spec: KernelSpec, function: Callable[..., Any], targets: tuple[str, ...] = ()
) -> EmittedKernel:
    """Returns the kernel's canonical HLO, with equal bytes for equal meaning on every machine, and its notes.

    Args:
        language: the emitter's language.
        spec: the kernel.
        function: its emitter (`kernelgen.emitters.loading`).
        targets: its targets; languages with limits check them.

    Raises:
        KernelgenError: the emitter refuses the kernel or returns a wrong result, or no target's compiler would accept the HLO.
    """
    # A lazy import: other steps read HLO, and must not be repeated when lowering changes.
    from kernelgen.lowering.op import lower, place

    return _canonical(spec.id, lower(spec, function, language, targets), place(function))


def emit_source(
    language: str, spec: SourceSpec, function: Callable[..., Any], targets: tuple[str, ...] = ()
) -> EmittedKernel:
    """Returns the canonical HLO of a kernel that is named by its source, and its notes.

    Args:
        language: the function's language.
        spec: the kernel.
        function: the function.
        targets: its targets; languages with limits check them.

    Raises:
        KernelgenError: the function fails, its results differ from the declared ones, or no target's compiler would accept the HLO.
    """
    from kernelgen.lowering.function import lower_source
    from kernelgen.lowering.op import place

    return _canonical(spec.id, lower_source(language, spec, function, targets), place(function))


def emit_graph(spec: GraphSpec, functions: Mapping[str, Callable[..., Any]]) -> EmittedKernel:
    """Returns the canonical HLO of a graph kernel, and its notes; its emitters are in JAX.

    Args:
        spec: the kernel.
        functions: the emitter of each of its ops.

    Raises:
        KernelgenError: an emitter refuses its node or returns a wrong result, or no target's compiler would accept the HLO.
    """
    from kernelgen.lowering.graph import lower_graph

    return _canonical(spec.id, lower_graph(spec, functions), None)


def _canonical(id: str, lowered: Lowered, place: Location | None) -> EmittedKernel:
    from kernelgen.errors import Diagnostic, KernelgenError
    from kernelgen.hlo.canonicalize import canonicalize
    from kernelgen.hlo.lint import errors, lint

    hlo = canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases)
    findings = errors(lint(hlo))
    if findings:
        raise KernelgenError([Diagnostic(f"kernel {id}: {f}", place, f.hint) for f in findings], exit_code=1)
    return EmittedKernel(hlo, lowered.notes)
