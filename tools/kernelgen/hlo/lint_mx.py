"""Checks of custom calls of microscaling (MX) types, from AWS's pages of the errors NCC_EVRF036 to NCC_EVRF058.

`QuantizeMX` takes one tensor and returns (packed data, scales); `__op$block_scaled_dot` takes (lhs, rhs, lhs_scale, rhs_scale).
Both have JSON as backend_config. The first name is from AWS's pages; no public module contains it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

from kernelgen.hlo.linted import LintedModule, element_type

QUANTIZE, SCALED_DOT = "QuantizeMX", "__op$block_scaled_dot"
CALLS = frozenset({QUANTIZE, SCALED_DOT})
"""Targets of the custom calls."""

BLOCK, PACKED = 32, 4
QUANTIZED_TYPES = ("float8_e5m2", "float8_e4m3fn")

RULES = {
    "NCC_EVRF036": "`QuantizeMX` without a JSON backend_config",
    "NCC_EVRF037": "`QuantizeMX` with a number of operands other than 1",
    "NCC_EVRF038": "`QuantizeMX` along a dimension that is not the last or the last but one",
    "NCC_EVRF039": "`QuantizeMX` with a block_size that is not 32",
    "NCC_EVRF040": "`QuantizeMX` with a scale_method that is not EMAX",
    "NCC_EVRF041": "`QuantizeMX` of a type other than bf16 or f16",
    "NCC_EVRF042": "`QuantizeMX` whose dtype is not float8_e5m2 or float8_e4m3fn, or whose data are not a quarter as many u32",
    "NCC_EVRF057": "`QuantizeMX` whose result is not a tuple of 2",
    "NCC_EVRF058": "`QuantizeMX` along a dimension that 4 does not divide",
    "NCC_EVRF043": "a scaled dot with a number of operands other than 4",
    "NCC_EVRF044": "a scaled dot whose lhs is not u32",
    "NCC_EVRF045": "a scaled dot whose result is not f32 or bf16",
    "NCC_EVRF046": "a scaled dot whose lhs has a rank below 2",
    "NCC_EVRF047": "a scaled dot whose rhs has a rank below 2",
    "NCC_EVRF048": "a scaled dot whose batch dimensions have different sizes",
    "NCC_EVRF049": "a scaled dot whose backend_config can't be read",
    "NCC_EVRF050": "a scaled dot whose contracting dimensions have different sizes",
    "NCC_EVRF053": "a scaled dot whose contracting dimension is a batch dimension",
    "NCC_EVRF054": "a scaled dot with a batch dimension out of range",
    "NCC_EVRF055": "a scaled dot with a contracting dimension out of range",
}
"""The violation that each code reports."""


def violation(code: str, m: LintedModule, computation: Any, i: Any, target: object) -> str:
    """Returns how a custom call violates the rule of a code; else an empty text."""
    of = {QUANTIZE: quantize, SCALED_DOT: scaled_dot}.get(i.custom_call_target)
    found = () if of is None else of(i, m.operands(computation, i))
    return next((message for other, message in found if other == code), "")


def dtype(i: Any) -> object:
    """Returns the type in a `QuantizeMX`, or None."""
    config = _json(i.backend_config)
    return config.get("dtype") if isinstance(config, dict) else None


def quantize(i: Any, operands: list[Any]) -> Iterator[tuple[str, str]]:
    config = _json(i.backend_config)
    if not isinstance(config, dict):
        yield "NCC_EVRF036", "backend_config is not a JSON object"
        return
    if len(operands) != 1:
        yield "NCC_EVRF037", f"{len(operands)} operands and not 1"
        return
    (given,) = operands
    size = list(given.shape.dimensions)
    dim, rank = config.get("dim", 0), len(size)
    allowed = isinstance(dim, int) and -2 <= (dim if dim < 0 else dim - rank) <= -1 and -rank <= dim < rank
    if not allowed:
        yield "NCC_EVRF038", f"dim {dim!r} is neither the last nor the last but one of {rank}"
    if config.get("block_size", BLOCK) != BLOCK:
        yield "NCC_EVRF039", f"block_size {config['block_size']!r} is not {BLOCK}"
    if config.get("scale_method", "EMAX") != "EMAX":
        yield "NCC_EVRF040", f"scale_method {config['scale_method']!r} is not EMAX"
    if element_type(given.shape) not in ("bf16", "f16"):
        yield "NCC_EVRF041", f"the input is {element_type(given.shape)}"
    if config.get("dtype") not in QUANTIZED_TYPES:
        yield "NCC_EVRF042", f"dtype {config.get('dtype')!r} is not {' or '.join(QUANTIZED_TYPES)}"
    if len(i.shape.tuple_shapes) != 2:
        yield "NCC_EVRF057", "the result is not a tuple of data and scales"
        return
    data = i.shape.tuple_shapes[0]
    if element_type(data) != "u32":
        yield "NCC_EVRF042", f"the data are {element_type(data)} and not u32"
    if not allowed:
        return
    if size[dim] % PACKED:
        yield "NCC_EVRF058", f"{PACKED} does not divide {size[dim]} of dimension {dim}"
        return
    size[dim] //= PACKED
    if len(data.dimensions) == rank and list(data.dimensions) != size:
        yield "NCC_EVRF042", f"the data have dimensions {list(data.dimensions)} and not {size}"


def scaled_dot(i: Any, operands: list[Any]) -> Iterator[tuple[str, str]]:
    if len(operands) != 4:
        yield "NCC_EVRF043", f"{len(operands)} operands and not lhs, rhs, lhs_scale, rhs_scale"
        return
    if element_type(operands[0].shape) != "u32":
        yield "NCC_EVRF044", f"lhs is {element_type(operands[0].shape)}"
    if element_type(i.shape) not in ("f32", "bf16"):
        yield "NCC_EVRF045", f"the result is {element_type(i.shape)}"
    sizes = [list(operand.shape.dimensions) for operand in operands[:2]]
    small = False
    for code, side, size in zip(("NCC_EVRF046", "NCC_EVRF047"), ("lhs", "rhs"), sizes, strict=True):
        if len(size) < 2:
            small = True
            yield code, f"{side} has the rank {len(size)}"
    dimensions = _dimensions(i.backend_config)
    if dimensions is None:
        yield "NCC_EVRF049", "backend_config is not JSON, or a dimension in it is not an integer"
        return
    if small:
        return
    batch, contracting = dimensions
    ends = [found[0] if found else len(size) - 1 for found, size in zip(contracting, sizes, strict=True)]
    outside = False
    for code, kind, found in (("NCC_EVRF054", "batch", batch), ("NCC_EVRF055", "contracting", contracting)):
        for side, numbers, size in zip(("lhs", "rhs"), found, sizes, strict=True):
            if not all(0 <= n < len(size) for n in numbers):
                outside = True
                yield code, f"the {kind} dimensions {numbers} of {side} are not all from 0 to {len(size) - 1}"
    if outside:
        return
    if any(end in numbers for end, numbers in zip(ends, batch, strict=True)):
        yield "NCC_EVRF053", "the contracting dimension is a batch dimension too"
    products = [prod(size[n] for n in numbers) for numbers, size in zip(batch, sizes, strict=True)]
    if len(batch[0]) == len(batch[1]) and products[0] != products[1]:
        yield "NCC_EVRF048", f"the batch dimensions have {products[0]} and {products[1]} elements"
    lengths = [size[end] for size, end in zip(sizes, ends, strict=True)]
    if lengths[0] != lengths[1]:
        yield "NCC_EVRF050", f"the contracting dimensions have {lengths[0]} and {lengths[1]} elements"


def _json(text: bytes) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _dimensions(text: bytes) -> tuple[list[list[int]], list[list[int]]] | None:
    """Returns the (batch, contracting) dimensions of lhs and rhs; None if they can't be read."""
    config: Any = {}
    if text not in (b"", b"None"):
        config = _json(text)
        if config is None:
            return None
    inner = config.get("scaled_dot_backend_config", {}) if isinstance(config, dict) else {}
    if not isinstance(inner, dict):
        return None
    found = [
        [inner.get(f"{side}_{kind}_dimensions", []) for side in ("lhs", "rhs")] for kind in ("batch", "contracting")
    ]
    for numbers in (n for pair in found for n in pair):
        if not isinstance(numbers, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
            return None
    return found[0], found[1]
