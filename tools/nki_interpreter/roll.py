"""Rolls recorded loops: iterations that differ only by constant steps become the body of one loop.

The recorder stores each iteration with concrete indices. If every iteration does the same to views whose offsets grow by a
constant, and no iteration uses memory that another created, all iterations become one body with an index. A different first
iteration stays before the loop ("the first product overwrites, the others add"), a different last one after it ("the last tile
is masked").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nki_interpreter.access import plan
from nki_interpreter.program import Block, Exchange, Instruction, Loop, NkiMemory
from nki_interpreter.tensors import NkiTensor

BOUND = 32
"""Loops with at most this many instructions stay unrolled."""


@dataclass(eq=False, slots=True)
class RolledLoop:
    """A loop of `count` iterations.

    Attributes:
        number: the name of its index in `NkiTensor.varying`.
        body: one iteration.
        carried: the memory that the body writes and that outlives an iteration, in the order of its creation.
        read: the memory from outside that the body reads.
    """

    number: int
    count: int
    body: Block
    carried: tuple[NkiMemory, ...] = ()
    read: tuple[NkiMemory, ...] = ()


@dataclass(slots=True)
class Roller:
    """Rolls the loops of one program.

    Attributes:
        bound: the most instructions of a loop that stays unrolled.
        notes: a remark per rolled loop, for the kernel's record.
    """

    bound: int = BOUND
    notes: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)
    _outside: frozenset[int] = frozenset()

    def roll(self, block: Block, outlive: frozenset[int]) -> Block:
        """Returns a block with all loops rolled that can be.

        Args:
            block: the recorded block.
            outlive: the numbers of the storages used after the block: parameters and results.
        """
        self._outside = outlive
        return Block(self._items(block))

    def _items(self, block: Block) -> list[Any]:
        items: list[Any] = []
        for item in block.items:
            if isinstance(item, Loop):
                items += self._rolled(item)
            else:
                items.append(item)
        return items

    def _rolled(self, loop: Loop) -> list[Any]:
        turns = [self._items(iteration) for iteration in loop.iterations]
        flat = [item for turn in turns for item in turn]
        if len(turns) < 3 or _weight(flat) <= self.bound or any(isinstance(item, Exchange) for item in flat):
            return flat
        for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
            end = len(turns) - last
            if end - first < 2:
                break
            body = self._body(turns[first:end], loop.iterations[first:end])
            if body is not None:
                beside = " and ".join(["first"] * first + ["last"] * last)
                self.notes.append(
                    f"a loop of {end - first} iterations is rolled"
                    + (f", its {beside} iteration beside it" if beside else "")
                )
                before, after = ([item for turn in part for item in turn] for part in (turns[:first], turns[end:]))
                return [*before, body, *after]
        self.notes.append(f"a loop of {len(turns)} iterations is unrolled: its iterations differ")
        return flat

    def _locals(self, items: list[Any], block: Block) -> dict[int, int]:
        """Returns the storages that only this iteration uses, numbered by their first use."""
        found: dict[int, int] = {}
        begin, end = block.begin, block.end
        for storage in {tensor.storage: None for tensor in all_tensors(items)}:
            own = begin <= storage.first and storage.last < end and storage.parameter is None
            if own and storage.number not in self._outside:
                found[storage.number] = len(found)
        return found

    def _key(self, items: list[Any], block: Block) -> Hashable:
        """Returns a key of an iteration: iterations with equal keys differ only in the integers that `_integers` returns."""
        local = self._locals(items, block)

        def storage(memory: NkiMemory) -> Hashable:
            if memory.number not in local:
                return memory.number
            return local[memory.number], memory.shape, memory.value_dtype, array_key(memory.initial)

        return Key(storage, exact=False).items(items)

    def _body(self, turns: list[list[Any]], blocks: list[Block]) -> RolledLoop | None:
        local, first = self._locals(turns[0], blocks[0]), self._key(turns[0], blocks[0])
        if any(self._key(turn, block) != first for turn, block in zip(turns[1:], blocks[1:], strict=True)):
            return None
        count = len(turns)
        columns = np.asarray([_integers(turn) for turn in turns], np.int64)
        steps = columns[1] - columns[0]
        if not (np.diff(columns, axis=0) == steps).all():
            return None
        loop = next(self._numbers)
        body = _moved(turns[0], iter(steps.tolist()), loop, count)
        if body is None:
            return None
        written = {t.storage.number: t.storage for t in all_tensors(turns[0], reads=False)}
        read = {t.storage.number: t.storage for t in all_tensors(turns[0])}
        carried = tuple(s for n, s in sorted(written.items()) if n not in local)
        outer = tuple(s for n, s in sorted(read.items()) if n not in local and n not in written)
        return RolledLoop(loop, count, Block(body), carried, outer)


def checks_indices(item: Any) -> bool:
    """Returns whether an instruction or a rolled loop checks indices at run time."""
    if isinstance(item, RolledLoop):
        return any(checks_indices(inner) for inner in item.body.items)
    return item.op in ("assign", "rmw", "transpose", "dma_compute") and any(
        t.dynamic for t in (*item.reads, *item.writes)
    )


def _weight(items: list[Any]) -> int:
    return sum(_weight(item.body.items) if isinstance(item, RolledLoop) else 1 for item in items)


def _tensors(instruction: Instruction, reads: bool = True) -> list[NkiTensor]:
    if not reads:
        return list(instruction.writes)
    found = [*instruction.reads, *instruction.writes]
    for tensor in tuple(found):
        if tensor.dynamic:
            found += [d.index for d in tensor.dynamic]
    return found


def all_tensors(items: list[Any], reads: bool = True) -> list[NkiTensor]:
    """Returns the tensors that instructions write, and with `reads` also those that they read, including those in rolled loops."""
    found: list[NkiTensor] = []
    for item in items:
        if isinstance(item, RolledLoop):
            found += all_tensors(item.body.items, reads)
        elif isinstance(item, Instruction):
            found += _tensors(item, reads)
    return found


class Key:
    """Makes hashable keys of instructions: equal keys mean the same computation.

    Args:
        storage: returns a key for memory.
        exact: whether the integers of `_integers` count, and the lines of index checks.
    """

    def __init__(self, storage: Callable[[NkiMemory], Hashable], exact: bool) -> None:
        self._storage = storage
        self._exact = exact
        self._loops: dict[int, int] = {}
        """The inner loops in the order of their first use, by number."""

    def items(self, items: list[Any]) -> Hashable:
        return tuple(map(self.item, items))

    def item(self, item: Any) -> Hashable:
        if isinstance(item, RolledLoop):
            loop = self._loops.setdefault(item.number, len(self._loops))
            outer = tuple(map(self._storage, (*item.carried, *item.read))) if self._exact else ()
            return loop, item.count, len(item.carried), outer, self.items(item.body.items)
        tensors = tuple(map(self._tensor, (*item.reads, *item.writes)))
        integers = tuple(map(self._integer, item.integers))
        line = (item.file, item.line) if self._exact and checks_indices(item) else None
        # repr distinguishes 0.0 from -0.0, which are equal in Python and compute different results.
        return item.op, item.attributes, repr(item.attributes), integers, len(item.reads), tensors, line

    def _integer(self, value: Any) -> Hashable:
        start, parts = (value.start, value.parts) if isinstance(value, Varying) else (int(value), ())
        return start if self._exact else None, tuple((self._loops[loop], step) for loop, step in parts)

    def _tensor(self, tensor: NkiTensor) -> Hashable:
        offset = tensor.offset if self._exact else None
        plain = (self._storage(tensor.storage), offset, tensor.dims, tensor.dtype)
        if tensor.is_plain:
            return plain
        dynamic = tuple((self._tensor(d.index), d.shape, d.stride, d.limit) for d in tensor.dynamic)
        varying = tuple((self._loops[loop], *rest) for loop, *rest in tensor.varying)
        arrays = (array_key(tensor.gather), array_key(tensor.valid), array_key(tensor.mask))
        return *plain, tensor.cast, dynamic, varying, arrays


def array_key(array: Any) -> Hashable:
    return None if array is None else (array.shape, str(array.dtype), array.tobytes())


def _integers(items: list[Any]) -> list[int]:
    found: list[int] = []
    for item in items:
        if isinstance(item, RolledLoop):
            found += _integers(item.body.items)
        else:
            if item.integers:
                found += [i if isinstance(i, int) else i.start for i in item.integers]
            for tensor in (*item.reads, *item.writes):
                found.append(tensor.offset)
                if tensor.dynamic:
                    found += [d.index.offset for d in tensor.dynamic]
    return found


@dataclass(frozen=True, slots=True)
class Varying:
    """An integer of an instruction inside rolled loops: start + Σ coefficient · index."""

    start: int
    parts: tuple[tuple[int, int], ...]


def _moved(items: list[Any], steps: Any, loop: int, count: int) -> list[Any] | None:
    """Returns the first iteration with each integer moving by its step."""
    result: list[Any] = []
    for item in items:
        if isinstance(item, RolledLoop):
            body = _moved(item.body.items, steps, loop, count)
            if body is None:
                return None
            result.append(RolledLoop(item.number, item.count, Block(body), item.carried, item.read))
            continue
        integers = []
        for integer in item.integers:
            step = next(steps)
            if step:
                old = integer if isinstance(integer, Varying) else Varying(integer, ())
                integer = Varying(old.start, (*old.parts, (loop, step)))
            integers.append(integer)
        tensors = []
        for tensor in (*item.reads, *item.writes):
            moved = _with_step(tensor, next(steps), loop, count)
            if moved is None:
                return None
            dynamic = []
            for d in moved.dynamic:
                index = _with_step(d.index, next(steps), loop, count)
                if index is None:
                    return None
                dynamic.append(type(d)(index, d.shape, d.stride, d.limit))
            tensors.append(moved.replaced(dynamic=tuple(dynamic)) if dynamic else moved)
        n = len(item.reads)
        result.append(
            Instruction(
                item.op,
                tuple(tensors[:n]),
                tuple(tensors[n:]),
                item.attributes,
                tuple(integers),
                item.file,
                item.line,
            )
        )
    return result


def _with_step(tensor: NkiTensor, step: int, loop: int, count: int) -> NkiTensor | None:
    if not step:
        return tensor
    if tensor.gather is not None or tensor.valid is not None or tensor.mask is not None:
        return None
    if tensor.cast is not None:
        return None
    steps = _steps(tensor, step, count)
    if steps is not None and any(old is None for _, _, old in tensor.varying):
        steps = None
    if steps is None and not tensor.dynamic:  # a view with run-time indices needs no slices
        return None
    return tensor.replaced(varying=(*tensor.varying, (loop, step, steps)))


def _steps(tensor: NkiTensor, step: int, count: int) -> tuple[int, ...] | None:
    """Returns the step of each axis's slice in a loop, or None unless all slices of the loop begin within the same axes."""
    shape = tensor.storage.shape
    first = plan(shape, tensor.offset, tensor.dims)
    last = plan(shape, tensor.offset + step * (count - 1), tensor.dims)
    if first is None or last is None or first.shape != last.shape or first.order != last.order:
        return None
    by = [b.start - a.start for a, b in zip(first.axes, last.axes, strict=True)]
    if any(d % (count - 1) for d in by) or any(a.parts != b.parts for a, b in zip(first.axes, last.axes, strict=True)):
        return None
    # An axis with several parts is cut at its first element; if a loop changes the start, the axis can't be padded.
    for axis in (*first.axes, *last.axes):
        if len(axis.parts) > 1 or (axis.parts and axis.parts[0][0] > 1):
            outer_step, outer_count = axis.parts[0]
            if axis.start + outer_step * outer_count > axis.size:
                return None
    return tuple(d // (count - 1) for d in by)
