"""Emits one kernel's HLO: from its emitters to the canonical form."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen.emitters.library import Library, of_sources
from kernelgen.emitters.loading import environment, load_functions
from kernelgen.emitters.registration import Registration
from kernelgen.errors import Diagnostic, KernelgenError
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.lint import errors, lint
from kernelgen.languages import DEFAULT
from kernelgen.lowering.function import lower_source
from kernelgen.lowering.kernel import Lowered, lower
from kernelgen.spec.kernel import GraphSpec, KernelSpec, SourceSpec, Spec

if TYPE_CHECKING:
    from kernelgen.languages.nki.prebuilt import PrebuiltRequest


@dataclass(frozen=True, slots=True)
class Emission:
    """The result of emitting one kernel.

    Attributes:
        hlo: the canonical serialized `HloModuleProto`, with equal bytes for equal meaning on every machine.
        notes: its language's notes about the kernel, as JSON values.
    """

    hlo: bytes
    notes: Mapping[str, Any]


def emit(
    emitters: Sequence[tuple[Library, Registration]],
    spec: Spec,
    data: Sequence[Path] = (),
    targets: tuple[str, ...] = (),
    prebuilt: Path | None = None,
) -> Emission:
    """Returns a kernel's HLO; see `lower_emitters` for the arguments.

    Raises:
        KernelgenError: an emitter refuses the kernel or returns a wrong result, no target's compiler would accept the HLO, or
            `prebuilt` is of another kernel.
    """
    return _canonical(spec, lower_emitters(emitters, spec, data, targets, prebuilt))


def emit_functions(
    spec: Spec,
    functions: Mapping[str, Callable[..., Any]],
    language: str = DEFAULT,
    targets: tuple[str, ...] = (),
) -> Emission:
    """Returns a kernel's HLO from the functions that compute its ops; see `kernelgen.lowering.kernel.lower` for the arguments."""
    return _canonical(spec, _lower(spec, functions, language, targets))


def lower_emitters(
    emitters: Sequence[tuple[Library, Registration]],
    spec: Spec,
    data: Sequence[Path] = (),
    targets: tuple[str, ...] = (),
    prebuilt: Path | None = None,
) -> Lowered:
    """Imports a kernel's emitters and traces them.

    Args:
        emitters: the library and registration of the emitter of each of its ops, in the order of `Spec.ops`.
        spec: the kernel.
        data: the files and folders that the emitters read besides their sources (`load_functions`).
        targets: its targets (`Kernel.targets`).
        prebuilt: file with the output of NKI's compiler for a kernel with the lowering `native`; None to compile it now.

    Raises:
        KernelgenError: an emitter refuses the kernel, or `prebuilt` is of another kernel.
    """
    with contextlib.ExitStack() as stack:
        if prebuilt is not None:
            from kernelgen.languages.nki import prebuilt as before

            stack.enter_context(before.using(prebuilt, prebuilt_request(emitters, spec, targets)))
        functions = dict(zip(spec.ops, load_functions(emitters, data), strict=True))
        registration = emitters[0][1]
        stack.enter_context(environment(registration))
        return _lower(spec, functions, registration.language, targets)


def _lower(spec: Spec, functions: Mapping[str, Callable[..., Any]], language: str, targets: tuple[str, ...]) -> Lowered:
    if isinstance(spec, SourceSpec):
        return lower_source(language, spec, functions[spec.op], targets)
    assert isinstance(spec, KernelSpec | GraphSpec)
    return lower(spec, functions, language, targets)


def prebuilt_request(
    emitters: Sequence[tuple[Library, Registration]], spec: Spec, targets: Sequence[str]
) -> PrebuiltRequest:
    """Returns the kernel that NKI's compiler compiles, or compiled.

    Raises:
        KernelgenError: NKI's compiler does not compile it, or its sources can't be read.
    """
    from kernelgen.languages.nki.prebuilt import PrebuiltRequest

    target = spec.own_target(targets)
    if not target or len(targets) != 1:
        raise KernelgenError(
            f"kernel {spec.id}: what is prebuilt is a kernel with the lowering 'native', for one target"
        )
    ((library, registration),) = emitters
    return PrebuiltRequest(spec.id, target, of_sources(library, registration.module), registration.file.name)


def _canonical(spec: Spec, lowered: Lowered) -> Emission:
    hlo = canonicalize(lowered.hlo, lowered.inputs, lowered.outputs, aliases=lowered.aliases)
    findings = errors(lint(hlo))
    if findings:
        raise KernelgenError(
            [Diagnostic(f"kernel {spec.id}: {f}", lowered.place, f.hint) for f in findings], exit_code=1
        )
    return Emission(hlo, lowered.notes)
