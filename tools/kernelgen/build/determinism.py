"""Checks that emitters give the same HLO every time: two processes that share nothing emit each kernel.

The processes have different hash seeds, which order Python's sets, and emit the kernels in opposite orders. So the check also
finds state that an emitter keeps from one kernel to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernelgen.build.pool import Pool
from kernelgen.build.up_to_date import emit_arguments
from kernelgen.emitters.library import Library
from kernelgen.emitters.scan import of_source, registration
from kernelgen.errors import Diagnostic, Location
from kernelgen.hlo.compare import first_difference
from kernelgen.plan import Kernel
from kernelgen.spec.filenames import hlo_file
from kernelgen.spec.kernel import GraphSpec, SourceSpec

_SEEDS = ("1", "2")
HINT = (
    "an emitter's result must follow from the kernel, its sources and the files that it reads: no random numbers without a seed, "
    "no order of a set, no id() or hash(), no time, nothing kept from one kernel to the next"
)


@dataclass(frozen=True, slots=True)
class DeterminismResult:
    """The result of emitting kernels twice.

    Attributes:
        differences: a description of each difference, by kernel id.
        hlos: the HLO of each kernel without one, by kernel id; a kernel that can't be emitted is in neither.
    """

    differences: dict[str, Diagnostic]
    hlos: dict[str, Path]


def check(kernels: Sequence[Kernel], libraries: Sequence[Library], scratch: Path, jobs: int) -> DeterminismResult:
    """Emits kernels twice and compares.

    Args:
        kernels: the kernels.
        libraries: every kernel library that they name.
        scratch: an empty folder; it receives `DeterminismResult.hlos`.
        jobs: number of processes.

    Raises:
        OSError: the folder can't be written.
    """
    sources = {library.name: library for library in libraries}
    rounds = [
        _emit(order, sources, scratch.absolute() / seed, jobs, seed)
        for seed, order in zip(_SEEDS, (kernels, kernels[::-1]), strict=True)
    ]
    found = DeterminismResult({}, {})
    for kernel in kernels:
        id = kernel.id
        first, second = (done[id] for done in rounds)
        if isinstance(first, Path) and isinstance(second, Path):
            one, other = first.read_bytes(), second.read_bytes()
            if one == other:
                found.hlos[id] = first
                continue
            what = first_difference(one, other)
        elif isinstance(first, Path) or isinstance(second, Path):
            what = f"one of them fails:\n{second if isinstance(first, Path) else first}"
        else:
            continue
        message = f"kernel {id}: two processes emit different HLO: {what}"
        found.differences[id] = Diagnostic(message, place(kernel, sources), HINT)
    return found


def place(kernel: Kernel, libraries: Mapping[str, Library]) -> Location | None:
    """Returns the place of a kernel's emitter in its module; None for a graph kernel, which has several."""
    if isinstance(kernel.spec, GraphSpec):
        return None
    file = libraries[kernel.library].file(kernel.emitter)
    if isinstance(kernel.spec, SourceSpec):
        return Location(str(file), of_source(kernel.spec, file).line, 1)
    return Location(str(file), registration(file, kernel.spec.op).line, 1)


def _emit(
    kernels: Sequence[Kernel],
    sources: dict[str, Library],
    folder: Path,
    jobs: int,
    seed: str,
) -> dict[str, Path | str]:
    """Returns the HLO of each kernel, or the reason why it has none."""
    (folder / "tmp").mkdir(parents=True)
    done: dict[str, Path | str] = {}
    waiting = list(reversed(kernels))
    with Pool(jobs, folder / "logs", {"PYTHONHASHSEED": seed, "TMPDIR": str(folder / "tmp")}) as pool:
        while True:
            while waiting and pool.idle:
                kernel = waiting.pop()
                output = folder / hlo_file(kernel.id)
                pool.start(kernel, emit_arguments(kernel, sources, output))
            answers = pool.wait()
            if not answers:
                return done
            for answer in answers:
                id = answer.task.id
                output = folder / hlo_file(id)
                done[id] = answer.output if answer.exit_code or not output.is_file() else output
