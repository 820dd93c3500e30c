"""Lowers a kernel of nodes to HLO: traces the emitters of its ops with JAX, one after another, and checks their results.

The memory of each slot and node is an array in the order of its storage (`kernelgen.hlo.storage`). A node reads views of it and
writes its result into it, so that nodes are ordered wherever they use the same memory. If a node reads the whole result of another
in the same shape, there is no instruction between the two.

An emitter receives low words of I64 only, unless its result is I64, too: then it receives and returns pairs. JAX is imported when
the first kernel is lowered, for the CPU only: nothing here uses a device.
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
from kernelgen.hlo.cpu import import_jax
from kernelgen.hlo.storage import ParameterStorage, storage, update, view
from kernelgen.languages import DEFAULT, Call, CallResults, add_notes, emitting
from kernelgen.spec.kernel import GraphSpec, KernelSpec, Operand, TensorPlace

CLEAR_EVERY = 64
"""Number of kernels after which JAX's caches of traces are cleared, so that a long-lived worker does not grow."""

MAX_ELEMENTS = 2**31
"""Maximum elements of a partly used parameter: positions in it are 32-bit integers."""

_lowered = 0

Memory = dict[tuple[bool, int], Any]
"""The array of each slot and of each node's own result, by (is it a slot, number)."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """The result of tracing.

    Attributes:
        hlo: serialized `HloModuleProto` as XLA writes it.
        inputs: `input<i>` per parameter, i the number of its slot; run-time numbers follow them all.
        outputs: `output<k>` for results, and `input<i>.updated` for other inputs that the kernel changes.
        aliases: result number → parameter number.
        notes: the language's notes about the kernel.
        traced: the traced operations; `str()` returns JAX's text of them.
        place: the emitter's place; None for several.
    """

    hlo: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    aliases: dict[int, int]
    notes: Mapping[str, Any] = field(default_factory=dict)
    traced: Any = None
    place: Location | None = None


def lower(
    spec: KernelSpec | GraphSpec,
    functions: Mapping[str, Callable[..., Any]],
    language: str = DEFAULT,
    targets: tuple[str, ...] = (),
) -> Lowered:
    """Traces the emitters of a kernel's nodes.

    Args:
        spec: the kernel.
        functions: the emitter of each of its ops (`Spec.ops`).
        language: the emitters' language.
        targets: the kernel's targets; languages with limits check them.

    Raises:
        KernelgenError: an emitter refuses its node, or its result does not match the spec.
    """
    if isinstance(spec, KernelSpec):
        _check_memory(spec, functions[spec.op])
    uses = {slot: operands for slot, operands in enumerate(spec.uses()) if operands}
    parameters = {slot: _parameter(spec, functions, slot, operands) for slot, operands in uses.items()}
    numbers = [numbers_argument(spec.n_opened)] if spec.n_opened else []

    def kernel(*arrays: Any) -> Any:
        memory: Memory = {(True, slot): array for slot, array in zip(parameters, arrays, strict=False)}
        given = iter(scalars(arrays[-1]) if numbers else ())
        for i, (node, op) in enumerate(zip(spec.nodes, spec.kernels, strict=True)):
            views = [None if o is None else _read(memory, spec, i, o) for o in node.inputs]
            result, *updated = call(op, functions[node.op], views, language, targets, [next(given) for _ in op.opened])
            if node.place is None:
                memory[False, i] = update(None, _result_storage(op, functions[node.op]), result)
            else:
                assert op.alias is not None
                _write(memory, spec, i, node.inputs[op.alias], result)
            for k, new in zip(op.updates, updated, strict=True):
                _write(memory, spec, i, node.inputs[k], new)
        made = [memory[place] for _, place in spec.results]
        return tuple(made) if len(made) > 1 else made[0]

    try:
        with emitting(targets) as noted:
            hlo, traced = traced_hlo(kernel, [*parameters.values(), *numbers])
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: user code may raise anything
        raise _failure(spec, described(error), functions, error) from error
    positions = {slot: n for n, slot in enumerate(parameters)}
    return Lowered(
        hlo,
        tuple(f"input{slot}" for slot in (*positions, *(len(spec.slots) for _ in numbers))),
        tuple(name for name, _ in spec.results),
        {k: positions[number] for k, (_, (is_slot, number)) in enumerate(spec.results) if is_slot},
        noted.notes,
        traced,
        place(functions[spec.op]) if isinstance(spec, KernelSpec) else None,
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
    avals = [jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for shape, dtype in arguments]
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
    """Calls the emitter of one node and returns its result, and the new content of each other input that it updates.

    Args:
        spec: the node as a kernel.
        function: its emitter.
        views: the logical array of each input, shape `ParameterStorage.view_shape`; None for an absent input.
        language: the emitter's language.
        targets: the kernel's targets.
        numbers: arrays of shape () for the parameters that are `any`, in the order of `KernelSpec.opened`.

    Raises:
        KernelgenError: the emitter refuses the node, or its result does not match the spec.
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
    called_as = languages.get(DEFAULT if language in languages.EMITTERS_IN_JAX else language)
    try:
        returned = called_as.call(function, Call(tuple(given), keywords, targets=targets))
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: user code may raise anything
        raise _node_failure(spec, function, described(error), error) from error
    add_notes(returned.notes)
    return _checked(_of_op(returned, spec, function), spec, function)


def _of_op(returned: CallResults, spec: KernelSpec, function: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns an op's results, from the emitter's return value and the inputs that it changes in place."""
    changed = {
        i
        for i, new in returned.updated.items()
        if i not in spec.updates and not any(new is r for r in returned.results)
    }
    if changed:
        raise _node_failure(spec, function, f"the emitter changes input {min(changed)}, which the op does not")
    if len(returned.results) == 1 and spec.updates and all(i in returned.updated for i in spec.updates):
        return (*returned.results, *(returned.updated[i] for i in spec.updates))
    return returned.results


def _keywords(spec: KernelSpec, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the emitter's keyword arguments: the spec's parameters, and the context that it declares."""
    declared = {
        p.name for p in inspect.signature(function).parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = [name for name, value in spec.params if name not in declared]
    if unknown:
        raise _node_failure(spec, function, f"the emitter takes no parameter {', '.join(map(repr, unknown))}")
    context = {"out": spec.output, "inputs": spec.inputs, "op": spec.op}
    return {**dict(spec.params), **{name: context[name] for name in CONTEXT if name in declared}}


def _checked(results: tuple[Any, ...], spec: KernelSpec, function: Callable[..., Any]) -> tuple[Any, ...]:
    """Returns the emitter's result, and the new content of each updated input, after checking them against the spec."""
    declared = [("the result", spec.output), *((f"the new input {i}", spec.inputs[i]) for i in spec.updates)]
    if len(results) != len(declared):
        names = ", ".join(name for name, _ in declared)
        made = f"a tuple of {len(results)}" if len(results) != 1 else type(results[0]).__name__
        raise _node_failure(
            spec, function, f"the emitter returned {made}, not {'a tuple of ' * bool(spec.updates)}{names}"
        )
    for result, (name, tensor) in zip(results, declared, strict=True):
        if not hasattr(result, "shape") or not hasattr(result, "dtype"):
            raise _node_failure(spec, function, f"the emitter returned {type(result).__name__}, not one array")
        assert tensor is not None  # `_check_memory` refuses it
        s = storage(tensor)
        if tuple(result.shape) != s.view_shape or str(result.dtype) != s.dtype:
            raise _node_failure(
                spec,
                function,
                f"the kernel returns {result.dtype}{list(result.shape)} as {name}, and the manifest says {tensor}, which is "
                f"{s.dtype}{list(s.view_shape)}",
            )
    return results


# --- memory -----------------------------------------------------------------------------------------------------------


def _parameter(
    spec: KernelSpec | GraphSpec, functions: Mapping[str, Callable[..., Any]], slot: int, uses: Sequence[Operand]
) -> tuple[tuple[int, ...], str]:
    """Returns shape and dtype name of a slot's parameter: the shape of a tensor that covers it, else flat."""
    name = f"slot {slot}" if isinstance(spec, GraphSpec) else f"input {slot}"
    try:
        stored = [storage(use.tensor) for use in uses]
    except ValueError as error:
        raise _failure(spec, f"{name}: {error}", functions) from None
    unit = stored[0].unit
    # A weight in a layout has other bytes than ggml's, and is read whole.
    length = stored[0].length if uses[0].tensor.layout else spec.slots[slot] // unit
    for use, s in zip(uses, stored, strict=True):
        if use.place.offset % unit:
            message = f"{name}: byte {use.place.offset} is not where an element of {use.tensor} begins"
            raise _failure(spec, message, functions)
        if length >= MAX_ELEMENTS and not (s.dense and s.length == length):
            raise _failure(spec, f"{name}: a view of 2^31 elements or more is not supported", functions)
    return next((s.shape for s in stored if s.dense and s.length == length), (length,)), stored[0].dtype


def _check_memory(spec: KernelSpec, function: Callable[..., Any]) -> None:
    """Raises if the result has no storage, or an input that the kernel changes is absent or can't hold the result."""
    for i in spec.updates:
        if i >= len(spec.inputs) or spec.inputs[i] is None:
            raise _node_failure(spec, function, f"input {i}, which the op changes, is absent")
    if spec.alias is None:
        _result_storage(spec, function)
        return
    shared = spec.inputs[spec.alias]
    if shared is not None and (shared.ne, shared.dtype) != (spec.output.ne, spec.output.dtype):
        message = f"the result {spec.output} can't share the memory of input {spec.alias}, {shared}"
        raise _node_failure(spec, function, message)


def _result_storage(op: KernelSpec, function: Callable[..., Any]) -> ParameterStorage:
    """Returns the storage of a result with memory of its own."""
    try:
        s = storage(op.output)
    except ValueError as error:
        raise _node_failure(op, function, f"the result: {error}") from None
    if not s.dense:
        message = f"the result {op.output} has gaps, which only a kernel that works in place can leave"
        raise _node_failure(op, function, message)
    return s


def _part(spec: KernelSpec | GraphSpec, node: int, operand: Operand, size: int) -> tuple[ParameterStorage, int]:
    """Returns an operand's storage, and the element of its memory (of `size` elements) where it starts."""
    s = storage(operand.tensor)
    start, rest = divmod(operand.place.offset, s.unit)
    if rest or start + s.length > size:
        message = f"node {node}, {spec.nodes[node].op}: {operand} is beyond its memory, or between elements"
        raise _failure(spec, message)
    return s, start


def _read(memory: Memory, spec: KernelSpec | GraphSpec, node: int, operand: Operand) -> Any:
    """Returns the logical array of an operand, shape `ParameterStorage.view_shape`."""
    from jax import lax

    if operand.place == TensorPlace(False, node):  # ggml_cast: only the shape of its destination matters
        s = storage(operand.tensor)
        return lax.full(s.view_shape, 0, s.dtype)
    array = memory[operand.place.slot, operand.place.index]
    s, start = _part(spec, node, operand, array.size)
    if s.length != array.size:
        array = lax.slice(lax.reshape(array, (array.size,)), (start,), (start + s.length,))
    return view(lax.reshape(array, s.shape), s)


def _write(memory: Memory, spec: KernelSpec | GraphSpec, node: int, operand: Operand | None, value: Any) -> None:
    """Replaces a part of a slot's or node's memory."""
    import numpy as np
    from jax import lax

    assert operand is not None
    key = (operand.place.slot, operand.place.index)
    array = memory[key]
    s, start = _part(spec, node, operand, array.size)
    if s.length == array.size:
        memory[key] = lax.reshape(update(lax.reshape(array, s.shape), s, value), array.shape)
        return
    flat = lax.reshape(array, (array.size,))
    part = lax.reshape(lax.slice(flat, (start,), (start + s.length,)), s.shape)
    new = lax.reshape(update(part, s, value), (s.length,))
    memory[key] = lax.reshape(lax.dynamic_update_slice(flat, new, (np.int32(start),)), array.shape)


# --- errors -----------------------------------------------------------------------------------------------------------


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
    spec: KernelSpec | GraphSpec,
    message: str,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    error: BaseException | None = None,
) -> KernelgenError:
    if isinstance(spec, KernelSpec) and functions:
        return _node_failure(spec, functions[spec.op], message, error)
    return KernelgenError(Diagnostic(f"kernel {spec.id}: {message}"), exit_code=1)


def _node_failure(
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
