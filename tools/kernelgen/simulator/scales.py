"""Rewrites how the scales of quantized weights are read, so that XLA on the CPU reads a matrix once, and quickly.

In the emitted HLO, a sum over an axis of two elements turns a scale's two bytes into a number. XLA computes it element by element
in a separate pass over the whole matrix. As a sum of two terms it becomes part of the loop that uses the scale. If scales of a few
bits are concatenated from two parts, XLA would choose between the parts for each weight; this module computes them once instead.
It changes only the simulator's copy of the HLO. Results stay the same, because all numbers are integers.
"""

from __future__ import annotations

from typing import Any

from kernelgen.hlo import proto
from kernelgen.simulator.writing import F32, Module, Writer, become_reshape

MAX_TERMS = 8
"""The most elements of the reduced axis."""

_OPERATIONS = {"or", "and", "xor", "add", "multiply", "maximum", "minimum"}
_INTEGERS = {2, 3, 4, 5, 6, 7, 8, 9}  # s8 to u64
_BYTES = {2, 6}


def rewrite(hlo: bytes) -> bytes:
    """Returns a serialized `HloModuleProto` that computes the same.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo, Module)
    writer = Writer(module)
    computations = {c.id: c for c in module.computations}
    found = False
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        writer.out = []
        changed = False
        for instruction in computation.instructions:
            operation = _short_reduction(instruction, by_id, computations)
            if operation is not None:
                _unroll(instruction, operation, by_id, writer)
            elif _put_together(instruction, by_id):
                made = writer.add(
                    instruction, "convert", tuple(instruction.shape.dimensions), by_id[instruction.operand_ids[0]]
                )
                become_reshape(instruction, writer.computed_once(made))
            else:
                writer.out.append(instruction)
                continue
            writer.out.append(instruction)
            changed = True
        if changed:
            found = True
            computation.ClearField("instructions")
            computation.instructions.extend(writer.out)
    return proto.serialize(module) if found else hlo


def _short_reduction(reduce: Any, by_id: dict[int, Any], computations: dict[int, Any]) -> str | None:
    """Returns the operation of a reduction of a short last axis of integers; None for any other instruction."""
    if reduce.opcode != "reduce" or reduce.shape.element_type not in _INTEGERS or len(reduce.operand_ids) != 2:
        return None
    axes = tuple(by_id[reduce.operand_ids[0]].shape.dimensions)
    if list(reduce.dimensions) != [len(axes) - 1] or not 0 < axes[-1] <= MAX_TERMS:
        return None
    called = computations[reduce.called_computation_ids[0]]
    root = next(i for i in called.instructions if i.id == called.root_id)
    parameters = {i.id for i in called.instructions if i.opcode == "parameter"}
    whole = root.opcode in _OPERATIONS and len(parameters) == 2 and set(root.operand_ids) == parameters
    return root.opcode if whole else None


def _unroll(reduce: Any, operation: str, by_id: dict[int, Any], writer: Writer) -> None:
    x, start = (by_id[i] for i in reduce.operand_ids)
    shape, kind = tuple(reduce.shape.dimensions), reduce.shape.element_type
    # The order does not matter for integers, as it would for floats.
    result = writer.add(reduce, "broadcast", shape, start, element_type=kind)
    for i in range(x.shape.dimensions[-1]):
        term = writer.add(reduce, "reshape", shape, writer.slice(x, len(shape), i), element_type=kind)
        result = writer.add(reduce, operation, shape, result, term, element_type=kind)
    become_reshape(reduce, result)


def _put_together(convert: Any, by_id: dict[int, Any]) -> bool:
    """Returns whether an instruction converts concatenated bytes to float32."""
    if convert.opcode != "convert" or convert.shape.element_type != F32:
        return False
    operand = by_id[convert.operand_ids[0]]
    return operand.opcode == "concatenate" and operand.shape.element_type in _BYTES
