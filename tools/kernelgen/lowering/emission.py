"""Emits one kernel's HLO, and tracks its other inputs: the data that the emitter reads.

`kernelgen build` records these inputs, CMake receives them, and Bazel declares them beforehand. Inputs that can't be tracked (a
program, a connection, a device) are reported, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen import lowering
from kernelgen.emitters import foreign
from kernelgen.emitters.fingerprint import of_sources
from kernelgen.emitters.foreign import FileReads
from kernelgen.emitters.library import Library
from kernelgen.emitters.limit import HINT, limited
from kernelgen.emitters.loading import environment, load_functions, reads
from kernelgen.emitters.registration import Registration
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, Location, TimeLimitExpired
from kernelgen.hlo.cpu import import_jax
from kernelgen.spec.graph_kernel import GraphSpec, Spec
from kernelgen.spec.source_kernel import SourceSpec, own_target

if TYPE_CHECKING:
    from kernelgen.languages.nki.prebuilt import PrebuiltRequest


@dataclass(frozen=True, slots=True)
class Emission:
    """The result of emitting one kernel.

    Attributes:
        hlo: the canonical HLO.
        data: digests of the data that it may depend on, by absolute path (`foreign.digest`).
        notes: its language's notes about the kernel, as JSON values.
        unknown: inputs that can't be tracked, and their places.
    """

    hlo: bytes
    data: dict[str, str]
    notes: Mapping[str, Any]
    unknown: tuple[tuple[str, Location | None], ...]


def emit(
    emitters: Sequence[tuple[Library, Registration]],
    spec: Spec,
    data: Collection[str] | None = None,
    timeout: float | None = None,
    targets: tuple[str, ...] = (),
    prebuilt: Path | None = None,
) -> Emission:
    """Returns a kernel's HLO.

    Args:
        emitters: the library and registration of the emitter of each of its ops, in the order of `spec_ops`.
        spec: the kernel.
        data: the files, and folders of files, that the emitter may read besides its sources; None for any.
        timeout: time limit in seconds, or None; only in the main thread (`limit.limited`).
        targets: its targets (`Kernel.targets`).
        prebuilt: file with the output of NKI's compiler for a kernel with the lowering `native`; None to compile it now.

    Raises:
        KernelgenError: the emitter refuses the kernel, reads undeclared data, or takes too long; or `prebuilt` is of another
            kernel.
    """
    import_jax()  # files opened by this import are not the emitter's
    with using_prebuilt(emitters, spec, targets, prebuilt) as files:
        made = _emit(emitters, spec, data, timeout, targets)
    return replace(made, data=made.data | {str(file.absolute()): foreign.digest(str(file)) or "" for file in files})


@contextlib.contextmanager
def using_prebuilt(
    emitters: Sequence[tuple[Library, Registration]], spec: Spec, targets: Sequence[str], prebuilt: Path | None
) -> Iterator[list[Path]]:
    """Uses earlier output of NKI's compiler instead of the compiler until the block ends; yields the files that are read.

    See `emit` for the arguments.

    Raises:
        KernelgenError: the files are missing, or belong to another kernel.
    """
    if prebuilt is None:
        yield []
        return
    from kernelgen.languages.nki import prebuilt as before

    with before.using(prebuilt, prebuilt_request(emitters, spec, targets)):
        yield [prebuilt]


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


def _emit(
    emitters: Sequence[tuple[Library, Registration]],
    spec: Spec,
    data: Collection[str] | None,
    timeout: float | None,
    targets: tuple[str, ...],
) -> Emission:
    allowed = None if data is None else _both_ways(data)
    libraries = list({library.name: library for library, _ in emitters}.values())
    try:
        known = None
        if allowed is not None:
            known = [path for library in libraries for path in reads(library).files if _is_in(path, allowed)]
        with limited(timeout):
            functions = load_functions(emitters, known)
            made = _hlo(spec, emitters, functions, targets)
    except TimeLimitExpired as error:
        place = Location(str(emitters[0][1].file), emitters[0][1].line, 1)
        raise KernelgenError(Diagnostic(f"kernel {spec.id}: {error}", place, HINT), exit_code=EXIT_FAILED) from None
    except KernelgenError as error:
        if isinstance(error.__cause__, TimeLimitExpired):
            mistakes = [replace(diagnostic, hint=HINT) for diagnostic in error.diagnostics]
            raise KernelgenError(mistakes, exit_code=EXIT_FAILED) from None
        if allowed is None:
            raise
        # An undeclared file may just be missing.
        mistakes = [m for one in libraries for m in _undeclared(spec, reads(one), allowed, missing=True)]
        raise KernelgenError([*error.diagnostics, *mistakes], exit_code=error.exit_code or EXIT_FAILED) from None
    found = [reads(library) for library in libraries]
    if allowed is not None:
        mistakes = [m for one in found for m in _undeclared(spec, one, allowed, missing=False)]
        if mistakes:
            raise KernelgenError(mistakes, exit_code=EXIT_FAILED)
    files = {path: read.digest for one in found for path, read in one.files.items()}
    return Emission(made.hlo, files, made.notes, tuple(item for one in found for item in one.unknown.items()))


def _hlo(
    spec: Spec,
    emitters: Sequence[tuple[Library, Registration]],
    functions: Sequence[Callable[..., Any]],
    targets: tuple[str, ...],
) -> lowering.EmittedKernel:
    if not isinstance(spec, GraphSpec):
        library, registration = emitters[0]
        with foreign.running(reads(library)), environment(registration):
            if isinstance(spec, SourceSpec):
                return lowering.emit_source(registration.language, spec, functions[0], targets)
            return lowering.emit_in(registration.language, spec, functions[0], targets)
    found = {r.op: _noted(library, function) for (library, r), function in zip(emitters, functions, strict=True)}
    return lowering.emit_graph(spec, found)


def _noted(library: Library, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an emitter whose reads count for its own library: a group may have emitters of several libraries."""

    @functools.wraps(function)
    def emitter(*arguments: Any, **keywords: Any) -> Any:
        with foreign.running(reads(library)):
            return function(*arguments, **keywords)

    return emitter


def unfollowed(spec: Spec, unknown: Collection[tuple[str, Location | None]]) -> list[Diagnostic]:
    """Returns the mistakes of an emitter whose result depends on something that a build can't track."""
    return [
        Diagnostic(
            f"kernel {spec.id}: its emitter {what}: the build can't tell when the result of that changes",
            place,
            "have it read a file, which may be made by a step of the build",
        )
        for what, place in unknown
    ]


def _undeclared(spec: Spec, found: FileReads, allowed: Collection[str], missing: bool) -> list[Diagnostic]:
    """Returns the undeclared reads of an emitter; with `missing`, also of files that do not exist."""
    return [
        *(
            Diagnostic(
                f"kernel {spec.id}: its emitter reads {path}, which is not a declared input",
                read.place,
                "declare it: `data` of neuron.kernels, in MODULE.bazel, or of the neuron_hlo (docs/reference/bazel.md)",
            )
            for path, read in found.files.items()
            if (missing or read.digest != foreign.NOTHING) and not _is_in(path, allowed)
        ),
        *unfollowed(spec, found.unknown.items()),
    ]


def _both_ways(paths: Collection[str]) -> set[str]:
    """Returns absolute paths, both as given and with links resolved."""
    return {str(Path(p).absolute()) for p in paths} | {str(Path(p).resolve()) for p in paths}


def _is_in(path: str, allowed: Collection[str]) -> bool:
    """Returns whether a path is in a list, is below a path in it, or is a folder that contains one."""
    file = Path(path).resolve()
    return (
        path in allowed
        or any(str(parent) in allowed for parent in (file, *file.parents))
        or (file.is_dir() and any(Path(other).is_relative_to(file) for other in allowed))
    )
