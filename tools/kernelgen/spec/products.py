"""How many instructions a program has for the products of a graph: what planning knows of a program without its HLO.

The count of products is that of `kernelgen.hlo.estimate`; for what else a program does they are multiplied. For groups of the ready
manifests that is within a third of what the HLO is estimated to take.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from kernelgen.targets import PARTITIONS

MOVING = 512
"""Columns of a product's moving operand."""
_INSTRUCTIONS, _QUANTIZED = 1.5, 3.0
"""Of a program, for each that has to do with products; with weights that are first made of blocks."""


def instructions(op: str, weights: Sequence[int], quantized: bool, output: Sequence[int]) -> int:
    """Returns the instructions of a node, for one physical core; 0 unless it is a product of matrices.

    Args:
        op: ggml's op.
        weights: `ne` of its first input.
        quantized: whether that is made of blocks.
        output: `ne` of its result.
    """
    if op not in ("mul_mat", "mul_mat_id"):
        return 0
    inner, columns, experts, _ = weights
    rows, batch = output[1], prod(output[2:])
    if op == "mul_mat_id":  # matrices of experts, of which some have several parts of the rows
        batch = min(2 * experts, rows * batch)
        rows = ceil(prod(output[1:]) / batch)
    few, many = ceil(min(rows, columns) / PARTITIONS), ceil(max(rows, columns) / MOVING)
    # Products, and two instructions to transpose a tile of weights.
    products = batch * ceil(inner / PARTITIONS) * (few * many + 2 * ceil(columns / PARTITIONS))
    return int(products * (_QUANTIZED if quantized else _INSTRUCTIONS))
