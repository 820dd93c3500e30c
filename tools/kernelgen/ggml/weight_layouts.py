"""Layouts: ways to store a weight other than ggml's, which a backend may use and a kernel may request.

A tensor without a layout is in ggml's form. Two layouts are permutations of the tensor's bytes:

* `planes`, of quantized types: each row has each field of all its blocks together, field after field, where ggml has block after
  block. Row i of a tensor starts at the same byte as in ggml's form.
* `transposed`, of f32, f16 and bf16: each matrix is column by column, element (i0, i1) at i0 * ne1 + i1.

The others have other values, and the backend keeps the original beside them:

* `bf16`, of quantized types: every element dequantized and rounded to bfloat16, `ne0` of them for each row.
* `f8_e4m3_128x128`, of quantized types, f16 and bf16: each tile of 128 columns and 128 rows of a matrix has one scale, its largest
  magnitude over 240, and FP8 codes (e4m3, at most 240: the maximum of trn1 and trn2). A matrix starts with its codes by columns,
  element (i0, i1) at i0 * ne1 + i1, and zeros for columns up to a multiple of 128; the scales follow, f32, tile
  (i0 / 128, i1 / 128) at index i0 / 128 * ceil(ne1 / 128) + i1 / 128.

In each layout, reading back gives the original.

docs/reference/manifest-languages.md describes their uses, docs/reference/bundle-keys.md their place in a kernel's key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kernelgen.ggml.types import TYPES

if TYPE_CHECKING:
    import numpy as np

PLANES = "planes"
TRANSPOSED = "transposed"
BF16 = "bf16"
F8_TILES = "f8_e4m3_128x128"

LAYOUTS = MappingProxyType({PLANES: 1, TRANSPOSED: 2, BF16: 3, F8_TILES: 4})
"""Every layout by name, with its number in keys of bundles."""

WEIGHTS = MappingProxyType({"mul_mat": 0, "mul_mat_id": 0})
"""The ops with an input that may have a layout, and the input's index."""

TILE = 128
"""Rows and columns per scale in `f8_e4m3_128x128`."""

F8_MAX = 240
"""The largest code of `f8_e4m3_128x128`: F8E4M3's maximum on trn1 and trn2 (Neuron SDK, data types); F8E4M3FN goes up to 448."""

_MATRICES = (TRANSPOSED, F8_TILES)
"""The layouts that store matrix by matrix; others store row by row."""

_FIELDS = """
q4_0 2 16         q4_1 2 2 16       q5_0 2 4 16       q5_1 2 2 4 16     q8_0 2 32         q2_K 16 64 2 2
q3_K 32 64 12 2   q4_K 2 2 12 128   q5_K 2 2 12 32 128 q6_K 128 64 16 2 iq2_xxs 2 64      iq2_xs 2 64 8
iq3_xxs 2 64 32   iq1_s 2 32 16     iq4_nl 2 16       iq3_s 2 64 8 32 4 iq2_s 2 32 32 8 8 iq4_xs 2 2 4 128
iq1_m 32 16 8     tq1_0 48 4 2      tq2_0 64 2        mxfp4 1 16        nvfp4 4 32        q1_0 2 16
q2_0 2 16
"""


def _parse(table: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    widths: list[int] = []
    for word in table.split():
        if word in TYPES:
            widths = found.setdefault(word, [])
        else:
            widths.append(int(word))
    return {name: tuple(widths) for name, widths in found.items()}


FIELDS = MappingProxyType(_parse(_FIELDS))
"""By quantized type, the bytes of each field of a block, in the order of ggml-common.h.

Arrays that hold two things are two fields: in iq2_s's and iq3_xxs's `qs`, the second half or third are signs and scales.
"""


def of_type(dtype: str) -> tuple[str, ...]:
    """Returns the layouts that weights of a type may have."""
    if dtype in FIELDS:
        return (PLANES, BF16, F8_TILES)
    return {"f32": (TRANSPOSED,), "f16": (TRANSPOSED, F8_TILES), "bf16": (TRANSPOSED, F8_TILES)}.get(dtype, ())


def problem(layout: str, dtype: str, ne: Sequence[int], nb: Sequence[int]) -> str | None:
    """Returns the reason why a tensor can't have a layout, or None.

    Args:
        layout: the layout; empty for none.
        dtype: ggml's name of the type.
        ne: elements per dimension.
        nb: strides in bytes, canonical.
    """
    if not layout:
        return None
    if layout not in LAYOUTS:
        return f"unknown layout '{layout}': layouts are {', '.join(LAYOUTS)}"
    if layout not in of_type(dtype):
        kinds = {TRANSPOSED: "f32, f16 and bf16", F8_TILES: "quantized types, f16 and bf16"}
        kind = kinds.get(layout, "quantized types")
        return f"{layout} is a layout of {kind}, not of {dtype}"
    t = TYPES[dtype]
    row = ne[0] // t.block * t.size
    if nb[0] != t.size or (layout in _MATRICES and (nb[1] != row or nb[2] % (row * ne[1]) or nb[3] % (row * ne[1]))):
        what = "matrices" if layout in _MATRICES else "rows"
        return f"a tensor in the layout {layout} has contiguous {what}"
    if any(b % row for b in nb[1:]):
        return f"a tensor in the layout {layout} has strides of whole rows, {row} bytes"
    return None


def pack(data: np.ndarray[Any, Any], layout: str, dtype: str, ne: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns the bytes of a contiguous tensor in a layout that is a permutation.

    Args:
        data: ggml's bytes, u8.
        layout: `planes` or `transposed`.
        dtype: ggml's name of the type, which must support `layout`.
        ne: elements per dimension.
    """
    import numpy as np

    t = TYPES[dtype]
    if layout == TRANSPOSED:
        matrices = data.reshape(-1, ne[1], ne[0], t.size)
        return np.ascontiguousarray(matrices.transpose(0, 2, 1, 3)).reshape(-1)
    blocks = data.reshape(-1, ne[0] // t.block, t.size)
    ends = np.cumsum(FIELDS[dtype])[:-1]
    planes = [field.reshape(len(blocks), -1) for field in np.split(blocks, ends, axis=2)]
    return np.concatenate(planes, axis=1).reshape(-1)


def pack_bf16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the bytes, u8, of a contiguous tensor in the layout `bf16`.

    Args:
        values: the tensor's elements, dequantized, of any float type.
    """
    import ml_dtypes
    import numpy as np

    return np.ascontiguousarray(values, np.float32).astype(ml_dtypes.bfloat16).reshape(-1).view(np.uint8)


def tiles(ne: Sequence[int]) -> tuple[int, int]:
    """Returns the numbers of tiles of `f8_e4m3_128x128` along ne0 and ne1."""
    return -(-ne[0] // TILE), -(-ne[1] // TILE)


def stored_bytes(layout: str, dtype: str, ne: Sequence[int]) -> int:
    """Returns the bytes of a contiguous tensor in a layout; an empty layout is ggml's own."""
    if layout == BF16:
        return 2 * math.prod(ne)
    if layout == F8_TILES:
        columns, rows = tiles(ne)
        return (columns * TILE * ne[1] + 4 * columns * rows) * ne[2] * ne[3]
    t = TYPES[dtype]
    return math.prod(ne) // t.block * t.size


def pack_f8_tiles(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the bytes, u8, of a contiguous tensor in the layout `f8_e4m3_128x128`.

    A tile with an element that is not finite has NaN as its scale, and all codes 0.

    Args:
        values: the tensor's elements, dequantized, [ne3, ne2, ne1, ne0] of any float type.
    """
    import ml_dtypes
    import numpy as np

    *matrices, rows, columns = values.shape
    kt, mt = tiles((columns, rows))
    padding = [*((0, 0) for _ in matrices), (0, mt * TILE - rows), (0, kt * TILE - columns)]
    x = np.pad(np.asarray(values, np.float32), padding).reshape(-1, mt, TILE, kt, TILE)
    largest = np.abs(x).max((2, 4), keepdims=True)
    scales = np.where(np.isfinite(largest), largest, np.float32(np.nan)) / np.float32(F8_MAX)
    some = scales > 0
    scaled = np.divide(x, scales, out=np.zeros_like(x), where=np.broadcast_to(some, x.shape))
    codes = np.clip(scaled, -F8_MAX, F8_MAX).astype(ml_dtypes.float8_e4m3).view(np.uint8)
    codes = codes.reshape(-1, mt * TILE, kt * TILE)[:, :rows].transpose(0, 2, 1).reshape(len(x), -1)
    stored = np.ascontiguousarray(scales[:, :, 0, :, 0].transpose(0, 2, 1)).view(np.uint8).reshape(len(x), -1)
    return np.concatenate([codes, stored], axis=1).reshape(-1)
