"""A parsed HLO module with the queries of the lint's rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import Any

from kernelgen.hlo import proto

_Module = proto.module_class(
    {
        "WindowDimension": """
            int64 size 1
            int64 stride 2
            int64 padding_low 3
            int64 padding_high 4
            int64 window_dilation 5
            int64 base_dilation 6
        """,
        "Window": "*WindowDimension dimensions 1",
        "Dot": """
            *int64 lhs_contracting 1
            *int64 rhs_contracting 2
            *int64 lhs_batch 3
            *int64 rhs_batch 4
        """,
        "Convolution": """
            int64 kernel_input 3
            int64 kernel_output 4
            *int64 output_spatial 12
            int64 output_batch 9
            int64 output_feature 10
        """,
        "GatherDimensions": """
            *int64 start_index_map 3
            int64 index_vector_dim 4
        """,
        "ScatterDimensions": """
            *int64 scatter_dims_to_operand_dims 3
            int64 index_vector_dim 4
        """,
        "ReplicaGroup": "*int64 ids 1",
        "DeviceList": "*ReplicaGroup groups 1",
        "Literal": """
            bytes u8s 3
            *int64 s32s 4
            *int64 s64s 5
            *uint64 u32s 6
            bytes s8s 15
            bytes u16s 16
            bytes s16s 17
        """,
        "Instruction": """
            *int64 dimensions 14
            Window window 15
            Convolution convolution 16
            Dot dot 30
            GatherDimensions gather 33
            *int64 gather_slice_sizes 34
            ScatterDimensions scatter 48
            int64 feature_group_count 50
            int32 rng_algorithm 70
            *ReplicaGroup replica_groups 49
            DeviceList device_list 87
        """,
    }
)

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
"""Bits of an element, for types whose names do not contain them."""

_SAME_VALUES = ("reshape", "broadcast", "convert", "copy", "bitcast")
"""Opcodes whose result has the operand's values, in another shape or type."""

NO_WORK = frozenset(
    "after-all bitcast bitcast-convert broadcast constant get-tuple-element iota optimization-barrier parameter partition-id"
    " replica-id reshape slice tuple".split()
)
"""Opcodes without work: their results are inputs, constants or views."""

TRANSCENDENTAL = frozenset(
    "cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power rsqrt sine sqrt tan tanh".split()
)
"""Opcodes of functions that the scalar engine computes."""


class LintedModule:
    """A parsed module.

    Attributes:
        message: the module.
        computations: by id.
        instructions: of all computations.
        by_id: instructions, by the ids of their computation and their own.
        by_opcode: (computation, instruction) of each opcode.
        by_type: the instructions whose results have an element type.
        flags: neuronx-cc's further flags for the compile.
        lnc: physical cores of a logical one; None for the target's default.
        estimate: the module's cached estimate; None until the lint computes it.
    """

    MESSAGE = _Module

    def __init__(self, hlo: bytes, flags: Sequence[str] = (), lnc: int | None = None) -> None:
        self.message = proto.parse(hlo, _Module)
        self.computations = proto.computations(self.message)
        self.instructions: list[Any] = []
        self.by_id: dict[tuple[int, int], Any] = {}
        self.by_opcode: dict[str, list[tuple[Any, Any]]] = {}
        self.by_type: dict[str, list[Any]] = {}
        for computation in self.message.computations:
            for i in computation.instructions:
                self.instructions.append(i)
                self.by_id[computation.id, i.id] = i
                self.by_opcode.setdefault(i.opcode, []).append((computation, i))
                for kind in {element_type(s) for s in shapes(i.shape)}:
                    self.by_type.setdefault(kind, []).append(i)
        self.flags = tuple(flags)
        self.lnc = lnc
        self.estimate: Any = None

    def operands(self, computation: Any, i: Any) -> list[Any]:
        return [self.by_id[computation.id, n] for n in i.operand_ids]

    def called(self, computation: Any, i: Any) -> list[tuple[Any, int]]:
        """Returns the computations that a loop, a call or a fusion executes, and how often; empty for other instructions.

        A loop has its condition and its body, as often as its trip count; once if that is not constant.
        """
        if i.opcode == "while":
            trips = self.trips(computation, i)
            return [(called, trips) for called in self.condition_and_body(i)]
        return [(self.computations[i.called_computation_ids[0]], 1)] if i.opcode in ("call", "fusion") else []

    def executed(self, computation: Any = None, times: int = 1) -> Iterator[tuple[Any, Any, list[Any], int]]:
        """Yields each instruction that a computation executes, also in loops, calls and fusions in place of these.

        Args:
            computation: the computation; None for the entry.
            times: number of times that it runs.

        Yields:
            the instruction's computation, the instruction, its operands, and the number of times that it runs.
        """
        computation = self.computations[self.message.entry_computation_id] if computation is None else computation
        for i in computation.instructions:
            called = self.called(computation, i)
            for inner, turns in called:
                yield from self.executed(inner, times * turns)
            if not called:
                yield computation, i, self.operands(computation, i), times

    def root(self, computation_id: int) -> Any:
        computation = self.computations[computation_id]
        return self.by_id[computation.id, computation.root_id]

    def source(self, computation: Any, i: Any) -> Any:
        """Returns the instruction whose values `i` repeats: itself unless it only reshapes, broadcasts, converts or copies."""
        while i.opcode in _SAME_VALUES:
            (i,) = self.operands(computation, i)
        return i

    def counting(self, computation: Any, loop: Any) -> tuple[Any, Any, Any] | None:
        """Returns the start, step and end of a counting while loop, as three constants; None for any other loop."""
        condition, body = self.condition_and_body(loop)
        test = self.root(condition.id)
        if test.opcode != "compare":
            return None
        counter, limit = self.operands(condition, test)
        if (counter.opcode, limit.opcode) != ("get-tuple-element", "constant"):
            return None
        index = counter.tuple_index
        start = self.operands(computation, loop)[0]
        result = self.root(body.id)
        if (start.opcode, result.opcode) != ("tuple", "tuple"):
            return None
        first, step = self.operands(computation, start)[index], self.operands(body, result)[index]
        if first.opcode != "constant" or step.opcode not in ("add", "subtract"):
            return None
        operands = self.operands(body, step)
        by = next((o for o in operands if o.opcode == "constant"), None)
        if by is None or ("get-tuple-element", index) not in [(o.opcode, o.tuple_index) for o in operands]:
            return None
        return first, by, limit

    def trips(self, computation: Any, loop: Any) -> int:
        """Returns the trip count of a loop; 1 if it is not constant."""
        found = self.counting(computation, loop)
        if found is None:
            return 1
        start, step, limit = ((integers(c.literal) or [0])[0] for c in found)
        return max(ceil(abs(limit - start) / max(abs(step), 1)), 1)

    def condition_and_body(self, loop: Any) -> tuple[Any, Any]:
        """Returns a while loop's (condition, body); XLA lists the body first."""
        body, condition = (self.computations[n] for n in loop.called_computation_ids)
        return (condition, body) if element_type(self.root(condition.id).shape) == "pred" else (body, condition)

    def dilated(self, i: Any, field: str) -> bool:
        """Whether a field of an instruction's window is above 1 in any dimension; an absent field is 1."""
        return any(getattr(d, field) > 1 for d in i.window.dimensions)


def element_type(shape: Any) -> str:
    return proto.ELEMENT_TYPES.get(shape.element_type, f"type{shape.element_type}")


def shapes(shape: Any) -> Iterator[Any]:
    """Yields a shape and the shapes inside it."""
    yield shape
    for inner in shape.tuple_shapes:
        yield from shapes(inner)


def elements(i: Any, operands: Sequence[Any]) -> int:
    """Returns the elements of an instruction's result; of its first operand if the result is a tuple."""
    return prod((operands[0] if i.shape.tuple_shapes else i).shape.dimensions)


def size(shape: Any) -> int:
    """Returns the bytes of a shape's elements."""
    if shape.tuple_shapes:
        return sum(size(inner) for inner in shape.tuple_shapes)
    kind = element_type(shape)
    bits = _BITS.get(kind)
    if bits is None:
        digits = kind.lstrip("abcdefghijklmnopqrstuvwxyz")
        bits = 8 if kind.startswith("f8") else int(digits) if digits.isdecimal() else 4
    return int(-(-bits * prod(shape.dimensions) // 8))


def integers(literal: Any) -> list[int]:
    """Returns the values of an integer literal."""
    for name, size in (("u8s", 1), ("s8s", 1), ("u16s", 2), ("s16s", 2)):
        if data := getattr(literal, name):
            signed = name[0] == "s"
            return [int.from_bytes(data[at : at + size], "little", signed=signed) for at in range(0, len(data), size)]
    return [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
