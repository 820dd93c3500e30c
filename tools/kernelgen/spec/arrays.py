"""Row-major arrays of any rank, as in JAX and NumPy: `f32[150,2,2500]`. Functions in files take and return them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kernelgen.ggml.tensor import TensorDesc

NUMPY_NAMES: Mapping[str, str] = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "pred": "bool",
    "f8e4m3": "float8_e4m3",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    **{
        f"{short}{bits}": f"{long}{bits}"
        for short, long in (("i", "int"), ("s", "int"), ("u", "uint"))
        for bits in (8, 16, 32)
    },
}
"""Manifest names of array dtypes, with their names in NumPy and ml_dtypes, which are accepted, too."""

_SHORT = {long: short for short, long in [*NUMPY_NAMES.items()][::-1]}
_ARRAY = re.compile(r"\s*([A-Za-z0-9_]+)\s*\[([^\[\]]*)\]\s*")


@dataclass(frozen=True, slots=True)
class ArrayDesc:
    """A row-major array: `f32[150,2,2500]`.

    Attributes:
        shape: elements per dimension, the last one fastest.
        dtype: one of `NUMPY_NAMES`.
    """

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def parse(text: str) -> ArrayDesc:
        """Returns the array that `text` describes, in its own notation or, if contiguous, in ggml's.

        Raises:
            ValueError: `text` describes no such array.
        """
        if text.lstrip().startswith("("):
            return _of_tensor(TensorDesc.parse(text))
        match = _ARRAY.fullmatch(text)
        sizes = [] if match is None or not match[2].strip() else [d.strip() for d in match[2].split(",")]
        if match is None or not all(re.fullmatch("[0-9]{1,18}", d) for d in sizes):
            raise ValueError("expected a dtype and a shape such as f32[128,512], or a tensor (512,128,1,1)/f32")
        dtype = _SHORT.get(match[1]) or (_SHORT[NUMPY_NAMES[match[1]]] if match[1] in NUMPY_NAMES else None)
        if dtype is None:
            raise ValueError(f"unknown dtype '{match[1]}': it is one of {', '.join(NUMPY_NAMES)}")
        shape = tuple(map(int, sizes))
        if 0 in shape:
            raise ValueError("dimensions are positive, not 0")
        if math.prod(shape) >= 2**60:
            raise ValueError("the array is larger than 2^60 elements")
        return ArrayDesc(shape, dtype)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return "float" in NUMPY_NAMES[self.dtype]

    @property
    def numpy(self) -> tuple[tuple[int, ...], str]:
        """The shape, and the dtype's name in NumPy or ml_dtypes."""
        return self.shape, NUMPY_NAMES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def _of_tensor(tensor: TensorDesc) -> ArrayDesc:
    if tensor.dtype not in NUMPY_NAMES:
        raise ValueError(f"an array of a kernel that is named by its source is of plain numbers, not {tensor.dtype}")
    if not tensor.contiguous:
        raise ValueError("an array of a kernel that is named by its source has no gaps")
    return ArrayDesc(tensor.shape, tensor.dtype)
