"""Counts a module's floating-point operations as XLA's cost analysis does: two for each multiply-add of a product.

Operations inside an NKI kernel are not counted; a loop counts once per iteration (XLA's analysis counts it once).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from kernelgen.hlo import proto
from kernelgen.hlo.estimate import product_sizes, trips
from kernelgen.hlo.linted import LintedModule, element_type, size

_OPERATIONS = frozenset(
    "abs add and atan2 ceil clamp compare convert divide floor is-finite maximum minimum multiply negate not or popcnt"
    " remainder round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign"
    " subtract xor".split()
)
"""Opcodes with one operation for each element of the result."""
_TRANSCENDENTAL = frozenset(
    "cbrt cosine erf exponential exponential-minus-one log log-plus-one logistic power rsqrt sine sqrt tan tanh".split()
)
"""Opcodes that are counted separately, as in XLA."""


def flops(module: bytes | LintedModule) -> Counter[str]:
    """Returns the operations of a module.

    Args:
        module: a serialized `HloModuleProto`, or a parsed one.

    Returns:
        Operations of products by their operands' dtype, as HLO names it (`bf16`), and `elementwise` and `transcendental`.

    Raises:
        ValueError: `module` is not a serialized `HloModuleProto`.
    """
    m = module if isinstance(module, LintedModule) else LintedModule(module)
    count = _Count(m)
    count.computation(m.computations[m.message.entry_computation_id], 1)
    return +count.found


def parameter_and_result_bytes(module: bytes | LintedModule) -> tuple[int, int]:
    """Returns the bytes of a module's parameters and of its results."""
    m = module if isinstance(module, LintedModule) else LintedModule(module)
    entry = proto.entry(m.message)
    return sum(size(p.shape) for p in proto.parameters(entry)), size(m.root(entry.id).shape)


class _Count:
    def __init__(self, m: LintedModule) -> None:
        self.m = m
        self.found: Counter[str] = Counter()

    def computation(self, computation: Any, times: int) -> None:
        for i in computation.instructions:
            self.instruction(computation, i, times)

    def instruction(self, computation: Any, i: Any, times: int) -> None:
        if i.opcode == "while":
            condition, body = self.m.condition_and_body(i)
            turns = times * trips(self.m, computation, i)
            self.computation(condition, turns)
            self.computation(body, turns)
            return
        if i.opcode in ("call", "fusion"):
            self.computation(self.m.computations[i.called_computation_ids[0]], times)
            return
        operands = self.m.operands(computation, i)
        if i.opcode == "dot":
            batch, inner, rows, columns = product_sizes(i, operands)
            dtype = max((element_type(o.shape) for o in operands), key=lambda name: name == "f32")
            self.found[dtype] += times * 2 * batch * inner * rows * columns
        elif i.opcode in ("reduce", "reduce-window"):
            self.reduction(i, operands, times)
        elif i.opcode in _OPERATIONS:
            self.found["elementwise"] += times * prod(i.shape.dimensions)
        elif i.opcode in _TRANSCENDENTAL:
            self.found["transcendental"] += times * prod(i.shape.dimensions)

    def reduction(self, i: Any, operands: list[Any], times: int) -> None:
        """Counts the combining operations of a reduction: n - 1 for each result of n elements."""
        results = prod((i.shape.tuple_shapes[0] if i.shape.tuple_shapes else i.shape).dimensions)
        if i.opcode == "reduce":
            combined = prod(operands[0].shape.dimensions) - results
        else:
            combined = results * (prod(d.size for d in i.window.dimensions) - 1)
        (called,) = i.called_computation_ids
        self.computation(self.m.computations[called], times * combined)
