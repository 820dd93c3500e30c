"""Lowers a group to the HLO of one kernel, from the emitters of its ops: each node's result is an input of later nodes.

The memory of each slot and node is an array in the order of its storage (`kernelgen.hlo.storage`). A node reads views of it and
writes its result into it, so that nodes are ordered wherever they use the same memory. If a node reads the whole result of another
in the same shape, there is no instruction between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.errors import Diagnostic, KernelgenError, described
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo.storage import ParameterStorage, storage, update, view
from kernelgen.languages.emitting import emitting
from kernelgen.lowering.op import Lowered, call, numbers_argument, scalars, traced_hlo
from kernelgen.spec.graph_kernel import GraphSpec, Operand, TensorPlace

MAX_ELEMENTS = 2**31
"""Maximum elements of a partly used slot: positions in it are 32-bit integers."""


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """The array of a slot or of a node's result.

    Attributes:
        dtype: NumPy name of its element type.
        shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]


def lower_graph(spec: GraphSpec, functions: Mapping[str, Callable[..., Any]]) -> Lowered:
    """Traces the emitters of a group, one after another.

    Args:
        spec: the group.
        functions: the emitter of each of its ops.

    Raises:
        KernelgenError: an emitter refuses its node, or its result does not match the spec.
    """
    slots = [_slot(spec, i, uses) for i, uses in enumerate(spec.uses())]
    results = [(node, storage(spec.nodes[node].output).shape) for node in spec.escaping]
    written = spec.written
    numbers = [numbers_argument(spec.n_opened)] if spec.n_opened else []

    def kernel(*arrays: Any) -> Any:
        memory = {(True, i): array for i, array in enumerate(arrays[: len(slots)])}
        given = iter(scalars(arrays[-1]) if numbers else ())
        for i, node in enumerate(spec.nodes):
            op = node.kernel
            views = [None if o is None else _read(memory, spec, i, o) for o in node.inputs]
            own = [next(given) for _ in op.opened]
            (result,) = call(op, functions[node.op], views, numbers=own)
            if node.place is None:
                memory[False, i] = update(None, storage(node.output), result)
            else:
                assert op.alias is not None
                shared = node.inputs[op.alias]
                assert shared is not None
                _write(memory, spec, i, shared, result)
        made = [*(memory[False, node].reshape(shape) for node, shape in results), *(memory[True, i] for i in written)]
        return tuple(made) if len(made) > 1 else made[0]

    try:
        with emitting(()) as noted:
            hlo, traced = traced_hlo(kernel, [*((slot.shape, slot.dtype) for slot in slots), *numbers])
    except (KernelgenError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise _failure(spec, described(error)) from error
    return Lowered(
        hlo,
        tuple(f"input{i}" for i in range(len(slots) + len(numbers))),
        (*(f"output{k}" for k in range(len(results))), *(f"input{i}.updated" for i in written)),
        {len(results) + n: i for n, i in enumerate(written)},
        noted.notes,
        traced,
    )


def _storage(spec: GraphSpec, what: str, tensor: TensorDesc) -> ParameterStorage:
    """Returns a tensor's storage."""
    try:
        return storage(tensor)
    except ValueError as error:
        raise _failure(spec, f"{what}: {error}") from None


def _slot(spec: GraphSpec, number: int, uses: Sequence[Operand]) -> SlotMemory:
    """Returns a slot's parameter: with the shape of a tensor that covers it, else flat."""
    what = f"slot {number}"
    stored = [_storage(spec, what, use.tensor) for use in uses]
    unit = stored[0].unit
    # a weight in a layout has other bytes than ggml's, and is read whole
    length = stored[0].length if uses[0].tensor.layout else spec.slots[number] // unit
    for use, made in zip(uses, stored, strict=True):
        if use.place.offset % unit:
            raise _failure(spec, f"{what}: byte {use.place.offset} is not where an element of {use.tensor} begins")
        if length >= MAX_ELEMENTS and not (made.dense and made.length == length):
            raise _failure(spec, f"{what}: a view of {MAX_ELEMENTS} elements or more is not supported")
    shape = next((made.shape for made in stored if made.dense and made.length == length), (length,))
    return SlotMemory(stored[0].dtype, shape)


def _part(spec: GraphSpec, node: int, operand: Operand, size: int) -> tuple[ParameterStorage, int]:
    """Returns an operand's storage, and the element of its memory (of `size` elements) where it starts."""
    s = _storage(spec, f"node {node}, {spec.nodes[node].op}", operand.tensor)
    start, rest = divmod(operand.place.offset, s.unit)
    if rest or start + s.length > size:
        raise _failure(spec, f"node {node}, {spec.nodes[node].op}: {operand} is beyond its memory, or between elements")
    return s, start


def _read(memory: Mapping[tuple[bool, int], Any], spec: GraphSpec, node: int, operand: Operand) -> Any:
    """Returns the logical array of an operand, shape `ParameterStorage.view_shape`."""
    from jax import lax

    if operand.place == TensorPlace(False, node):  # ggml_cast: only the shape of its destination matters
        s = _storage(spec, f"node {node}, {spec.nodes[node].op}", operand.tensor)
        return lax.full(s.view_shape, 0, s.dtype)
    array = memory[operand.place.slot, operand.place.index]
    s, start = _part(spec, node, operand, array.size)
    if s.length != array.size:
        array = lax.slice(lax.reshape(array, (array.size,)), (start,), (start + s.length,))
    return view(lax.reshape(array, s.shape), s)


def _write(memory: dict[tuple[bool, int], Any], spec: GraphSpec, node: int, operand: Operand, value: Any) -> None:
    """Replaces a part of a slot's or node's memory."""
    import numpy as np
    from jax import lax

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


def _failure(spec: GraphSpec, message: str) -> KernelgenError:
    return KernelgenError(Diagnostic(f"kernel {spec.id}: {message}"), exit_code=1)
