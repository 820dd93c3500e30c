"""Rolls recorded loops: iterations that differ by constant steps alone become the body of one loop.

A loop is recorded iteration by iteration with concrete indices. Where each iteration does the same to views whose offsets grow by a
constant, and no memory that one iteration created is used by another, all iterations are one body with an index. What the first
iteration does differently stays before the loop ("the first product overwrites, the others add").
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from kernelgen.languages.nki.access import plan
from kernelgen.languages.nki.program import Block, Exchange, Instruction, Loop, Storage
from kernelgen.languages.nki.tensors import Tensor

BOUND = 256
"""Loops of at most so many instructions stay unrolled."""


@dataclass(eq=False, slots=True)
class Rolled:
    """A loop of `count` iterations.

    Attributes:
        number: what its index is called in `Tensor.varying`.
        body: one iteration.
        carried: the memory that the body writes and that outlives an iteration, in the order of its creation.
        read: the memory from outside that the body reads.
    """

    number: int
    count: int
    body: Block
    carried: tuple[Storage, ...] = ()
    read: tuple[Storage, ...] = ()


@dataclass(slots=True)
class Roller:
    """Rolls the loops of one program.

    Attributes:
        bound: how many instructions a loop may have to stay unrolled.
        keep_checked: whether loops stay unrolled in which indices are checked at run time.
        notes: what was rolled, for the kernel's record.
    """

    bound: int = BOUND
    keep_checked: bool = False
    notes: list[str] = field(default_factory=list)
    _homes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _outside: frozenset[int] = frozenset()

    def roll(self, block: Block, outlive: frozenset[int]) -> Block:
        """Returns a block with its loops rolled where they can be.

        Args:
            block: what was recorded.
            outlive: the numbers of the storages that are used after it: parameters and results.
        """
        self._outside = outlive
        self._find_homes(block, ())
        return Block(self._items(block, ()))

    def _find_homes(self, block: Block, path: tuple[int, ...]) -> None:
        """Finds for every storage the innermost iteration in which all of its uses are."""
        for place, item in enumerate(block.items):
            if isinstance(item, Instruction):
                for tensor in _tensors(item):
                    number = tensor.storage.number
                    home = self._homes.get(number)
                    self._homes[number] = path if home is None else _common(home, path)
            elif isinstance(item, Loop):
                for turn, iteration in enumerate(item.iterations):
                    self._find_homes(iteration, (*path, place, turn))

    def _items(self, block: Block, path: tuple[int, ...]) -> list[Any]:
        items: list[Any] = []
        for place, item in enumerate(block.items):
            if isinstance(item, Loop):
                items += self._rolled(item, (*path, place))
            else:
                items.append(item)
        return items

    def _rolled(self, loop: Loop, path: tuple[int, ...]) -> list[Any]:
        turns = [self._items(iteration, (*path, turn)) for turn, iteration in enumerate(loop.iterations)]
        flat = [item for turn in turns for item in turn]
        if len(turns) < 3 or _weight(flat) <= self.bound or any(isinstance(item, Exchange) for item in flat):
            return flat
        if self.keep_checked and any(_checks_indices(item) for item in flat):
            return flat
        for peeled in (0, 1):
            rest = turns[peeled:]
            if len(rest) < 2:
                break
            numbers = [self._locals(turn, (*path, peeled + i)) for i, turn in enumerate(rest)]
            body = self._body(rest, numbers)
            if body is not None:
                self.notes.append(
                    f"a loop of {len(rest)} iterations is rolled"
                    + (", its first iteration beside it" if peeled else "")
                )
                first = [item for turn in turns[:peeled] for item in turn]
                return [*first, body]
        self.notes.append(f"a loop of {len(turns)} iterations is unrolled: its iterations differ")
        return flat

    def _locals(self, items: list[Any], path: tuple[int, ...]) -> dict[int, int]:
        """Returns the storages that only this iteration uses, numbered by their first use."""
        found: dict[int, int] = {}
        for tensor in _all_tensors(items):
            number = tensor.storage.number
            if number in found or number in self._outside:
                continue
            home = self._homes.get(number, ())
            if home[: len(path)] == path and tensor.storage.parameter is None:
                found[number] = len(found)
        return found

    def _body(self, turns: list[list[Any]], numbers: list[dict[int, int]]) -> Rolled | None:
        shapes = [_shape(turn, known) for turn, known in zip(turns, numbers, strict=True)]
        if any(shape != shapes[0] for shape in shapes[1:]):
            return None
        columns = [_integers(turn) for turn in turns]
        count = len(turns)
        steps: list[int] = []
        for values in zip(*columns, strict=True):
            step = values[1] - values[0]
            if any(values[i + 1] - values[i] != step for i in range(1, count - 1)):
                return None
            steps.append(step)
        loop = next(self._numbers)
        body = _moved(turns[0], iter(steps), loop, count)
        if body is None:
            return None
        local = numbers[0]
        written = {t.storage.number: t.storage for t in _all_tensors(turns[0], reads=False)}
        read = {t.storage.number: t.storage for t in _all_tensors(turns[0])}
        carried = tuple(s for n, s in sorted(written.items()) if n not in local)
        outer = tuple(s for n, s in sorted(read.items()) if n not in local and n not in written)
        return Rolled(loop, count, Block(body), carried, outer)


def _checks_indices(item: Any) -> bool:
    if isinstance(item, Rolled):
        return any(_checks_indices(inner) for inner in item.body.items)
    return item.op in ("assign", "rmw") and any(t.dynamic for t in (*item.reads, *item.writes))


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return a[:n]


def _weight(items: list[Any]) -> int:
    return sum(_weight(item.body.items) if isinstance(item, Rolled) else 1 for item in items)


def _tensors(instruction: Instruction, reads: bool = True) -> list[Tensor]:
    found = [*instruction.reads, *instruction.writes] if reads else list(instruction.writes)
    indices = [d.index for tensor in (*instruction.reads, *instruction.writes) for d in tensor.dynamic]
    return found + indices if reads else found


def _all_tensors(items: list[Any], reads: bool = True) -> list[Tensor]:
    found: list[Tensor] = []
    for item in items:
        if isinstance(item, Rolled):
            found += _all_tensors(item.body.items, reads)
        elif isinstance(item, Instruction):
            found += _tensors(item, reads)
    return found


def _shape(items: list[Any], local: dict[int, int]) -> list[Hashable]:
    """Returns what has to be equal for two iterations to be alike: everything but the integers that `_integers` returns."""
    shape: list[Hashable] = []
    for item in items:
        if isinstance(item, Rolled):
            inner = _shape(item.body.items, local)
            shape.append(("loop", item.count, tuple(_renamed(part, item.number) for part in inner)))
        else:
            shape.append(
                (
                    item.op,
                    item.attributes,
                    tuple(
                        tuple(("varies", loop, step, None) for loop, step in i.parts) if isinstance(i, Varying) else ()
                        for i in item.integers
                    ),
                    tuple(_tensor_shape(t, local) for t in item.reads),
                    tuple(_tensor_shape(t, local) for t in item.writes),
                )
            )
    return shape


def _renamed(part: Hashable, number: int) -> Hashable:
    """Gives the index of an inner loop the same name in every iteration of the outer one."""
    if isinstance(part, tuple):
        if len(part) == 4 and part[0] == "varies" and part[1] == number:
            return ("varies", "inner", *part[2:])
        return tuple(_renamed(p, number) for p in part)
    return part


def _tensor_shape(tensor: Tensor, local: dict[int, int]) -> Hashable:
    storage = tensor.storage
    number = storage.number
    who: Hashable = ("own", local[number], storage.shape, storage.held) if number in local else number
    if number in local and storage.initial is not None:
        who = (who, storage.initial.tobytes())
    return (
        who,
        tensor.dims,
        tensor.dtype,
        tensor.cast,
        None if tensor.gather is None else tensor.gather.tobytes(),
        None if tensor.valid is None else (tensor.valid.shape, tensor.valid.tobytes()),
        None if tensor.mask is None else (tensor.mask.shape, tensor.mask.tobytes()),
        tuple((_tensor_shape(d.index, local), d.shape, d.stride, d.limit) for d in tensor.dynamic),
        tuple(("varies", loop, coefficient, steps) for loop, coefficient, steps in tensor.varying),
    )


def _integers(items: list[Any]) -> list[int]:
    found: list[int] = []
    for item in items:
        if isinstance(item, Rolled):
            found += _integers(item.body.items)
        else:
            found += [i if isinstance(i, int) else i.start for i in item.integers]
            for tensor in (*item.reads, *item.writes):
                found.append(tensor.offset)
                found += [d.index.offset for d in tensor.dynamic]
    return found


@dataclass(frozen=True, slots=True)
class Varying:
    """An integer of an instruction inside of rolled loops: start + Σ coefficient · index."""

    start: int
    parts: tuple[tuple[int, int], ...]


def _moved(items: list[Any], steps: Any, loop: int, count: int) -> list[Any] | None:
    """Returns the first iteration with a step per integer."""
    result: list[Any] = []
    for item in items:
        if isinstance(item, Rolled):
            body = _moved(item.body.items, steps, loop, count)
            if body is None:
                return None
            result.append(Rolled(item.number, item.count, Block(body), item.carried, item.read))
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


def _with_step(tensor: Tensor, step: int, loop: int, count: int) -> Tensor | None:
    if not step:
        return tensor
    if tensor.gather is not None or tensor.valid is not None or tensor.mask is not None:
        return None
    steps = None
    if not tensor.dynamic and tensor.cast is None:
        shape = tensor.storage.shape
        # Where all slices of the loop begin within the same axes, each axis has a step of its own.
        first = plan(shape, tensor.offset, tensor.dims)
        last = plan(shape, tensor.offset + step * (count - 1), tensor.dims)
        if first is None or last is None or first.shape != last.shape or first.order != last.order:
            return None
        by = [b.start - a.start for a, b in zip(first.axes, last.axes, strict=True)]
        if any(d % (count - 1) for d in by) or any(
            a.parts != b.parts for a, b in zip(first.axes, last.axes, strict=True)
        ):
            return None
        # An axis with several parts is cut at its first element; with a start that a loop changes it can't be padded.
        for axis in (*first.axes, *last.axes):
            if len(axis.parts) > 1 or (axis.parts and axis.parts[0][0] > 1):
                outer_step, outer_count = axis.parts[0]
                if axis.start + outer_step * outer_count > axis.size:
                    return None
        steps = tuple(d // (count - 1) for d in by)
        if tensor.varying and any(old is None for _, _, old in tensor.varying):
            return None
    elif tensor.cast is not None:
        return None
    return tensor.replaced(varying=(*tensor.varying, (loop, step, steps)))
