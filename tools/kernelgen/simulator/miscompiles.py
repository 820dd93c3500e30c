"""Reproduces wrong code that neuronx-cc generated without a message: NEURON_SIMULATOR_FAULT names the mistakes to make.

`kernelgen doctor --device` checks a device for each of them, and these mistakes test the checks. Others observed them with
neuronx-cc 2.27 on trn1 and trn2. It is unknown which programs a release compiles wrongly, so a mistake is made in every program of
its form.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from math import prod
from typing import Any

from kernelgen.hlo import proto
from kernelgen.simulator.bounds import PRED
from kernelgen.simulator.writing import F32, S32, Module, Writer, become_reshape

VARIABLE = "NEURON_SIMULATOR_FAULT"

_BF16 = 16
MANY_PRODUCTS = 4
"""A program with this many products or more counts as a whole layer."""


def asked_for() -> frozenset[str]:
    """Returns the mistakes that the environment names."""
    return frozenset(MISTAKES.keys() & set(os.environ.get(VARIABLE, "").split(",")))


def rewrite(hlo: bytes, mistakes: Iterable[str]) -> bytes:
    """Returns a serialized `HloModuleProto` with mistakes, by their names in `MISTAKES`; the same bytes if it has no such form.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo, Module)
    writer = Writer(module)
    changed = False
    for name in sorted(mistakes):
        computation = proto.entry(module)
        by_id = {i.id: i for i in computation.instructions}
        wrong = MISTAKES[name](list(computation.instructions), by_id)
        writer.out = []
        for instruction in computation.instructions:
            mistake = wrong.get(instruction.id)
            if mistake is not None:
                mistake(instruction, writer)
                changed = True
            writer.out.append(instruction)
        computation.ClearField("instructions")
        computation.instructions.extend(writer.out)
    return proto.serialize(module) if changed else hlo


Mistake = Callable[[Any, Writer], None]
Finder = Callable[[list[Any], dict[int, Any]], dict[int, Mistake]]


def _division(instructions: list[Any], by_id: dict[int, Any]) -> dict[int, Mistake]:
    """Finds divisions of integers; the mistake multiplies by a float32 reciprocal: 6284 / 6284 is 0."""

    def through_reciprocal(divisor: int) -> Mistake:
        def mistake(i: Any, writer: Writer) -> None:
            shape, dividend = tuple(i.shape.dimensions), by_id[i.operand_ids[0]]
            factor = writer.add(i, "broadcast", shape, writer.constant(i, (), 1 / divisor))
            quotient = writer.add(i, "multiply", shape, writer.add(i, "convert", shape, dividend), factor)
            whole = writer.add(i, "convert", shape, quotient, element_type=S32)
            if i.opcode == "remainder":
                product = writer.add(i, "multiply", shape, whole, by_id[i.operand_ids[1]], element_type=S32)
                whole = writer.add(i, "subtract", shape, dividend, product, element_type=S32)
            become_reshape(i, whole)

        return mistake

    found = {}
    for i in instructions:
        if i.opcode in ("divide", "remainder") and i.shape.element_type == S32:
            divisor = by_id[i.operand_ids[1]]
            if divisor.opcode == "broadcast":
                divisor = by_id[divisor.operand_ids[0]]
            numbers = list(divisor.literal.s32s) if divisor.opcode == "constant" else []
            if numbers and numbers[0] & (numbers[0] - 1):
                found[i.id] = through_reciprocal(numbers[0])
    return found


def _rounding(instructions: list[Any], by_id: dict[int, Any]) -> dict[int, Mistake]:
    """Finds conversions from float32 to bfloat16 and back; the mistake removes them, so that nothing is rounded."""

    def unrounded(source: Any) -> Mistake:
        return lambda i, _: become_reshape(i, source)

    found = {}
    for i in instructions:
        if i.opcode == "convert" and i.shape.element_type == F32:
            inner = by_id[i.operand_ids[0]]
            if inner.opcode == "convert" and inner.shape.element_type == _BF16:
                source = by_id[inner.operand_ids[0]]
                if source.shape.element_type == F32:
                    found[i.id] = unrounded(source)
    return found


def _split(instructions: list[Any], by_id: dict[int, Any]) -> dict[int, Mistake]:
    """Finds splits of the last axis into unequal parts; the mistake splits where equal parts would begin."""

    def begins_at(start: int) -> Mistake:
        def mistake(i: Any, _: Writer) -> None:
            last = i.slice_dimensions[-1]
            last.limit, last.start = start + last.limit - last.start, start

        return mistake

    parts: dict[int, list[Any]] = {}
    for i in instructions:
        if i.opcode == "slice" and len(i.shape.dimensions):
            source = by_id[i.operand_ids[0]].shape.dimensions
            if list(i.shape.dimensions[:-1]) == list(source[:-1]) and i.shape.dimensions[-1] < source[-1]:
                parts.setdefault(i.operand_ids[0], []).append(i)
    found: dict[int, Mistake] = {}
    for source_id, slices in parts.items():
        slices.sort(key=lambda i: int(i.slice_dimensions[-1].start))
        sizes = [int(i.shape.dimensions[-1]) for i in slices]
        total = int(by_id[source_id].shape.dimensions[-1])
        if sum(sizes) == total and len(set(sizes)) > 1:
            for n, (i, size) in enumerate(zip(slices, sizes, strict=True)):
                found[i.id] = begins_at(min(n * total // len(slices), total - size))
    return found


def _row(instructions: list[Any], by_id: dict[int, Any]) -> dict[int, Mistake]:
    """Finds single rows that are read or written by their number; the mistake makes them 0."""
    found: dict[int, Mistake] = {}
    for i in instructions:
        if i.opcode == "gather":
            batch = [n for axis, n in enumerate(i.shape.dimensions) if axis not in i.gather.offset_dims]
            if prod(batch) == 1 and by_id[i.operand_ids[0]].shape.dimensions[0] > 1:
                found[i.id] = _become_zero
        elif i.opcode == "dynamic-slice" and i.shape.dimensions[0] == 1:
            found[i.id] = _become_zero
        elif i.opcode == "dynamic-update-slice" and by_id[i.operand_ids[1]].shape.dimensions[0] == 1:

            def nothing(i: Any, writer: Writer) -> None:
                i.operand_ids[1] = _zero(i, by_id[i.operand_ids[1]].shape, writer).id

            found[i.id] = nothing
    return found


def _graph(instructions: list[Any], by_id: dict[int, Any]) -> dict[int, Mistake]:
    """Finds the last product of a program with many products; the mistake makes it 0. Programs of single ops stay right."""
    products = [i for i in instructions if i.opcode == "dot"]
    return {products[-1].id: _become_zero} if len(products) >= MANY_PRODUCTS else {}


def _zero(like: Any, shape: Any, writer: Writer) -> Any:
    zero = writer.add(like, "convert", (), writer.constant(like, (), 0.0), element_type=shape.element_type)
    return writer.add(like, "broadcast", tuple(shape.dimensions), zero, element_type=shape.element_type)


def _become_zero(i: Any, writer: Writer) -> None:
    become_reshape(i, _zero(i, i.shape, writer))


def _race(instructions: list[Any], by_id: dict[int, Any]) -> dict[int, Mistake]:
    """Finds scatters; the mistake makes the result 0 if different values are written to one row. Equal values stay right."""

    def lose(i: Any, writer: Writer) -> None:
        written = writer.again(i)
        table, rows, values = (by_id[o] for o in i.operand_ids)
        shape = tuple(values.shape.dimensions)
        found = writer.add(i, "gather", shape, written, rows, element_type=values.shape.element_type)
        found.gather.offset_dims.extend(i.scatter.update_window_dims)
        found.gather.collapsed_slice_dims.extend(i.scatter.inserted_window_dims)
        found.gather.start_index_map.extend(i.scatter.scatter_dims_to_operand_dims)
        found.gather.index_vector_dim = i.scatter.index_vector_dim
        found.gather_slice_sizes.extend((1, *table.shape.dimensions[1:]))
        others = writer.add(i, "compare", shape, found, values, element_type=PRED)
        others.comparison_direction = "NE"
        count = writer.add(i, "dot", (), writer.floats(others), _ones(i, shape, writer))
        for side in (count.dot.lhs_contracting, count.dot.rhs_contracting):
            side.extend(range(len(shape)))
        any_others = writer.add(i, "compare", (), count, writer.constant(i, (), 0.0), element_type=PRED)
        any_others.comparison_direction = "GT"
        whole = tuple(i.shape.dimensions)
        chosen = writer.add(i, "broadcast", whole, any_others, element_type=PRED)
        nothing = _zero(i, i.shape, writer)
        kept = writer.add(i, "select", whole, chosen, nothing, written, element_type=i.shape.element_type)
        become_reshape(i, kept)

    return {
        i.id: lose
        for i in instructions
        if i.opcode == "scatter"
        and len(i.operand_ids) == 3
        and list(i.scatter.inserted_window_dims) == list(i.scatter.scatter_dims_to_operand_dims) == [0]
    }


def _ones(like: Any, shape: tuple[int, ...], writer: Writer) -> Any:
    return writer.add(like, "broadcast", shape, writer.constant(like, (), 1.0))


MISTAKES: dict[str, Finder] = {
    "division": _division,
    "graph": _graph,
    "race": _race,
    "rounding": _rounding,
    "row": _row,
    "split": _split,
}
