"""Runs a recorded kernel on the CPU instruction by instruction, if XLA would take too long to compile it as one program.

XLA's compile time grows faster than the number of instructions. A kernel of a hundred thousand instructions has about a hundred
different ones; XLA compiles each of these once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nki_interpreter.program import Block
from nki_interpreter.roll import Key, RolledLoop, all_tensors, array_key

if TYPE_CHECKING:
    from nki_interpreter.kernel import RecordedKernel
    from nki_interpreter.program import NkiMemory
    from nki_interpreter.tensors import NkiTensor

MOST = 4000
"""XLA compiles a kernel with at most this many instructions and rolled loops as one program."""

Found = list[tuple[int, tuple[int, str]]]
"""The results of index checks: an index (`lower.INSIDE` if none is outside), and its number of elements and line."""


def run(recorded: RecordedKernel, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], Found]:
    """Returns a kernel's results as JAX arrays, and the results of its index checks.

    Args:
        recorded: the kernel.
        arrays: the values of its tensor arguments, in order.
    """
    if len(recorded.block.items) <= MOST:
        return _whole(recorded, arrays)
    return _each(recorded, arrays)


@functools.cache
def _compiler_options() -> Any:
    """Returns the compiler options of this XLA that shorten compilation, which takes longer than running."""
    import jax

    found: dict[str, Any] = {}
    for name, value in (("xla_backend_optimization_level", 0), ("xla_cpu_use_fusion_emitters", False)):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0, compiler_options={name: value})()
            found[name] = value
    return found


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    import jax

    return jax.jit(function, compiler_options=_compiler_options(), **options)


def _whole(recorded: RecordedKernel, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], Found]:
    places: list[tuple[int, str]] = []

    def program(*parameters: Any) -> Any:
        values, context = recorded.run(parameters, True)
        places[:] = context.places
        return values, context.checks

    values, checks = _jit(program)(*arrays)
    return values, [(int(worst), places[int(number)]) for worst, number in checks]


def _each(recorded: RecordedKernel, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], Found]:
    from jax import numpy as jnp

    from nki_interpreter.lower import Context

    items = recorded.block.items
    uses = [_used(item) for item in items]
    last = {storage.number: at for at, (storages, _) in enumerate(uses) for storage in storages}
    last |= {tensor.storage.number: len(items) for tensor in recorded.results}
    context = Context(arrays)
    present = context.values
    steps: dict[Any, _CompiledInstruction] = {}
    found: list[tuple[Any, Any, _CompiledInstruction]] = []
    for at, (item, (storages, written)) in enumerate(zip(items, uses, strict=True)):
        for storage in storages:
            if storage.number not in present and (storage.parameter is not None or storage.initial is not None):
                present[storage.number] = jnp.array(context.memory(storage), copy=True)  # a step writes in place
        key = _key(item, present)
        step = steps.get(key)
        if step is None:
            step = steps[key] = _CompiledInstruction(item, storages, written, present)
        numbers = [storage.number for storage in written]
        owned = [present.pop(n) for n in numbers if n in present]
        values, checks = step.run(owned, [present[s.number] for s in storages if s.number in present])
        present.update(zip(numbers, values, strict=True))
        found += [(worst, number, step) for worst, number in checks]
        for storage in storages:
            if last[storage.number] == at:
                present.pop(storage.number, None)
    results = tuple(context.read(tensor) for tensor in recorded.results)
    return results, [(int(worst), step.places[int(number)]) for worst, number, step in found]


def _used(item: Any) -> tuple[list[NkiMemory], list[NkiMemory]]:
    """Returns the memory that an instruction or a rolled loop uses, and the part that it writes, without the loop's own memory."""
    if isinstance(item, RolledLoop):
        return [*item.carried, *item.read], list(item.carried)
    return _storages(all_tensors([item])), _storages(all_tensors([item], reads=False))


def _storages(tensors: Sequence[NkiTensor]) -> list[NkiMemory]:
    return list(dict.fromkeys(tensor.storage for tensor in tensors))


class _CompiledInstruction:
    """An instruction or a rolled loop, compiled at its first run for all items with the same key.

    Args:
        item: the first such item.
        storages: the memory that it uses.
        written: the memory that it writes.
        present: the values that exist before it, by the number of the storage.

    Attributes:
        places: per index check, the number of elements and the kernel's line.
    """

    def __init__(
        self, item: Any, storages: list[NkiMemory], written: list[NkiMemory], present: Mapping[int, Any]
    ) -> None:
        self.places: list[tuple[int, str]] = []
        self._item = item
        self._written = written
        self._owned = [s.number for s in written if s.number in present]
        self._read = [s.number for s in storages if s.number in present and s not in written]
        self.run = _jit(self._run, donate_argnums=0)
        """Returns the new values of the written memory, and the checks.

        Takes the values of the written memory, which it overwrites, and of the memory that is only read.
        """

    def _run(self, owned: Sequence[Any], read: Sequence[Any]) -> Any:
        from nki_interpreter.lower import Context

        context = Context((), True)
        context.values = dict(zip((*self._owned, *self._read), (*owned, *read), strict=True))
        context.run(Block([self._item]))
        self.places = context.places
        return [context.memory(storage) for storage in self._written], context.checks


def _key(item: Any, present: Mapping[int, Any]) -> Hashable:
    """Returns a key: items with equal keys compute the same on memory of the same shapes.

    Args:
        item: an instruction or a rolled loop.
        present: the values that exist before it, by the number of the storage.
    """
    storages: dict[int, int] = {}

    def storage(memory: NkiMemory) -> Hashable:
        known = storages.get(memory.number)
        if known is not None:
            return known
        storages[memory.number] = len(storages)
        has_values = memory.number in present
        initial = None if has_values else array_key(memory.initial)
        return memory.shape, memory.dtype, memory.value_dtype, memory.buffer, has_values, initial

    return Key(storage, exact=True).item(item)
