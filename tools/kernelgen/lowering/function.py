"""Lowers a source kernel to HLO: its function, on arrays of given shapes and dtypes.

`kernelgen.lowering.kernel` does the same for the emitters of ops, whose arrays are views of ggml's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelgen import languages
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, described
from kernelgen.languages.emitting import add_notes, emitting
from kernelgen.languages.protocol import Call
from kernelgen.lowering.kernel import Lowered, place, traced_hlo
from kernelgen.spec.kernel import SourceSpec

Array = tuple[tuple[int, ...], str]
"""Shape and NumPy dtype name."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments and settings of a function call.

    Attributes:
        inputs: the array arguments, in order.
        outputs: the results, or None for any results.
        keywords: static arguments.
        grid: number of programs in each dimension; empty for none.
        targets: the targets whose limits apply.
        lowering: `interpreted` or `native`.
        names: names of the arguments that receive the inputs; empty if these are the function's first arguments.
    """

    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...] | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    targets: tuple[str, ...] = ()
    lowering: str = "interpreted"
    names: tuple[str, ...] = ()


def launch_of(spec: SourceSpec, targets: tuple[str, ...]) -> Launch:
    """Returns the launch of a source kernel's function."""
    return Launch(
        tuple(a.numpy for a in spec.inputs),
        tuple(a.numpy for a in spec.outputs),
        dict(spec.params),
        spec.grid,
        targets,
        spec.lowering,
        spec.arguments,
    )


def jax_function(
    language: str, function: Callable[..., Any], launch: Launch, name: str
) -> Callable[..., tuple[Any, ...]]:
    """Returns a function of JAX arrays, for JAX to trace, that computes the results of a function in any language.

    Args:
        language: the function's language.
        function: the function.
        launch: its arguments and settings.
        name: the kernel's name in messages.
    """

    def called(*arrays: Any) -> tuple[Any, ...]:
        with emitting(launch.targets):
            call = _call(arrays, launch)
            results = list(languages.get(language).call(function, call).results)
        if launch.outputs is not None:
            _check(results, launch.outputs, lambda message: KernelgenError(f"kernel {name}: {message}"))
        return tuple(results)

    return called


def _call(arrays: tuple[Any, ...], launch: Launch) -> Call:
    return Call(arrays, launch.keywords, launch.grid, launch.targets, launch.outputs, launch.lowering, launch.names)


def lower_source(language: str, spec: SourceSpec, function: Callable[..., Any], targets: tuple[str, ...]) -> Lowered:
    """Traces the function of a source kernel with `lower_function`; aliases results as the spec requires.

    Args:
        language: the function's language.
        spec: the kernel.
        function: the function.
        targets: its targets.

    Raises:
        KernelgenError: the function fails, or its results differ from the declared ones.
    """
    lowered = lower_function(language, function, launch_of(spec, targets), spec.id)
    for result, parameter in spec.alias:
        other = lowered.aliases.get(result, parameter)
        taken = next((k for k, i in lowered.aliases.items() if i == parameter and k != result), None)
        if other != parameter or taken is not None:
            what = (
                f"the function writes result {result} to input {other}"
                if taken is None
                else f"the function writes result {taken} to input {parameter}"
            )
            raise KernelgenError(
                Diagnostic(f"kernel {spec.id}: {what}, and alias says that result {result} is written to {parameter}"),
                exit_code=EXIT_FAILED,
            )
    return replace(lowered, aliases={**lowered.aliases, **dict(spec.alias)})


def lower_function(language: str, function: Callable[..., Any], launch: Launch, name: str) -> Lowered:
    """Traces a function once.

    Args:
        language: the function's language.
        function: the function.
        launch: its arguments and settings.
        name: the kernel's name in messages.

    Returns:
        the HLO. A result is `output<k>`; `input<i>.updated` is the new content of input i and shares its memory: it follows the
        results if the function changes the input without returning it.

    Raises:
        KernelgenError: the function fails, or its results differ from the declared ones.
    """
    aliases: dict[int, int] = {}
    names: list[str] = []

    def failure(message: str, error: BaseException | None = None) -> KernelgenError:
        return KernelgenError(Diagnostic(f"kernel {name}: {message}", place(function, error)), exit_code=EXIT_FAILED)

    def kernel(*arrays: Any) -> Any:
        call = _call(arrays, launch)
        returned = languages.get(language).call(function, call)
        add_notes(returned.notes)
        results = list(returned.results)
        for k, result in enumerate(results):
            if not hasattr(result, "shape") or not hasattr(result, "dtype"):
                raise failure(f"result {k} is {type(result).__name__}, not an array")
        updated = dict(returned.updated)
        names[:] = []
        for k, result in enumerate(results):
            i = next((i for i, new in updated.items() if new is result), None)
            if i is not None:
                aliases[k] = i
                del updated[i]
            names.append(f"output{k}" if i is None else f"input{i}.updated")
        if launch.outputs is not None:
            _check(results, launch.outputs, failure)
        for i, new in sorted(updated.items()):
            aliases[len(results)] = i
            names.append(f"input{i}.updated")
            results.append(new)
        if not results:
            raise failure("the function returns nothing, and changes no argument")
        return tuple(results)

    try:
        with emitting(launch.targets) as noted:
            hlo, traced = traced_hlo(kernel, launch.inputs)
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: user code may raise anything
        raise failure(described(error), error) from error
    inputs = tuple(f"input{i}" for i in range(len(launch.inputs)))
    return Lowered(hlo, inputs, tuple(names), aliases, noted.notes, traced, place(function))


def _check(results: Sequence[Any], outputs: Sequence[Array], failure: Callable[[str], KernelgenError]) -> None:
    if len(results) != len(outputs):
        raise failure(f"the function returns {len(results)} results, and {len(outputs)} are declared")
    for k, (result, (shape, dtype)) in enumerate(zip(results, outputs, strict=True)):
        if tuple(result.shape) != shape or str(result.dtype) != dtype:
            raise failure(
                f"the kernel returns {result.dtype}{list(result.shape)} as result {k}, and the manifest says {dtype}{list(shape)}"
            )
