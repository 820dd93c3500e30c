"""Estimates the instructions of a program from a graph's matrix products, for planning without HLO.

It counts products as `kernelgen.hlo.estimate` does; a factor accounts for the rest of the program. For groups of the ready
manifests the result is within a third of the estimate from the HLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from kernelgen.targets import PARTITIONS

MOVING = 512
"""Columns of a product's moving operand."""
_INSTRUCTIONS, _QUANTIZED = 1.5, 3.0
"""Instructions of a program per instruction of products; the second is for weights that are dequantized first."""


def instructions(op: str, weights: Sequence[int], quantized: bool, output: Sequence[int]) -> int:
    """Returns the instructions of a node on one physical core; 0 unless it is a matrix product.

    Args:
        op: ggml's op.
        weights: `ne` of its first input.
        quantized: whether that input is quantized.
        output: `ne` of its result.
    """
    if op not in ("mul_mat", "mul_mat_id"):
        return 0
    inner, columns, experts, _ = weights
    rows, batch = output[1], prod(output[2:])
    if op == "mul_mat_id":  # matrices of experts; some have several chunks of the rows
        batch = min(2 * experts, rows * batch)
        rows = ceil(prod(output[1:]) / batch)
    few, many = ceil(min(rows, columns) / PARTITIONS), ceil(max(rows, columns) / MOVING)
    # Products, and two instructions to transpose a tile of weights.
    products = batch * ceil(inner / PARTITIONS) * (few * many + 2 * ceil(columns / PARTITIONS))
    return int(products * (_QUANTIZED if quantized else _INSTRUCTIONS))
