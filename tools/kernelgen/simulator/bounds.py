"""Adds a result to a program that reports a gather or scatter with an index out of bounds.

A device ends such an execution with `NRT_EXEC_OOB`, because its copy would access memory outside the tensor. In HLO such an index
is valid: a gather reads the nearest element, and a scatter omits the update. (Source: "Neuron Runtime execution fails at
out-of-bound access" in AWS Neuron's troubleshooting guide of the runtime.)

Loop bodies are not checked. Neither are dynamic slices, for which AWS does not document this error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernelgen.hlo import proto
from kernelgen.simulator.writing import S32, Module, Writer, give, set_shape

S64 = 5
"""XLA's number of the element type."""

PRED = 1
"""XLA's number of the element type."""

_INDIRECT = ("gather", "scatter")


@dataclass(frozen=True)
class BoundsCheckedHlo:
    """HLO that reports whether its indices are in bounds.

    Attributes:
        hlo: a serialized `HloModuleProto`. Its last result is an s32: 0, or the place in `names`, from 1 on, of an instruction
            with an index out of bounds.
        names: the gathers and scatters by their names in HLO text. If there are none, `hlo` has no such result.
    """

    hlo: bytes
    names: tuple[str, ...]


def check(hlo: bytes) -> BoundsCheckedHlo:
    """Returns a module that computes the same, with one more result if it has a gather or scatter.

    Args:
        hlo: a serialized `HloModuleProto` without aliasing of results and parameters.

    Raises:
        ValueError: `hlo` is not a module.
    """
    module = proto.parse(hlo, Module)
    if not any(i.opcode in _INDIRECT for i in proto.entry(module).instructions):
        return BoundsCheckedHlo(hlo, ())
    maximum = _add_maximum(module)
    entry = proto.entry(module)
    by_id = {i.id: i for i in entry.instructions}
    indirect = [i for i in entry.instructions if i.opcode in _INDIRECT]
    writer = _Writer(module)
    writer.out = list(entry.instructions)
    flags = [writer.flag(i, *_limits(i, by_id), 1 + n, maximum) for n, i in enumerate(indirect)]
    flag = flags[0]
    for other in flags[1:]:
        # The result has one number: it names the last instruction that is out of bounds.
        flag = writer.add(flag, "maximum", (), flag, other, element_type=S32)
    root = by_id[entry.root_id]
    if root.opcode == "tuple":
        results = [by_id[i] for i in root.operand_ids]
    elif root.shape.tuple_shapes:
        raise ValueError("the entry computation has several results, which its root does not list")
    else:
        results = [root]
    give(module, writer, [*results, flag])
    return BoundsCheckedHlo(proto.serialize(module), tuple(f"{i.opcode} '{i.name}'" for i in indirect))


def _limits(instruction: Any, by_id: dict[int, Any]) -> tuple[Any, int, list[int]]:
    """Returns the indices of a gather or scatter, their axis with a number per dimension, and the largest valid number of each."""
    if instruction.opcode == "gather":
        operand, indices = (by_id[i] for i in instruction.operand_ids)
        numbers, dims, sizes = instruction.gather, instruction.gather.start_index_map, instruction.gather_slice_sizes
    else:
        # The operands are arrays, indices and updates, with as many updates as arrays.
        count = len(instruction.operand_ids) // 2
        operand, indices, update = (by_id[instruction.operand_ids[i]] for i in (0, count, count + 1))
        numbers, dims = instruction.scatter, instruction.scatter.scatter_dims_to_operand_dims
        window = (update.shape.dimensions[d] for d in numbers.update_window_dims)
        single = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
        sizes = [1 if d in single else next(window) for d in range(len(operand.shape.dimensions))]
    return indices, numbers.index_vector_dim, [operand.shape.dimensions[d] - sizes[d] for d in dims]


def _add_maximum(module: Any) -> int:
    """Adds a computation that returns the maximum of two s32, and returns its id.

    The module's instructions become new objects: earlier references to them are no longer the module's.
    """
    number = 1 + int(max(c.id for c in module.computations))
    made = type(module.computations[0])(name=f"maximum.{number}", id=number)
    writer = Writer(module)
    like = module.computations[0].instructions[0]
    operands = [writer.add(like, "parameter", (), element_type=S32) for _ in range(2)]
    for i, operand in enumerate(operands):
        operand.parameter_number = i
        made.program_shape.parameter_names.append(operand.name)
        set_shape(made.program_shape.parameters.add(), (), S32)
    set_shape(made.program_shape.result, (), S32)
    root = writer.add(like, "maximum", (), *operands, element_type=S32)
    made.root_id = root.id
    made.instructions.extend(writer.out)
    # A computation has to come before the computations that call it.
    others = list(module.computations)
    module.ClearField("computations")
    module.computations.extend([made, *others])
    return number


class _Writer(Writer):
    """Appends the instructions that check indices."""

    def flag(self, like: Any, indices: Any, axis: int, limits: list[int], number: int, maximum: int) -> Any:
        """Returns an s32: `number` if one of the indices is out of bounds, else 0.

        Args:
            like: any instruction.
            indices: the indices.
            axis: the axis of `indices` on which each element has its own limit; the number of axes if there is only one limit.
            limits: the largest valid index of each element.
            number: the result for an index out of bounds.
            maximum: the id of the computation that returns the maximum of two s32.
        """
        shape = tuple(indices.shape.dimensions)
        # 64 bits hold any index of fewer bits and any limit. Clamping changes exactly the indices out of bounds.
        wide = self.add(like, "convert", shape, indices, element_type=S64)
        lowest = self._spread(like, shape, (), self._constant(like, S64, 0))
        if axis < len(shape):
            highest = self._spread(like, shape, (axis,), self._constant(like, S64, *limits, scalar=False))
        else:
            highest = self._spread(like, shape, (), self._constant(like, S64, *limits))
        nearest = self.add(like, "clamp", shape, lowest, wide, highest, element_type=S64)
        outside = self.add(like, "compare", shape, nearest, wide, element_type=PRED)
        outside.comparison_direction = "NE"
        numbers = self._spread(like, shape, (), self._constant(like, S32, number), S32)
        nothing = self._constant(like, S32, 0)
        zeros = self._spread(like, shape, (), nothing, S32)
        flags = self.add(like, "select", shape, outside, numbers, zeros, element_type=S32)
        flag = self.add(like, "reduce", (), flags, nothing, element_type=S32)
        flag.dimensions.extend(range(len(shape)))
        flag.called_computation_ids.append(maximum)
        return flag

    def _constant(self, like: Any, element_type: int, *values: int, scalar: bool = True) -> Any:
        shape = () if scalar else (len(values),)
        made = self.add(like, "constant", shape, element_type=element_type)
        set_shape(made.literal.shape, shape, element_type)
        (made.literal.s64s if element_type == S64 else made.literal.s32s).extend(values)
        return made

    def _spread(self, like: Any, shape: tuple[int, ...], axes: tuple[int, ...], x: Any, element_type: int = S64) -> Any:
        made = self.add(like, "broadcast", shape, x, element_type=element_type)
        made.dimensions.extend(axes)
        return made
