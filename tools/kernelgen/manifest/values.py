"""The values of a kernel's entry without the YAML around them: tensors, parameters, and their mistakes."""

from __future__ import annotations

import functools
import math
import re

from kernelgen.errors import did_you_mean
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml import types as ggml_types
from kernelgen.ggml.ops import Param
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.manifest.document import short


def check_param(param: Param, value: object, shown: str) -> str | None:
    """Returns the mistake in a parameter's value, or None.

    Args:
        param: the parameter.
        value: the value.
        shown: the value's text in messages.
    """
    name = param.name
    if param.open and value == ggml_ops.ANY:
        return None
    if param.kind is bool:
        return None if isinstance(value, bool) else f"{name}: expected true or false, not '{shown}'"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{name}: expected {'an integer' if param.kind is int else 'a number'}, not '{shown}'"
    if param.kind is int:
        if not isinstance(value, int):
            return f"{name}: expected an integer, not '{shown}'"
        if not -(2**31) <= value < 2**31:
            return f"{name}: {value} does not fit 32 bits"
    else:
        if value != value:
            return f"{name}: expected a number, not '{shown}'"
        if math.isinf(value) and not param.infinite:
            return f"{name}: expected a finite number, not '{shown}'"
        try:
            if not math.isinf(value):
                ggml_ops.f32_bits(float(value))
        except OverflowError:
            return f"{name}: {shown} is beyond the range of a 32-bit float"
    if param.choices is not None and value not in param.choices:
        return f"{name}: expected one of {', '.join(map(str, param.choices))}, not {shown}"
    if param.minimum is not None and value < param.minimum:
        return f"{name}: expected at least {param.minimum:g}, not {shown}"
    if param.maximum is not None and value > param.maximum:
        return f"{name}: expected at most {param.maximum:g}, not {shown}"
    return None


@functools.lru_cache(maxsize=65536)
def parse_tensor(text: str) -> TensorDesc:
    """Returns `TensorDesc.parse`, cached: many entries have the same texts."""
    return TensorDesc.parse(text)


_LOOSE = re.compile(r"\s*\(([^()]*)\)\s*/\s*([^/\s():]+)(?::[^/\s()]*)?\s*(?:/\s*\(([^()]*)\)\s*)?")


def explain_tensor(text: str, reason: str) -> tuple[str, str | None]:
    """Returns the mistake in a tensor's text and its correction; `reason` is the message of `TensorDesc.parse`."""
    shown = short(text)
    match = _LOOSE.fullmatch(text)
    if not match:
        return f"'{shown}' is not a tensor: expected (ne0,ne1,ne2,ne3)/dtype[/(nb0,nb1,nb2,nb3)]", None
    ne, dtype, nb = match.groups()
    for what, figures in (("dimensions", ne), ("strides", nb)):
        if figures is None:
            continue
        parts = [part.strip() for part in figures.split(",")]
        bad = next((p for p in parts if not re.fullmatch(r"-?[0-9]{1,19}", p, re.ASCII)), None)
        if bad is not None:
            return f"'{short(bad)}' is not an integer in '{shown}'", None
        if len(parts) != 4:
            filled = ",".join([*parts, "1", "1", "1", "1"][:4])
            hint = f"write ({filled})/{short(dtype)}" if what == "dimensions" and len(parts) < 4 else None
            return f"a tensor has four {what}, not {len(parts)}: '{shown}'", hint
    if dtype not in ggml_types.TYPES:
        near = did_you_mean(dtype, ggml_types.TYPES, ggml_types.ALIASES)
        return f"unknown dtype '{short(dtype)}'{near}", None if near else "dtypes are " + ", ".join(ggml_types.TYPES)
    return f"{reason}: '{shown}'", None
