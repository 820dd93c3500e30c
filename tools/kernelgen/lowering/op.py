"""Lowers an emitter to HLO: traces it with JAX, and checks the result.

An emitter receives views of the parameters (`kernelgen.hlo.storage`). For I64 it receives only the low words, unless its result is
I64, too: then it receives and returns pairs. JAX is imported when the first kernel is lowered, for the CPU only: nothing here uses
a device.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelgen import languages
from kernelgen.emitters import CONTEXT
from kernelgen.errors import Diagnostic, KernelgenError, Location, described
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo.cpu import import_jax
from kernelgen.hlo.storage import ParameterStorage, storage, update, view
from kernelgen.languages import DEFAULT
from kernelgen.languages.emitting import add_notes, emitting
from kernelgen.languages.protocol import Call, CallResults
from kernelgen.spec.op_kernel import KernelSpec

CLEAR_EVERY = 64
"""Number of kernels after which JAX's caches of traces are cleared, so that a long-lived worker does not grow."""

_lowered = 0


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of tracing.

    Attributes:
        hlo: serialized `HloModuleProto` as XLA writes it.
        inputs: `input<i>` per parameter, i the index in ggml's `src`; run-time numbers follow them all.
        outputs: `output0` for the result, then `input<i>.updated` for every other input that the kernel changes.
        aliases: result number → parameter number.
        notes: the language's notes about the kernel.
        traced: the traced operations; `str()` returns JAX's text of them.
    """

    hlo: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[int, int]
    notes: Mapping[str, Any] = field(default_factory=dict)
    traced: Any = None


def lower(
    spec: KernelSpec, function: Callable[..., Any], language: str = DEFAULT, targets: tuple[str, ...] = ()
) -> Lowered:
    """Traces an emitter for one kernel.

    Args:
        spec: the kernel.
        function: the emitter.
        language: the emitter's language.
        targets: the kernel's targets.

    Raises:
        KernelgenError: the emitter refuses the kernel, or its result does not match the spec.
    """
    arguments = [None if t is None else _storage(spec, function, t, f"input {i}") for i, t in enumerate(spec.inputs)]
    present = [(i, s) for i, s in enumerate(arguments) if s is not None]
    updated = _updated(spec, function)
    stored = [(spec.alias, _target(spec, function)), *((i, storage(t)) for i, t in updated.items())]
    numbers = [numbers_argument(len(spec.opened))] if spec.opened else []

    def kernel(*arrays: Any) -> Any:
        bound = dict(zip((i for i, _ in present), arrays, strict=False))
        views = [None if s is None else view(bound[i], s) for i, s in enumerate(arguments)]
        given = scalars(arrays[-1]) if numbers else ()
        results = call(spec, function, views, language, targets, given)
        new = tuple(
            update(None if i is None else bound[i], target, result)
            for (i, target), result in zip(stored, results, strict=True)
        )
        return new if spec.updates else new[0]

    try:
        with emitting(targets) as noted:
            hlo, traced = traced_hlo(kernel, [*((s.shape, s.dtype) for _, s in present), *numbers])
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failure(spec, function, described(error), error) from error
    places = {i: n for n, (i, _) in enumerate(present)}
    names = (*places, *(len(spec.inputs) for _ in numbers))
    return Lowered(
        hlo,
        tuple(f"input{i}" for i in names),
        ("output0", *(f"input{i}.updated" for i in spec.updates)),
        {n: places[i] for n, (i, _) in enumerate(stored) if i is not None},
        noted.notes,
        traced,
    )


def numbers_argument(n: int) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype name of the argument that holds a kernel's run-time numbers."""
    return (n,), "float32"


def scalars(numbers: Any) -> tuple[Any, ...]:
    """Returns the elements of such an argument, each an array of shape ()."""
    from jax import lax

    return tuple(lax.reshape(lax.slice(numbers, (i,), (i + 1,)), ()) for i in range(numbers.shape[0]))


def traced_hlo(kernel: Callable[..., Any], arguments: Sequence[tuple[tuple[int, ...], str]]) -> tuple[bytes, Any]:
    """Returns a JAX function's serialized `HloModuleProto` as XLA writes it, and JAX's trace.

    Args:
        kernel: the function.
        arguments: shape and dtype name of each of its arguments.
    """
    global _lowered
    jax = import_jax()
    avals = [jax.ShapeDtypeStruct(shape, _dtype(dtype)) for shape, dtype in arguments]
    try:
        # The process's own settings must not affect the kernel's bytes.
        with jax.enable_x64(False), jax.default_matmul_precision(None), jax.numpy_dtype_promotion("standard"):
            traced = jax.jit(kernel, keep_unused=True).trace(*avals)
            hlo = traced.lower(lowering_platforms=("cpu",)).compiler_ir("hlo").as_serialized_hlo_module_proto()
            return hlo, traced.jaxpr
    except ValueError as error:
        # JAX checks some shapes here; its message has a line for each caller, up to the program's first.
        if refused := re.search(r"verifier errors:\s*(.+)\s+at loc\(\"[^\"]*?(\w+)\"", str(error)):
            raise ValueError(f"{refused[2]}: {refused[1]}") from error
        raise
    finally:
        _lowered += 1
        if _lowered % CLEAR_EVERY == 0:
            jax.clear_caches()


def call(
    spec: KernelSpec,
    function: Callable[..., Any],
    views: Sequence[Any],
    language: str = DEFAULT,
    targets: tuple[str, ...] = (),
    numbers: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Calls an emitter and returns its result, and the new content of each input that it updates.

    Args:
        spec: the kernel.
        function: its emitter.
        views: the logical array of each input, shape `ParameterStorage.view_shape`; None for an absent input.
        language: the emitter's language.
        targets: the kernel's targets.
        numbers: arrays of shape () for the parameters that are `any`, in the order of `KernelSpec.opened`.

    Raises:
        KernelgenError: the emitter refuses the kernel, or its result does not match the spec.
    """
    # A move to another i64 needs both words; an i64 in a computation is an index, and small.
    pairs = spec.output.dtype == "i64"
    given = [
        logical[..., 0]
        if logical is not None and tensor is not None and tensor.dtype == "i64" and not pairs
        else logical
        for logical, tensor in zip(views, spec.inputs, strict=True)
    ]
    keywords = {**_keywords(spec, function), **dict(zip(spec.opened, numbers, strict=True))}
    updated = _updated(spec, function)
    called_as = languages.get(DEFAULT if language in languages.EMITTERS_IN_JAX else language)
    try:
        returned = called_as.call(function, Call(tuple(given), keywords, targets=targets))
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: user code may raise anything
        raise _failure(spec, function, described(error), error) from error
    add_notes(returned.notes)
    return _checked(_of_op(returned, updated, spec, function), updated, spec, function)


def _of_op(
    returned: CallResults, updated: Mapping[int, TensorDesc], spec: KernelSpec, function: Callable[..., Any]
) -> tuple[Any, ...]:
    """Returns an op's results, from the emitter's return value and the inputs that it changes in place."""
    changed = {
        i for i, new in returned.updated.items() if i not in updated and not any(new is r for r in returned.results)
    }
    if changed:
        raise _failure(spec, function, f"the emitter changes input {min(changed)}, which the op does not")
    if len(returned.results) == 1 and updated and all(i in returned.updated for i in updated):
        return (*returned.results, *(returned.updated[i] for i in updated))
    return returned.results


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


def _storage(spec: KernelSpec, function: Callable[..., Any], tensor: TensorDesc, what: str) -> ParameterStorage:
    try:
        made = storage(tensor)
    except ValueError as error:
        raise _failure(spec, function, f"{what}: {error}") from None
    if made.length >= 2**31 and not made.dense:
        raise _failure(spec, function, f"{what}: a view of 2^31 elements or more is not supported")
    return made


def _target(spec: KernelSpec, function: Callable[..., Any]) -> ParameterStorage:
    """Returns the result's storage."""
    out = spec.output
    if spec.alias is None:
        made = _storage(spec, function, out, "the result")
        if not made.dense:
            raise _failure(
                spec, function, f"the result {out} has gaps, which only a kernel that works in place can leave"
            )
        return made
    shared = spec.inputs[spec.alias]
    assert shared is not None, "KernelSpec.make refuses it"
    if (shared.ne, shared.dtype) != (out.ne, out.dtype):
        raise _failure(spec, function, f"the result {out} can't share the memory of input {spec.alias}, {shared}")
    return _storage(spec, function, shared, "the result")


def _keywords(spec: KernelSpec, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the emitter's keyword arguments: the spec's parameters, and the context that it declares."""
    declared = {
        p.name for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = [name for name, value in spec.params if name not in declared]
    if unknown:
        raise _failure(spec, function, f"the emitter takes no parameter {', '.join(map(repr, unknown))}")
    context = {"out": spec.output, "inputs": spec.inputs, "op": spec.op}
    return {**dict(spec.params), **{name: context[name] for name in CONTEXT if name in declared}}


def _updated(spec: KernelSpec, function: Callable[..., Any]) -> dict[int, TensorDesc]:
    """Returns the inputs that the kernel changes, other than the one that shares memory with its result."""
    found = {}
    for i in spec.updates:
        tensor = spec.inputs[i] if i < len(spec.inputs) else None
        if tensor is None:
            raise _failure(spec, function, f"input {i}, which the op changes, is absent")
        found[i] = tensor
    return found


def _checked(
    results: tuple[Any, ...], updated: Mapping[int, TensorDesc], spec: KernelSpec, function: Callable[..., Any]
) -> tuple[Any, ...]:
    """Returns the emitter's result, and the new content of each updated input, after checking them against the spec."""
    wanted = [("the result", spec.output), *((f"the new input {i}", t) for i, t in updated.items())]
    if len(results) != len(wanted):
        what = ", ".join(name for name, _ in wanted)
        made = f"a tuple of {len(results)}" if len(results) != 1 else type(results[0]).__name__
        raise _failure(spec, function, f"the emitter returned {made}, not {'a tuple of ' * bool(updated)}{what}")
    for result, (what, tensor) in zip(results, wanted, strict=True):
        if not hasattr(result, "shape") or not hasattr(result, "dtype"):
            raise _failure(spec, function, f"the emitter returned {type(result).__name__}, not one array")
        s = storage(tensor)
        if tuple(result.shape) != s.view_shape or str(result.dtype) != s.dtype:
            raise _failure(
                spec,
                function,
                f"the kernel returns {result.dtype}{list(result.shape)} as {what}, and the manifest says {tensor}, which is "
                f"{s.dtype}{list(s.view_shape)}",
            )
    return results


def place(function: Callable[..., Any], error: BaseException | None = None) -> Location:
    """Returns the place of an emitter, or the line of its file that raised `error`."""
    code = inspect.unwrap(function).__code__
    line = code.co_firstlineno
    trace = error.__traceback__ if error else None
    while trace:
        if trace.tb_frame.f_code.co_filename == code.co_filename:
            line = trace.tb_lineno
        trace = trace.tb_next
    return Location(code.co_filename, line, 1)


def _failure(
    spec: KernelSpec, function: Callable[..., Any], message: str, error: BaseException | None = None
) -> KernelgenError:
    inputs = ", ".join("absent" if t is None else str(t) for t in spec.inputs)
    return KernelgenError(
        Diagnostic(
            f"kernel {spec.id}: {message}",
            place(function, error),
            f"{spec.op}({inputs}) -> {spec.output} {dict(spec.params)}",
        ),
        exit_code=1,
    )
