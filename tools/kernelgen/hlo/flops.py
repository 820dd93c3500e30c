"""Counts a module's floating-point operations as XLA's cost analysis does: two for each multiply-add of a product.

Operations inside an NKI kernel are not counted; a loop counts once per iteration (XLA's analysis counts it once).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from kernelgen.hlo.estimate import product_sizes
from kernelgen.hlo.linted import TRANSCENDENTAL, LintedModule, element_type

_OPERATIONS = frozenset(
    "abs add and atan2 ceil clamp compare convert divide floor is-finite maximum minimum multiply negate not or popcnt"
    " remainder round-nearest-afz round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign"
    " subtract xor".split()
)
"""Opcodes with one operation for each element of the result."""


def flops(hlo: bytes) -> Counter[str]:
    """Returns the operations of a module.

    Args:
        hlo: a serialized `HloModuleProto`.

    Returns:
        Operations of products by their operands' dtype, as HLO names it (`bf16`), and `elementwise` and `transcendental`, which
        are counted separately, as in XLA.

    Raises:
        ValueError: it is not a serialized `HloModuleProto`.
    """
    return +_counted(LintedModule(hlo))


def _counted(m: LintedModule, computation: Any = None) -> Counter[str]:
    found: Counter[str] = Counter()
    for _, i, operands, times in m.executed(computation):
        if i.opcode == "dot":
            dtype = max((element_type(o.shape) for o in operands), key=lambda name: name == "f32")
            found[dtype] += times * 2 * prod(product_sizes(i, operands))
        elif i.opcode in ("reduce", "reduce-window"):  # n - 1 combining operations for each result of n elements
            results = prod((i.shape.tuple_shapes[0] if i.shape.tuple_shapes else i.shape).dimensions)
            if i.opcode == "reduce":
                combined = prod(operands[0].shape.dimensions) - results
            else:
                combined = results * (prod(d.size for d in i.window.dimensions) - 1)
            for name, count in _counted(m, m.computations[i.called_computation_ids[0]]).items():
                found[name] += times * combined * count
        elif i.opcode in _OPERATIONS:
            found["elementwise"] += times * prod(i.shape.dimensions)
        elif i.opcode in TRANSCENDENTAL:
            found["transcendental"] += times * prod(i.shape.dimensions)
    return found
