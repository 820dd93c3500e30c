"""Finds iterations of a loop that depend on each other, which `affine_range` does not allow.

AWS's documentation of the older generation: iterations of `affine_range` may run in parallel, and may only pass sums on (`+=`,
products accumulated in PSUM, `loop_reduce`). The newer documentation calls it an alias of `range`, but its tutorials use another
loop to carry a value. The interpreter therefore notes the dependency and raises no error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nki_interpreter.errors import kernel_location
from nki_interpreter.program import PRODUCTS, REGISTERS, Block, Instruction, Loop, current
from nki_interpreter.tensors import NkiTensor
from nki_interpreter.written import elements

MOST_ELEMENTS = 1 << 26
"""The largest memory to check: the record of writes takes a byte per element."""


def note_carried(loop: Loop) -> None:
    """Notes the first instruction of a loop's second iteration that reads data of its first, once per line of a kernel."""
    recorder = current()
    place = kernel_location()
    if not recorder.check or place in recorder.loops or len(loop.iterations) < 2:
        return
    recorder.loops.add(place)
    found = _carried(loop)
    if found is not None:
        recorder.notes.append(
            f"{found.file}:{found.line}: this reads what the turn before wrote in a loop of affine_range, whose turns may run at "
            "once; use sequential_range"
        )


def _carried(loop: Loop) -> Instruction | None:
    first, second = (list(_instructions(turn)) for turn in loop.iterations[:2])
    before: dict[int, np.ndarray[Any, Any]] = {}
    for instruction in first:
        for tensor in instruction.writes:
            _mark(before, tensor, True)
    for instruction in second:
        for tensor in _read(instruction):
            left = before.get(tensor.storage.number)
            if left is not None and not tensor.dynamic and _any(left, tensor):
                return instruction
        for tensor in instruction.writes:
            if tensor.storage.number in before:
                _mark(before, tensor, False)
    return None


def _mark(flags: dict[int, np.ndarray[Any, Any]], tensor: NkiTensor, value: bool) -> None:
    storage = tensor.storage
    if storage.buffer is REGISTERS or tensor.dynamic or storage.size > MOST_ELEMENTS:
        return
    of_memory = flags.get(storage.number)
    if of_memory is None:
        of_memory = flags[storage.number] = np.zeros(storage.size, np.bool_)
    if tensor.is_plain:
        _strided(of_memory, tensor)[...] = value
    else:
        of_memory[elements(tensor)] = value


def _any(of_memory: np.ndarray[Any, Any], tensor: NkiTensor) -> bool:
    found = _strided(of_memory, tensor) if tensor.is_plain else of_memory[elements(tensor)]
    return bool(found.any())


def _strided(of_memory: np.ndarray[Any, Any], tensor: NkiTensor) -> np.ndarray[Any, Any]:
    """Returns the flags of a plain view, one byte each; no array of element numbers is needed."""
    return np.lib.stride_tricks.as_strided(of_memory[tensor.offset :], tensor.shape, tensor.strides)


def _read(instruction: Instruction) -> Iterator[NkiTensor]:
    """Yields the tensors that an instruction reads, except the sum that it adds to."""
    total = None
    if instruction.op in PRODUCTS:
        total = instruction.writes[0].storage
    elif instruction in current().sums:
        total = instruction.reads[0].storage
    for tensor in (*instruction.reads, *instruction.writes):
        yield from (dynamic.index for dynamic in tensor.dynamic)
    yield from (tensor for tensor in instruction.reads if tensor.storage is not total)


def _instructions(block: Block) -> Iterator[Instruction]:
    for item in block.items:
        if isinstance(item, Instruction):
            yield item
        elif isinstance(item, Loop):
            for turn in item.iterations:
                yield from _instructions(turn)
