"""Emits one kernel's HLO."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen import lowering
from kernelgen.emitters.fingerprint import of_sources
from kernelgen.emitters.library import Library
from kernelgen.emitters.loading import environment, load_functions
from kernelgen.emitters.registration import Registration
from kernelgen.errors import KernelgenError
from kernelgen.spec.graph_kernel import GraphSpec, Spec
from kernelgen.spec.source_kernel import SourceSpec, own_target

if TYPE_CHECKING:
    from kernelgen.languages.nki.prebuilt import PrebuiltRequest


@dataclass(frozen=True, slots=True)
class Emission:
    """The result of emitting one kernel.

    Attributes:
        hlo: the canonical HLO.
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
    """Returns a kernel's HLO.

    Args:
        emitters: the library and registration of the emitter of each of its ops, in the order of `spec_ops`.
        spec: the kernel.
        data: the files and folders that the emitter reads besides its sources (`load_functions`).
        targets: its targets (`Kernel.targets`).
        prebuilt: file with the output of NKI's compiler for a kernel with the lowering `native`; None to compile it now.

    Raises:
        KernelgenError: the emitter refuses the kernel, or `prebuilt` is of another kernel.
    """
    with using_prebuilt(emitters, spec, targets, prebuilt):
        kernel = _hlo(spec, emitters, load_functions(emitters, data), targets)
    return Emission(kernel.hlo, kernel.notes)


@contextlib.contextmanager
def using_prebuilt(
    emitters: Sequence[tuple[Library, Registration]], spec: Spec, targets: Sequence[str], prebuilt: Path | None
) -> Iterator[None]:
    """Uses earlier output of NKI's compiler instead of the compiler until the block ends.

    See `emit` for the arguments.

    Raises:
        KernelgenError: the files are missing, or belong to another kernel.
    """
    if prebuilt is None:
        yield
        return
    from kernelgen.languages.nki import prebuilt as before

    with before.using(prebuilt, prebuilt_request(emitters, spec, targets)):
        yield


def prebuilt_request(
    emitters: Sequence[tuple[Library, Registration]], spec: Spec, targets: Sequence[str]
) -> PrebuiltRequest:
    """Returns the kernel that NKI's compiler compiles, or compiled.

    Raises:
        KernelgenError: NKI's compiler does not compile it, or its sources can't be read.
    """
    from kernelgen.languages.nki.prebuilt import PrebuiltRequest

    target = own_target(spec, targets)
    if not target or len(targets) != 1:
        raise KernelgenError(
            f"kernel {spec.id}: what is prebuilt is a kernel with the lowering 'native', for one target"
        )
    ((library, registration),) = emitters
    return PrebuiltRequest(spec.id, target, of_sources(library, registration.module), registration.file.name)


def _hlo(
    spec: Spec,
    emitters: Sequence[tuple[Library, Registration]],
    functions: Sequence[Callable[..., Any]],
    targets: tuple[str, ...],
) -> lowering.EmittedKernel:
    if isinstance(spec, GraphSpec):
        by_op = {r.op: function for (_, r), function in zip(emitters, functions, strict=True)}
        return lowering.emit_graph(spec, by_op)
    registration = emitters[0][1]
    with environment(registration):
        if isinstance(spec, SourceSpec):
            return lowering.emit_source(registration.language, spec, functions[0], targets)
        return lowering.emit_in(registration.language, spec, functions[0], targets)
