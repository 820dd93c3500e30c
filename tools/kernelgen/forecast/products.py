"""Forecasts products by weights from shapes alone: no kernel is emitted, so that choosing a layout needs no JAX.

`of_product` returns the counts of `kernelgen.forecast.work.of_hlo` for the product's kernel; a test compares the two for each type
and layout. It omits the activations and the result, which are the same in each layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from types import MappingProxyType

from kernelgen.forecast.work import LONG_ROW, Work
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import BF16
from kernelgen.targets import PARTITIONS

DEQUANTIZE = MappingProxyType(
    {
        "q4_0": (2, 0, 164, 0),
        "q4_1": (4, 0, 168, 0),
        "q5_0": (2, 32, 260, 0),
        "q5_1": (4, 32, 264, 0),
        "q8_0": (2, 0, 68, 0),
        "q2_K": (4, 0, 1384, 0),
        "q3_K": (2, 272, 2180, 0),
        "q4_K": (4, 8, 1368, 0),
        "q5_K": (4, 264, 2136, 0),
        "q6_K": (2, 256, 2084, 0),
        "iq2_xxs": (34, 640, 3468, 32),
        "iq2_xs": (66, 640, 3556, 32),
        "iq3_xxs": (34, 640, 3532, 64),
        "iq1_s": (18, 32, 1796, 32),
        "iq4_nl": (2, 224, 612, 0),
        "iq3_s": (2, 320, 3252, 64),
        "iq2_s": (2, 544, 3364, 32),
        "iq4_xs": (2, 1800, 4932, 0),
        "iq1_m": (12, 32, 1944, 32),
        "tq1_0": (2, 0, 2052, 0),
        "tq2_0": (2, 0, 1284, 0),
        "mxfp4": (0, 225, 613, 0),
        "nvfp4": (0, 456, 1248, 0),
        "q1_0": (2, 0, 772, 0),
        "q2_0": (2, 0, 324, 0),
    }
)
"""By type, the work of the kernels in JAX to dequantize a block: elements of the vector engine with one and with two operands,
elements of the vector or scalar engine, and elements gathered from a table. The layout `planes` has the same."""

_DTYPES = {"f32": "float32", "f16": "float16"}


def of_product(op: str, weight: TensorDesc, output: TensorDesc) -> Work:
    """Returns the work of a product by a weight.

    Args:
        op: `mul_mat`, or `mul_mat_id`: with several tokens, each expert counts as read at most once, and multiplied with all of
            them.
        weight: the first input, in ggml's form, in `planes` or in `bf16`.
        output: the result.
    """
    inner, columns, experts, _ = weight.ne
    _, n, tokens, more = output.ne
    matrices, rows = 1, n * tokens * more
    if op == "mul_mat_id":  # n is the number of experts per token
        matrices, rows = min(n * tokens, experts), tokens
    kind = TYPES[weight.dtype]
    elements = matrices * inner * columns
    blocks = elements // kind.block
    widened = weight.layout == BF16
    work = Work(read=2 * elements if widened else blocks * kind.size)
    row = int(work.read) // (matrices * columns)
    if columns > 1 and row < LONG_ROW:
        work.narrow[row] = int(work.read)
    tiles = min(ceil(a / PARTITIONS) * max(b, PARTITIONS) for a, b in ((rows, columns), (columns, rows)))
    found = work.columns if min(rows, columns) <= PARTITIONS else work.columns_many
    found[_DTYPES.get(weight.dtype, "bfloat16")] = matrices * ceil(inner / PARTITIONS) * tiles
    if kind.quantized and not widened:
        vector, two, either, work.elements = (blocks * n for n in DEQUANTIZE[weight.dtype])
        work.vector, work.vector_two, work.either = (n / PARTITIONS for n in (vector, two, either))
    return work


def added(works: Iterable[tuple[Work, int]]) -> Work:
    """Returns the sum of works, each with its count."""
    total = Work()
    for work, count in works:
        for name in ("columns", "columns_many", "narrow"):
            for key, n in getattr(work, name).items():
                getattr(total, name)[key] += count * n
        for name in ("read", "vector", "vector_two", "either", "elements"):
            setattr(total, name, getattr(total, name) + count * getattr(work, name))
    return total
