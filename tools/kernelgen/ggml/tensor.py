"""A GGML tensor's description: shape, type and strides."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kernelgen.ggml import weight_layouts
from kernelgen.ggml.types import TYPES

_TENSOR = re.compile(
    r"\s*\(\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*\)\s*/\s*(\w+)(?::(\w+))?"
    r"\s*(?:/\s*\(\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*,\s*(-?\d+)\s*\)\s*)?"
)

Dims = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """A GGML tensor: `(ne0,ne1,ne2,ne3)/dtype[:layout][/(nb0,nb1,nb2,nb3)]`, dimension 0 fastest.

    Attributes:
        ne: elements per dimension.
        dtype: ggml's type name.
        nb: strides in bytes, always filled in and canonical: where ne is 1, the stride of a contiguous tensor. nb[0] is the
            distance between elements, or between blocks of a quantized type.
        layout: order of the tensor's bytes (`kernelgen.ggml.weight_layouts`); empty for ggml's own. The strides are ggml's
            in every layout.
    """

    ne: Dims
    dtype: str
    nb: Dims
    layout: str = ""

    @staticmethod
    def make(ne: Sequence[int], dtype: str, nb: Sequence[int] | None = None, layout: str = "") -> TensorDesc:
        """Returns the canonical description.

        Raises:
            ValueError: there are not four positive dimensions, the type is unknown, a row does not hold whole blocks, or the tensor
                can't have the layout.
        """
        if len(ne) != 4 or (nb is not None and len(nb) != 4):
            raise ValueError(f"a tensor has four dimensions, not {len(ne if nb is None or len(ne) != 4 else nb)}")
        made = _desc(tuple(ne), dtype, None if nb is None else tuple(nb))
        if not layout:
            return made
        problem = weight_layouts.problem(layout, dtype, made.ne, made.nb)
        if problem is not None:
            raise ValueError(problem)
        return TensorDesc(made.ne, dtype, made.nb, layout)

    @staticmethod
    def parse(text: str) -> TensorDesc:
        """Returns the tensor that `text` describes.

        Raises:
            ValueError: `text` does not have this form, or describes no tensor.
        """
        match = _TENSOR.fullmatch(text)
        if not match:
            raise ValueError("expected (ne0,ne1,ne2,ne3)/dtype or (ne0,ne1,ne2,ne3)/dtype/(nb0,nb1,nb2,nb3)")
        groups = match.groups()
        ne = tuple(map(int, groups[:4]))
        nb = None if groups[6] is None else tuple(map(int, groups[6:]))
        return TensorDesc.make(ne, groups[4], nb, groups[5] or "")

    def in_layout(self, layout: str) -> TensorDesc:
        """Returns the same tensor in another layout; empty for ggml's own.

        Raises:
            ValueError: it can't have the layout.
        """
        return TensorDesc.make(self.ne, self.dtype, self.nb, layout)

    @property
    def type_text(self) -> str:
        """The type in the form of `str`: with the layout."""
        return f"{self.dtype}:{self.layout}" if self.layout else self.dtype

    @property
    def contiguous(self) -> bool:
        """Whether elements are adjacent and in order."""
        return self.nb == dense_strides(self.ne, self.dtype)

    @property
    def elements(self) -> int:
        return self.ne[0] * self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def storage_bytes(self) -> int:
        """Bytes from the first element to the end of the last one (`ggml_nbytes`)."""
        t = TYPES[self.dtype]
        rest = sum((self.ne[i] - 1) * self.nb[i] for i in (1, 2, 3))
        if t.quantized:
            return self.ne[0] // t.block * self.nb[0] + rest
        return t.size + (self.ne[0] - 1) * self.nb[0] + rest

    @property
    def shape(self) -> Dims:
        """The shape in JAX and NumPy: reversed."""
        return self.ne[::-1]

    def __str__(self) -> str:
        text = f"({self.ne[0]},{self.ne[1]},{self.ne[2]},{self.ne[3]})/{self.type_text}"
        return text if self.contiguous else f"{text}/({self.nb[0]},{self.nb[1]},{self.nb[2]},{self.nb[3]})"


def dense_strides(ne: Dims, dtype: str) -> Dims:
    """Returns the strides in bytes of a contiguous tensor."""
    t = TYPES[dtype]
    nb1 = t.size * (ne[0] // t.block)
    return (t.size, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2])


@functools.lru_cache(maxsize=65536)
def _desc(ne: Dims, dtype: str, nb: Dims | None) -> TensorDesc:
    if dtype not in TYPES:
        raise ValueError(f"unknown dtype '{dtype}'")
    bad = next((n for n in ne if n <= 0), None)
    if bad is not None:
        raise ValueError(f"dimensions are positive, not {bad}")
    t = TYPES[dtype]
    if ne[0] % t.block:
        raise ValueError(f"ne0 of a {dtype} tensor is a multiple of its block size {t.block}, not {ne[0]}")
    if max(ne) >= 2**63 or ne[0] * ne[1] * ne[2] * ne[3] * t.size >= 2**63:
        raise ValueError("the tensor is larger than 2^63 bytes")
    if nb is None:
        return TensorDesc(ne, dtype, dense_strides(ne, dtype))
    # Strides without meaning may have any value; they are replaced below.
    used = [b for b, n, least in zip(nb, ne, (t.block, 1, 1, 1), strict=True) if n > least]
    bad = next((b for b in used if b < 0 or b >= 2**63), None)
    if bad is not None:
        raise ValueError(f"strides are not negative, not {bad}")
    unit = 2 if t.size % 2 == 0 and t.quantized else 1 if t.quantized else t.size
    bad = next((b for b in used if b % unit), None)
    if bad is not None:
        raise ValueError(f"strides of a {dtype} tensor are multiples of {unit} bytes, not {bad}")
    # The stride of a dimension of one element (which in llama.cpp carries n_ctx) has no meaning.
    out = [nb[0] if ne[0] > t.block else t.size]
    if t.quantized and out[0] != t.size:
        raise ValueError(f"blocks of a {dtype} row follow each other: nb0 is {t.size}, not {nb[0]}")
    for i in (1, 2, 3):
        out.append(nb[i] if ne[i] > 1 else out[i - 1] * (ne[i - 1] // (t.block if i == 1 else 1)))
    made = TensorDesc(ne, dtype, (out[0], out[1], out[2], out[3]))
    if max(made.storage_bytes, *out) >= 2**63:
        raise ValueError("the tensor is larger than 2^63 bytes")
    return made
