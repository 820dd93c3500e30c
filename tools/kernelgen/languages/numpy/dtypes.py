"""The dtype of each operation.

For two arrays: a float takes precedence over an integer, an integer over a bool, the wider over the narrower. float16 with
bfloat16 gives float32; a signed with an unsigned integer gives the signed type that holds both, int32 at most; an FP8 type
combines only with itself. Python's integers and floats take the array's dtype, but a float makes an integer array float32. No
dtype has 64 bits.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kernelgen.languages.numpy.places import refused

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32"}
_FP8: tuple[np.dtype[Any], ...] = tuple(
    np.dtype(getattr(ml_dtypes, n)) for n in ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
)
_FLOATS = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32), *_FP8)
FLOAT32, INT32, BOOL = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.bool_)


def narrowed(dtype: Any) -> np.dtype[Any]:
    """Returns a dtype; for 64 bits, its 32-bit counterpart.

    Raises:
        KernelgenError: Neuron devices have no such dtype.
    """
    found: np.dtype[Any] = np.dtype(dtype)
    found = np.dtype(_NARROW.get(found.name, found.name)) if found not in _FLOATS else found
    if found not in _FLOATS and found.kind not in "iub":
        raise refused(f"a kernel computes with numbers and bools, not with {found.name}")
    return found


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype in _FLOATS


def promoted(*operands: Any) -> np.dtype[Any]:
    """Returns the common dtype of operands: Python numbers and values with a `dtype`.

    Raises:
        KernelgenError: they have no common dtype.
    """
    strong = [narrowed(o.dtype) for o in operands if hasattr(o, "dtype")]
    strong += [BOOL for o in operands if isinstance(o, bool)]
    weak = [o for o in operands if isinstance(o, int | float) and not isinstance(o, bool) and not hasattr(o, "dtype")]
    if len(strong) + len(weak) != len(operands):
        wrong = next(o for o in operands if not hasattr(o, "dtype") and not isinstance(o, int | float))
        raise refused(f"{type(wrong).__name__} is not an array or a number")
    if not strong:
        return FLOAT32 if any(isinstance(o, float) for o in weak) else INT32
    found = strong[0]
    for other in strong[1:]:
        found = _pair(found, other)
    if any(isinstance(o, float) for o in weak) and not is_float(found):
        return FLOAT32
    return INT32 if weak and found == BOOL else found


def _pair(one: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any]:
    if one == other or other == BOOL:
        return one
    if one == BOOL:
        return other
    if is_float(one) != is_float(other) and not {one, other} & {*_FP8}:
        return one if is_float(one) else other
    if is_float(one) or is_float(other):
        if {one, other} & {*_FP8}:
            raise refused(
                f"{one.name} and {other.name} have no common dtype", "convert one of them: x.astype(np.float32)"
            )
        return FLOAT32  # float16 and bfloat16: neither covers the other's range and precision
    if one.kind == other.kind:
        return max(one, other, key=lambda d: d.itemsize)
    signed, unsigned = (one, other) if one.kind == "i" else (other, one)
    return signed if signed.itemsize > unsigned.itemsize else np.dtype(f"int{8 * min(4, 2 * unsigned.itemsize)}")


def floating(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which a function of real numbers, such as `np.exp` or `np.divide`, computes."""
    return dtype if is_float(dtype) else FLOAT32


def summing(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of a sum or product: NumPy's, narrowed."""
    if is_float(dtype):
        return dtype
    return np.dtype(np.uint32) if dtype.kind == "u" else INT32
