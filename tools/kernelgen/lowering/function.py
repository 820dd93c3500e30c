"""Lowers a source kernel to HLO: its function, on arrays of given shapes and dtypes.

`kernelgen.lowering.kernel` does the same for the emitters of ops, whose arrays are views of ggml's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kernelgen import languages
from kernelgen.errors import EXIT_FAILED, Diagnostic, KernelgenError, described
from kernelgen.languages import Call, add_notes, emitting
from kernelgen.lowering.kernel import Lowered, place, traced_hlo
from kernelgen.spec.kernel import SourceSpec

Array = tuple[tuple[int, ...], str]
"""Shape and NumPy dtype name."""


def call_of(spec: SourceSpec, targets: tuple[str, ...]) -> Call:
    """Returns the call of a source kernel's function, with the shape and dtype of each argument in place of the argument."""
    inputs, outputs = (tuple(a.numpy for a in arrays) for arrays in (spec.inputs, spec.outputs))
    return Call(inputs, dict(spec.params), spec.grid, targets, outputs, spec.lowering, spec.arguments)


def jax_function(language: str, function: Callable[..., Any], call: Call, name: str) -> Callable[..., tuple[Any, ...]]:
    """Returns a function of JAX arrays, for JAX to trace, that computes the results of a function in any language.

    Args:
        language: the function's language.
        function: the function.
        call: its arguments, as `call_of` returns them, and settings.
        name: the kernel's name in messages.
    """

    def called(*arrays: Any) -> tuple[Any, ...]:
        with emitting(call.targets):
            results = list(languages.get(language).call(function, replace(call, arguments=arrays)).results)
        if call.results is not None:
            _check(results, call.results, lambda message: KernelgenError(f"kernel {name}: {message}"))
        return tuple(results)

    return called


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
    lowered = lower_function(language, function, call_of(spec, targets), spec.id)
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


def lower_function(language: str, function: Callable[..., Any], call: Call, name: str) -> Lowered:
    """Traces a function once.

    Args:
        language: the function's language.
        function: the function.
        call: its arguments, as `call_of` returns them, and settings.
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
        returned = languages.get(language).call(function, replace(call, arguments=arrays))
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
        if call.results is not None:
            _check(results, call.results, failure)
        for i, new in sorted(updated.items()):
            aliases[len(results)] = i
            names.append(f"input{i}.updated")
            results.append(new)
        if not results:
            raise failure("the function returns nothing, and changes no argument")
        return tuple(results)

    try:
        with emitting(call.targets) as noted:
            hlo, traced = traced_hlo(kernel, call.arguments)
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: user code may raise anything
        raise failure(described(error), error) from error
    inputs = tuple(f"input{i}" for i in range(len(call.arguments)))
    return Lowered(hlo, inputs, tuple(names), aliases, noted.notes, traced, place(function))


def _check(results: Sequence[Any], outputs: Sequence[Array], failure: Callable[[str], KernelgenError]) -> None:
    if len(results) != len(outputs):
        raise failure(f"the function returns {len(results)} results, and {len(outputs)} are declared")
    for k, (result, (shape, dtype)) in enumerate(zip(results, outputs, strict=True)):
        if tuple(result.shape) != shape or str(result.dtype) != dtype:
            raise failure(
                f"the kernel returns {result.dtype}{list(result.shape)} as result {k}, and the manifest says {dtype}{list(shape)}"
            )
