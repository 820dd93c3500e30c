"""The dtypes of NKI and their promotion."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from nki_interpreter.errors import NkiTypeError

float32 = np.dtype(np.float32)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
int32 = np.dtype(np.int32)
uint32 = np.dtype(np.uint32)
boolean = np.dtype(np.bool_)

FLOATS = tuple(
    np.dtype(t)
    for t in (
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )
)
INTS = tuple(np.dtype(t) for t in (np.int32, np.uint32, np.int16, np.uint16, np.int8, np.uint8))

_NAMED: dict[str, np.dtype[Any]] = {
    **{str(t): t for t in (*FLOATS, *INTS)},
    "tfloat32": float32,
    "float32r": float32,
    "bool": boolean,
    "bool_": boolean,
    "float8_e4m3fn_x4": uint32,
    "float8_e5m2_x4": uint32,
    "float4_e2m1fn_x4": np.dtype(np.uint16),
}
_NARROWED = {
    np.dtype(np.float64): float32,
    np.dtype(np.int64): int32,
    np.dtype(np.uint64): uint32,
}


def dtype_of(value: Any) -> np.dtype[Any]:
    """Returns the dtype that a kernel names; 64-bit types become 32 bits wide.

    Raises:
        NkiTypeError: NKI has no such dtype.
    """
    try:
        return _KNOWN[value]
    except (KeyError, TypeError):
        pass
    if value is bool:
        return boolean
    try:
        found: np.dtype[Any] | None = np.dtype(value)
    except TypeError:
        found = None
    if found is not None:
        found = _NARROWED.get(found, found)
    if found is None or (found not in FLOATS and found not in INTS and found != boolean):
        raise NkiTypeError("err_unsupported_dtype", f"{value!r} is not a dtype of NKI; it has {', '.join(_NAMED)}")
    return found


_KNOWN: dict[Any, np.dtype[Any]] = {
    **_NAMED,
    **{d: d for d in (*FLOATS, *INTS)},
    **{d.type: d for d in (*FLOATS, *INTS)},
}
"""The most frequent dtypes: a lookup is faster than a call to NumPy."""
_FLOATS, _INTS = frozenset(FLOATS), frozenset((*INTS, boolean))


def is_float(dtype: np.dtype[Any]) -> bool:
    return np.dtype(dtype) in _FLOATS


def is_int(dtype: np.dtype[Any]) -> bool:
    return np.dtype(dtype) in _INTS


def promoted(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of a result of several operands.

    Float beats int and the wider float wins; two different floats of 16 bits give float32, two of 8 bits give bfloat16; int32 with
    uint32 gives float32 (AWS's table of type promotion in the documentation of nki.language).
    """
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = _promoted(result, dtype)
    return result


def _promoted(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    if a == b:
        return a
    if is_float(a) != is_float(b):
        return a if is_float(a) else b
    if is_float(a):
        if a.itemsize != b.itemsize:
            return a if a.itemsize > b.itemsize else b
        return float32 if a.itemsize == 2 else bfloat16
    if boolean in (a, b):
        return b if a == boolean else a
    common: np.dtype[Any] = np.promote_types(a, b)
    return common if common in INTS else float32
