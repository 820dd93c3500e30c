"""Which shapes and types fit an op: what ggml asserts when a graph node is made (ggml.c), as messages.

`check` looks at a whole description and names the part that does not fit, so that a loader can point at it. It knows nothing of
files. Ops without a rule here are accepted as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kernelgen.ggml.ops import GLU, UNARY, ParamValue
from kernelgen.ggml.types import TYPES
from kernelgen.plan import Dims, TensorDesc

Inputs = Sequence[TensorDesc | None]

_FLOATS = frozenset({"f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class Problem:
    """One misfit.

    Attributes:
        part: `inputs`, `output` or `params`.
        which: the input's index or the parameter's name; None for the output.
        message: what does not fit, and what would.
    """

    part: str
    which: int | str | None
    message: str


class _Misfit(Exception):
    """Ends a rule at the first misfit: what follows would only repeat it."""

    def __init__(self, part: str, which: int | str | None, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(part, which, message)


Rule = Callable[[str, Inputs, Mapping[str, ParamValue]], tuple[Dims, str]]
"""Takes op, inputs and all parameters; returns the result's shape and type, or raises `_Misfit`."""


def check(
    op: str, inputs: Inputs, output: TensorDesc, params: Mapping[str, ParamValue], alias: int | None = None
) -> list[Problem]:
    """Returns what does not fit, empty when ggml would make such a node.

    Args:
        op: ggml's name of the op (`rms_norm`, `relu`).
        inputs: at least the required ones, in ggml's order.
        output: the result.
        params: all parameters, defaults filled in.
        alias: the input whose memory the result is written to.
    """
    rule = _RULES.get(op)
    if rule is None:
        return []
    try:
        ne, dtype = rule(op, inputs, params)
        _check_output(op, inputs, output, ne, dtype, alias)
    except _Misfit as misfit:
        return [misfit.problem]
    return []


def result(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> TensorDesc | None:
    """Returns the result that ggml would make, or None when the inputs don't fit, or the caller chooses the result's shape."""
    rule = _RULES.get(op)
    if rule is None or op in _SHAPE_IS_CHOSEN:
        return None
    try:
        ne, dtype = rule(op, inputs, params)
    except _Misfit:
        return None
    return TensorDesc.make(ne, dtype)


def _check_output(op: str, inputs: Inputs, output: TensorDesc, ne: Dims, dtype: str, alias: int | None) -> None:
    if op in _SHAPE_IS_CHOSEN:
        if output.dtype != dtype or output.elements != _count(ne):
            raise _Misfit(
                "output",
                None,
                f"the result of {op} has {_count(ne)} elements of {dtype}, not {output.elements} of {output.dtype}",
            )
    elif output.ne != ne or output.dtype != dtype:
        raise _Misfit("output", None, f"the result of {op} is {_text(ne, dtype)}, not {_text(output.ne, output.dtype)}")
    shared = inputs[alias] if alias is not None and alias < len(inputs) else None
    if not output.contiguous and (shared is None or shared.nb != output.nb):
        raise _Misfit("output", None, f"the result of {op} is contiguous: leave its strides out")


def _count(ne: Dims) -> int:
    return ne[0] * ne[1] * ne[2] * ne[3]


def _text(ne: Dims, dtype: str) -> str:
    return f"{_dims(ne)}/{dtype}"


def _dims(ne: Dims) -> str:
    return f"({ne[0]},{ne[1]},{ne[2]},{ne[3]})"


def _given(inputs: Inputs, i: int) -> TensorDesc:
    tensor = inputs[i]
    if tensor is None:
        raise _Misfit("inputs", i, "this input can't be absent")
    return tensor


def _optional(inputs: Inputs, i: int) -> TensorDesc | None:
    return inputs[i] if i < len(inputs) else None


def _want_type(inputs: Inputs, i: int, what: str, allowed: frozenset[str]) -> None:
    tensor = inputs[i]
    if tensor is not None and tensor.dtype not in allowed:
        names = " or ".join(sorted(allowed, key=lambda name: TYPES[name].number))
        raise _Misfit("inputs", i, f"{what} is {names}, not {tensor.dtype}")


def _want(condition: bool, i: int, message: str) -> None:
    if not condition:
        raise _Misfit("inputs", i, message)


def _rows_contiguous(t: TensorDesc) -> bool:
    """`ggml_is_contiguous_rows`: the elements of a row follow each other."""
    return t.ne[0] == TYPES[t.dtype].block or t.nb[0] == TYPES[t.dtype].size


def _contiguous_but_rows(t: TensorDesc) -> bool:
    """`ggml_is_contiguous_1`: rows may have gaps between them, dimensions above not."""
    return _rows_contiguous(t) and all(t.ne[i] == 1 or t.nb[i] == t.nb[i - 1] * t.ne[i - 1] for i in (2, 3))


def _elementwise(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    _want_type(inputs, 0, f"src0 of {op}", _FLOATS)
    return a.ne, a.dtype


def _unary(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    _want(
        _rows_contiguous(a), 0, f"the rows of {op}'s input are contiguous: nb0 is {TYPES[a.dtype].size}, not {a.nb[0]}"
    )
    return _elementwise(op, inputs, params)


def _binary(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = _given(inputs, 0), _given(inputs, 1)
    _want_type(inputs, 0, f"src0 of {op}", _FLOATS)
    _want_type(inputs, 1, f"src1 of {op}", _FLOATS)
    for i in range(4):
        _want(
            a.ne[i] % b.ne[i] == 0,
            1,
            f"src1 of {op} repeats to fill src0, but ne{i} = {b.ne[i]} does not divide {a.ne[i]}: {_dims(b.ne)} in {_dims(a.ne)}",
        )
    _want(b.dtype in ("f32", a.dtype), 1, f"src1 of {op} is f32 or of src0's type {a.dtype}, not {b.dtype}")
    return a.ne, a.dtype


def _sum_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    ne, dtype = _elementwise(op, inputs, params)
    return (1, *ne[1:]), dtype


def _scale(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    padded = a.nb[0] == TYPES[a.dtype].size and all(a.nb[i] == a.nb[i - 1] * a.ne[i - 1] for i in (2, 3))
    _want(padded, 0, "src0 of scale is contiguous but for gaps between rows")
    return _elementwise(op, inputs, params)


def _clamp(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    if params["min"] > params["max"]:
        raise _Misfit("params", "min", f"min is at most max: {params['min']} > {params['max']}")
    return _elementwise(op, inputs, params)


def _same_elements(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    if op == "reshape":
        _want(a.contiguous, 0, "src0 of reshape is contiguous: leave its strides out, or use cont")
    return a.ne, a.dtype


def _transpose(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    _want(not TYPES[a.dtype].quantized, 0, f"a quantized tensor can't be transposed: {a.dtype}")
    return (a.ne[1], a.ne[0], a.ne[2], a.ne[3]), a.dtype


def _matrix_product(a: TensorDesc, b: TensorDesc, i: int, names: tuple[str, str]) -> None:
    """`ggml_can_mul_mat`, reported at input `i`."""
    first, second = names
    _want(
        a.ne[0] == b.ne[0],
        i,
        f"the inner dimensions differ: ne0 of {first} is {a.ne[0]}, ne0 of {second} is {b.ne[0]}",
    )
    for d in (2, 3):
        _want(
            b.ne[d] % a.ne[d] == 0,
            i,
            f"{first} is repeated along dimension {d}, but {a.ne[d]} does not divide {second}'s {b.ne[d]}",
        )


def _mul_mat(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = _given(inputs, 0), _given(inputs, 1)
    _want(
        not a.dtype.startswith("i") or a.dtype.startswith("iq"),
        0,
        f"src0 of mul_mat is a float or quantized type, not {a.dtype}",
    )
    _want_type(inputs, 1, "src1 of mul_mat", _FLOATS)
    _matrix_product(a, b, 1, ("src0", "src1"))
    _want(a.nb[0] <= a.nb[1], 0, f"src0 of mul_mat can't be transposed: nb0 {a.nb[0]} > nb1 {a.nb[1]}")
    return (a.ne[1], b.ne[1], b.ne[2], b.ne[3]), "f32"


def _cpy(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, b = _given(inputs, 0), _given(inputs, 1)
    _want(a.elements == b.elements, 1, f"cpy keeps the number of elements: src0 has {a.elements}, dst has {b.elements}")
    return b.ne, b.dtype


def _get_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, rows = _given(inputs, 0), _given(inputs, 1)
    _want_type(inputs, 1, "rows of get_rows", frozenset({"i32"}))
    for d in (1, 2):
        _want(
            rows.ne[d] == a.ne[d + 1],
            1,
            f"ne{d} of rows is ne{d + 1} of src0, {a.ne[d + 1]}, not {rows.ne[d]}",
        )
    _want(rows.ne[3] == 1, 1, f"ne3 of rows is 1, not {rows.ne[3]}")
    return (a.ne[0], rows.ne[0], rows.ne[1], rows.ne[2]), "i32" if a.dtype == "i32" else "f32"


def _set_rows(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    src, rows, dst = _given(inputs, 0), _given(inputs, 1), _given(inputs, 2)
    _want_type(inputs, 0, "src0 of set_rows", frozenset({"f32", "f16"}))
    _want_type(inputs, 1, "rows of set_rows", frozenset({"i32", "i64"}))
    for d in (0, 2, 3):
        _want(src.ne[d] == dst.ne[d], 2, f"ne{d} of dst is that of src0, {src.ne[d]}, not {dst.ne[d]}")
    _want(rows.ne[0] == src.ne[1], 1, f"rows has one index per row of src0, {src.ne[1]}, not {rows.ne[0]}")
    for d in (1, 2):
        _want(
            src.ne[d + 1] % rows.ne[d] == 0,
            1,
            f"rows repeats to fill src0, but its ne{d} = {rows.ne[d]} does not divide {src.ne[d + 1]}",
        )
    _want(rows.ne[3] == 1, 1, f"ne3 of rows is 1, not {rows.ne[3]}")
    _want(_rows_contiguous(src), 0, f"the rows of src0 are contiguous: nb0 is {TYPES[src.dtype].size}, not {src.nb[0]}")
    _want(_rows_contiguous(dst), 2, f"the rows of dst are contiguous: nb0 is {TYPES[dst.dtype].size}, not {dst.nb[0]}")
    return dst.ne, dst.dtype


def _max_bias(inputs: Inputs, mask: int, params: Mapping[str, ParamValue]) -> None:
    if params["max_bias"] > 0 and _optional(inputs, mask) is None:
        raise _Misfit("params", "max_bias", "max_bias (ALiBi) needs a mask")


def _sinks(inputs: Inputs, i: int, heads: int) -> None:
    sinks = _optional(inputs, i)
    if sinks is not None:
        _want_type(inputs, i, "sinks", frozenset({"f32"}))
        _want(sinks.ne[0] == heads, i, f"sinks has one value per head, {heads}, not {sinks.ne[0]}")


def _mask_repeats(a: TensorDesc, mask: TensorDesc, i: int, name: str) -> None:
    _want(mask.contiguous, i, "the mask is contiguous: leave its strides out")
    for d in (2, 3):
        _want(
            a.ne[d] % mask.ne[d] == 0,
            i,
            f"the mask repeats along dimension {d}, but {mask.ne[d]} does not divide {name}'s {a.ne[d]}",
        )


def _soft_max(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    _want_type(inputs, 0, "src0 of soft_max", frozenset({"f32"}))
    _want(a.contiguous, 0, "src0 of soft_max is contiguous: leave its strides out")
    mask = _optional(inputs, 1)
    if mask is not None:
        _want_type(inputs, 1, "the mask of soft_max", frozenset({"f32", "f16"}))
        _want(mask.ne[0] == a.ne[0], 1, f"ne0 of the mask is that of src0, {a.ne[0]}, not {mask.ne[0]}")
        _want(mask.ne[1] >= a.ne[1], 1, f"ne1 of the mask is at least that of src0, {a.ne[1]}, not {mask.ne[1]}")
        _mask_repeats(a, mask, 1, "src0")
    _max_bias(inputs, 1, params)
    _sinks(inputs, 2, a.ne[2])
    return a.ne, a.dtype


_MROPE = 8  # the bit that MROPE, vision and IMROPE share


def _rope(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a, pos = _given(inputs, 0), _given(inputs, 1)
    n_dims = int(params["n_dims"])
    _want_type(inputs, 0, "src0 of rope", frozenset({"f32", "f16"}))
    _want_type(inputs, 1, "pos of rope", frozenset({"i32"}))
    if n_dims % 2 or not 0 < n_dims <= a.ne[0]:
        raise _Misfit("params", "n_dims", f"n_dims is even and at most ne0 of src0, {a.ne[0]}, not {n_dims}")
    per_token = 4 if int(params["mode"]) & _MROPE else 1
    _want(pos.elements == pos.ne[0], 1, f"pos has one dimension, not {_dims(pos.ne)}")
    _want(
        pos.ne[0] == a.ne[2] * per_token,
        1,
        f"pos holds {a.ne[2] * per_token} positions ({per_token} for each of src0's ne2 = {a.ne[2]} tokens), not {pos.ne[0]}",
    )
    factors = _optional(inputs, 2)
    if factors is not None:
        _want_type(inputs, 2, "freq_factors of rope", frozenset({"f32"}))
        _want(
            factors.ne[0] >= n_dims // 2,
            2,
            f"freq_factors has at least n_dims / 2 = {n_dims // 2} values, not {factors.ne[0]}",
        )
    return a.ne, a.dtype


def _flash_attn_ext(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    q, k, v = _given(inputs, 0), _given(inputs, 1), _given(inputs, 2)
    _want_type(inputs, 0, "q", frozenset({"f32"}))
    for i, t in ((1, k), (2, v)):
        _want(
            t.dtype in _FLOATS or TYPES[t.dtype].quantized,
            i,
            f"{'kv'[i - 1]} is a float or quantized type, not {t.dtype}",
        )
    _want(k.ne[0] == q.ne[0], 1, f"k has q's head size (ne0) {q.ne[0]}, not {k.ne[0]}")
    _want(
        q.ne[2] % k.ne[2] == 0,
        1,
        f"q's {q.ne[2]} heads (ne2) are a multiple of k's, and {k.ne[2]} does not divide them",
    )
    _want(k.ne[3] == q.ne[3], 1, f"ne3 of k is that of q, {q.ne[3]}, not {k.ne[3]}")
    _want(v.ne[1] == k.ne[1], 2, f"v has as many positions (ne1) as k, {k.ne[1]}, not {v.ne[1]}")
    _want(v.ne[2] == k.ne[2], 2, f"v has as many heads (ne2) as k, {k.ne[2]}, not {v.ne[2]}")
    _want(v.ne[3] == q.ne[3], 2, f"ne3 of v is that of q, {q.ne[3]}, not {v.ne[3]}")
    mask = _optional(inputs, 3)
    if mask is not None:
        _want_type(inputs, 3, "the mask of flash_attn_ext", frozenset({"f16"}))
        _want(mask.ne[0] == k.ne[1], 3, f"ne0 of the mask is k's ne1, {k.ne[1]}, not {mask.ne[0]}")
        _want(mask.ne[1] >= q.ne[1], 3, f"ne1 of the mask is at least q's, {q.ne[1]}, not {mask.ne[1]}")
        _mask_repeats(q, mask, 3, "q")
    _max_bias(inputs, 3, params)
    _sinks(inputs, 4, q.ne[2])
    return (v.ne[0], q.ne[2], q.ne[1], q.ne[3]), "f32"


def _glu(op: str, inputs: Inputs, params: Mapping[str, ParamValue]) -> tuple[Dims, str]:
    a = _given(inputs, 0)
    b = _optional(inputs, 1)
    _want_type(inputs, 0, f"src0 of {op}", frozenset({"f32", "f16"}))
    for i, t in ((0, a), (1, b)):
        _want(t is None or _contiguous_but_rows(t), i, f"src{i} of {op} is contiguous but for gaps between rows")
    if b is None:
        return (a.ne[0] // 2, *a.ne[1:]), a.dtype
    _want(
        b.ne == a.ne and b.dtype == a.dtype,
        1,
        f"src1 of {op} is as src0, {_text(a.ne, a.dtype)}, not {_text(b.ne, b.dtype)}",
    )
    return a.ne, a.dtype


_SHAPE_IS_CHOSEN = frozenset({"reshape", "cont"})
"""Ops whose caller chooses the result's shape; the number of elements is kept."""

_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("sqr", "sqrt", "log", "sin", "cos", "norm", "rms_norm", "l2_norm"), _elementwise),
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(GLU, _glu),
    **dict.fromkeys(("add", "sub", "mul", "div"), _binary),
    **dict.fromkeys(("reshape", "cont", "dup"), _same_elements),
    "sum_rows": _sum_rows,
    "scale": _scale,
    "clamp": _clamp,
    "transpose": _transpose,
    "mul_mat": _mul_mat,
    "cpy": _cpy,
    "get_rows": _get_rows,
    "set_rows": _set_rows,
    "soft_max": _soft_max,
    "rope": _rope,
    "flash_attn_ext": _flash_attn_ext,
}
