"""NKI without an SDK: runs kernels as Python code, records them, and lowers the record through JAX to plain HLO.

`loading` finds kernels in files, `kernel` records them, `program` and `tensors` are the record, `checks` the limits of the
hardware, `isa` the instructions by engine, `language` the other imports of kernels, `roll` turns recorded code into loops,
`access` plans how views become slices, and `lower` and `memory` turn the record into JAX operations. Only these two require JAX.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelgen import languages
from kernelgen.errors import Diagnostic, KernelgenError, Location
from kernelgen.languages import Call, CallResults, Language

if TYPE_CHECKING:
    from nki_interpreter.kernel import RecordedKernel


class _Nki:
    name = "nki"

    @contextlib.contextmanager
    def loading(self, file: Path, env: Mapping[str, str], lowering: str) -> Iterator[None]:
        """Makes imports of NKI resolve to the interpreter, or to the installed NKI for its compiler, and sets `env`."""
        from kernelgen.languages import environment
        from nki_interpreter.loading import interpreter

        with environment(env), interpreter(replaced=lowering != "native"):
            yield

    def call(self, function: Callable[..., Any], call: Call) -> CallResults:
        """Records the kernel for the shapes of its arguments, and lowers it.

        Raises:
            KernelgenError: the kernel breaks a rule of NKI or a limit of a target, or its lowering is not available.
        """
        if call.lowering == "native":
            from kernelgen.languages.nki.native import called

            return called(function, call)
        ordered, named = call.bound(call.arguments)
        recorded = _recorded(function, ordered, named, call.grid, call.targets, call.results)
        place = [i for i, a in enumerate(call.arguments) if a is not None]
        if call.names:  # a record has the arrays in the function's order
            place = [call.names.index(name) for name in recorded.names]
        with _errors():
            values = recorded(*(call.arguments[i] for i in place))
        results = []
        updated = {}
        for value, alias in zip(values, recorded.aliases, strict=True):
            if alias is None:
                results.append(value)
            else:
                updated[place[alias]] = value
        return CallResults(tuple(results), updated, _notes(recorded))


def inline(
    kernel: Any, *arrays: Any, grid: Sequence[int] = (), targets: Sequence[str] = (), **static: Any
) -> tuple[Any, ...]:
    """Returns the results of an NKI kernel for JAX arrays, from code that JAX traces.

    Args:
        kernel: a function, decorated or not.
        arrays: its tensor arguments, in order; None for an absent one.
        grid: number of programs per axis.
        targets: targets whose limits are checked; by default the current kernel's targets.
        static: its static arguments.

    Raises:
        KernelgenError: the kernel breaks a rule of NKI or a limit of a target.
    """
    recorded = _recorded(kernel, arrays, static, tuple(grid), tuple(targets) or languages.targets(), None)
    languages.add_notes(_notes(recorded))
    with _errors():
        return tuple(recorded(*(a for a in arrays if a is not None)))


def _notes(recorded: RecordedKernel) -> dict[str, Any]:
    from nki_interpreter.cost import cost

    return {"nki": list(recorded.notes), "costs": [cost(recorded.block, recorded.storages, recorded.older).to_json()]}


def _recorded(
    function: Any,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any],
    grid: tuple[int, ...],
    targets: tuple[str, ...],
    results: Any,
) -> RecordedKernel:
    from nki_interpreter import kernel

    made = (
        function
        if isinstance(function, kernel.NkiKernel)
        else kernel.NkiKernel(function, older=kernel.imports_older(function))
    )
    with _errors():
        args, named = [*arguments], dict(keywords)
        blank = kernel.blank_outputs(made, results)
        if arguments:
            args += blank
        else:  # all arguments have names
            free = [name for name in inspect.signature(made.function).parameters if name not in named]
            named |= zip(free, blank, strict=False)
        return kernel.record(
            made.function, args, named, older=made.older, grid=tuple(grid) or made.grid, targets=targets
        )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Raises the interpreter's errors as kernelgen's."""
    from nki_interpreter.errors import NkiError

    try:
        yield
    except NkiError as error:
        where = Location(error.file, error.line, 1) if error.file else None
        raise KernelgenError(Diagnostic(f"{error.code}: {error.message}", where)) from error


LANGUAGE: Language = _Nki()
