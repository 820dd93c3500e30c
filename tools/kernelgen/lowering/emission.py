"""One kernel's HLO from its emitter, and what else it was made from: the data that the emitter reads.

Builds use that: `kernelgen build` remembers it, CMake is told of it, and Bazel is told beforehand. What can't be followed (a
program that is run, a connection, a device) is named, too.
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
from kernelgen.emitters.foreign import Reads
from kernelgen.emitters.library import Library
from kernelgen.emitters.limit import HINT, limited
from kernelgen.emitters.loading import environment, load_functions, reads
from kernelgen.emitters.registration import Registration
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, Location, TookTooLong
from kernelgen.hlo.cpu import import_jax
from kernelgen.spec.graph_kernel import GraphSpec, Spec
from kernelgen.spec.source_kernel import SourceSpec, own_target

if TYPE_CHECKING:
    from kernelgen.languages.nki.prebuilt import PrebuiltRequest


@dataclass(frozen=True, slots=True)
class Emission:
    """What emitting one kernel gives.

    Attributes:
        hlo: the canonical HLO.
        data: digests of the data that it may depend on, by absolute path (`foreign.digest`).
        notes: what its language says of the kernel, as JSON values.
        unknown: what else it may depend on that can't be followed, and where.
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
        emitters: where the emitter of each of its ops is, and which one it is, in the order of `spec_ops`.
        spec: the kernel.
        data: the files, and folders of files, that the emitter may read besides its sources; None for any.
        timeout: seconds that it may take, or None; only in the main thread (`limit.limited`).
        targets: the targets that it is for (`Kernel.targets`).
        prebuilt: where what NKI's own compiler made of a kernel with the lowering `native` is; None to have it made now.

    Raises:
        KernelgenError: the emitter refuses the kernel, reads what it may not (`data`), or takes too long; `prebuilt` is of another.
    """
    import_jax()  # what this opens is not the emitter's
    with using_prebuilt(emitters, spec, targets, prebuilt) as files:
        made = _emit(emitters, spec, data, timeout, targets)
    return replace(made, data=made.data | {str(file.absolute()): foreign.digest(str(file)) or "" for file in files})


@contextlib.contextmanager
def using_prebuilt(
    emitters: Sequence[tuple[Library, Registration]], spec: Spec, targets: Sequence[str], prebuilt: Path | None
) -> Iterator[list[Path]]:
    """Has what NKI's own compiler made before stand for it while the block lasts; yields the files that are read.

    The arguments are those of `emit`.

    Raises:
        KernelgenError: the files are not there, or not of the kernel.
    """
    if prebuilt is None:
        yield []
        return
    from kernelgen.languages.nki import prebuilt as before

    with before.using(prebuilt, asked(emitters, spec, targets)):
        yield [prebuilt]


def asked(emitters: Sequence[tuple[Library, Registration]], spec: Spec, targets: Sequence[str]) -> PrebuiltRequest:
    """Returns which kernel it is that NKI's own compiler makes, or made.

    Raises:
        KernelgenError: it is for none of it, or its sources can't be read.
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
    except TookTooLong as error:
        place = Location(str(emitters[0][1].file), emitters[0][1].line, 1)
        raise KernelgenError(Diagnostic(f"kernel {spec.id}: {error}", place, HINT), exit_code=EXIT_FAILED) from None
    except KernelgenError as error:
        if isinstance(error.__cause__, TookTooLong):
            mistakes = [replace(diagnostic, hint=HINT) for diagnostic in error.diagnostics]
            raise KernelgenError(mistakes, exit_code=EXIT_FAILED) from None
        if allowed is None:
            raise
        # A file that is not declared may just not be there.
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
) -> lowering.Emitted:
    if not isinstance(spec, GraphSpec):
        library, registration = emitters[0]
        with foreign.running(reads(library)), environment(registration):
            if isinstance(spec, SourceSpec):
                return lowering.emit_source(registration.language, spec, functions[0], targets)
            return lowering.emit_in(registration.language, spec, functions[0], targets)
    found = {r.op: _noted(library, function) for (library, r), function in zip(emitters, functions, strict=True)}
    return lowering.emit_graph(spec, found)


def _noted(library: Library, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an emitter whose reads count as its library's: a group may have those of several."""

    @functools.wraps(function)
    def emitter(*arguments: Any, **keywords: Any) -> Any:
        with foreign.running(reads(library)):
            return function(*arguments, **keywords)

    return emitter


def unfollowed(spec: Spec, unknown: Collection[tuple[str, Location | None]]) -> list[Diagnostic]:
    """Returns what is wrong with an emitter whose result may change with nothing that a build can look at."""
    return [
        Diagnostic(
            f"kernel {spec.id}: its emitter {what}: the build can't tell when the result of that changes",
            place,
            "have it read a file, which may be made by a step of the build",
        )
        for what, place in unknown
    ]


def _undeclared(spec: Spec, found: Reads, allowed: Collection[str], missing: bool) -> list[Diagnostic]:
    """Returns what an emitter reads and may not; with `missing`, also what it looks for and is not there."""
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
    """Returns paths as they are and with links resolved, absolute."""
    return {str(Path(p).absolute()) for p in paths} | {str(Path(p).resolve()) for p in paths}


def _is_in(path: str, allowed: Collection[str]) -> bool:
    """Returns whether a path is one of others, below one, or a folder that holds one."""
    file = Path(path).resolve()
    return (
        path in allowed
        or any(str(parent) in allowed for parent in (file, *file.parents))
        or (file.is_dir() and any(Path(other).is_relative_to(file) for other in allowed))
    )
