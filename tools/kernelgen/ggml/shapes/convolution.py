"""Shapes and types of convolutions and im2col."""

from __future__ import annotations

from collections.abc import Mapping

from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.shapes.common import (
    FLOATS,
    ChosenRule,
    Inputs,
    Rule,
    ShapeError,
    at_least,
    given,
    want,
    want_output,
    want_type,
)
from kernelgen.ggml.shapes.common import dims as text_of
from kernelgen.ggml.tensor import Dims, TensorDesc
from kernelgen.ggml.types import TYPES

_F32 = frozenset({"f32"})
_F32_F16 = frozenset({"f32", "f16"})

_AXES = ("W", "H", "D")

Params = Mapping[str, ParamValue]


def _size(image: TensorDesc, kernel: TensorDesc, axis: int, params: Params) -> int:
    """Returns the result's length along one of ggml's dimensions (`ggml_calc_conv_output_size`)."""
    s, p, d = at_least(params, f"s{axis}", 1), at_least(params, f"p{axis}", 0), at_least(params, f"d{axis}", 1)
    room = image.ne[axis] + 2 * p - d * (kernel.ne[axis] - 1) - 1
    # C division truncates: an image that is slightly too small has one position for the kernel, which extends beyond the padding.
    n = (room // s if room >= 0 else -(-room // s)) + 1
    want(n > 0, 1, f"src1 is too small for the kernel along {_AXES[axis]}: {image.ne[axis]} elements, {p} of padding")
    return n


def _operands(op: str, inputs: Inputs) -> tuple[TensorDesc, TensorDesc]:
    """Returns a convolution's kernel and image."""
    want_type(inputs, 0, f"src0 of {op}", _F32_F16)
    want_type(inputs, 1, f"src1 of {op}", _F32)
    return given(inputs, 0), given(inputs, 1)


def _columns(op: str, kernel: TensorDesc, image: TensorDesc, params: Params) -> Dims:
    """Returns the shape of im2col's result for an image of this shape."""
    if not params["is_2D"]:
        want(kernel.ne[1] == image.ne[1], 1, f"ne1 of src1 is that of the kernel, {kernel.ne[1]}, not {image.ne[1]}")
        want(image.ne[3] == 1, 1, f"ne3 of src1 is 1, not {image.ne[3]}")
        return kernel.ne[0] * kernel.ne[1], _size(image, kernel, 0, params), image.ne[2], 1
    want(kernel.ne[2] == image.ne[2], 1, f"ne2 of src1 is that of the kernel, {kernel.ne[2]}, not {image.ne[2]}")
    ow, oh = (_size(image, kernel, axis, params) for axis in (0, 1))
    return kernel.ne[0] * kernel.ne[1] * kernel.ne[2], ow, oh, image.ne[3]


def _want_columns(op: str, output: TensorDesc, ne: Dims) -> None:
    want_output(
        output.ne == ne and output.dtype in _F32_F16,
        f"the result of {op} is {text_of(ne)} of f32 or f16, not {text_of(output.ne)} of {output.dtype}",
    )


def _im2col(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    kernel, image = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 0, "src0 of im2col", FLOATS)
    want_type(inputs, 1, "src1 of im2col", _F32_F16)
    _want_columns(op, output, _columns(op, kernel, image, params))


def _im2col_back(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    gradient, kernel = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 0, "src0 of im2col_back", _F32)
    want_type(inputs, 1, "src1 of im2col_back", _F32_F16)
    want_output(output.dtype == "f32", f"the result of im2col_back is f32, not {output.dtype}")
    axis = 2 if params["is_2D"] else 1
    want_output(
        output.ne[axis] == kernel.ne[axis],
        f"ne{axis} of the result is that of the kernel, {kernel.ne[axis]}, not {output.ne[axis]}",
    )
    ne = _columns(op, kernel, output, params)
    want(
        gradient.ne == ne,
        0,
        f"src0 is im2col's result for the result's shape, {text_of(ne)}, not {text_of(gradient.ne)}",
    )


def _im2col_3d(op: str, inputs: Inputs, output: TensorDesc, params: Params) -> None:
    kernel, image = given(inputs, 0), given(inputs, 1)
    want_type(inputs, 0, "src0 of im2col_3d", FLOATS)
    want_type(inputs, 1, "src1 of im2col_3d", _F32)
    ic = at_least(params, "IC", 1)
    want(image.ne[3] >= ic, 1, f"ne3 of src1 is at least IC, {ic}, not {image.ne[3]}")
    ow, oh, od = (_size(image, kernel, axis, params) for axis in range(3))
    elements = kernel.ne[0] * kernel.ne[1] * kernel.ne[2] * ic
    _want_columns(op, output, (elements, ow, oh, od * (image.ne[3] // ic)))


def _col2im_1d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    a = given(inputs, 0)
    want_type(inputs, 0, "src0 of col2im_1d", FLOATS)
    want(a.ne[2:] == (1, 1), 0, f"src0 of col2im_1d is a matrix, not {text_of(a.ne)}")
    want(a.contiguous, 0, "src0 of col2im_1d is contiguous: leave its strides out")
    s, oc, p = at_least(params, "s0", 1), at_least(params, "oc", 1), at_least(params, "p0", 0)
    want(a.ne[0] % oc == 0, 0, f"ne0 of src0 is a multiple of oc = {oc}, not {a.ne[0]}")
    n = (a.ne[1] - 1) * s + a.ne[0] // oc - 2 * p
    want(n > 0, 0, f"nothing is left of {n + 2 * p} elements when {p} are cut off at each end")
    return (n, oc, 1, 1), a.dtype


def _conv_2d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    kernel, image = _operands(op, inputs)
    want(kernel.ne[2] == image.ne[2], 1, f"ne2 of src1 is that of the kernel, {kernel.ne[2]}, not {image.ne[2]}")
    ow, oh = (_size(image, kernel, axis, params) for axis in (0, 1))
    return (ow, oh, kernel.ne[3], image.ne[3]), image.dtype


def _conv_2d_dw(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    kernel, image = _operands(op, inputs)
    want(kernel.ne[2] == 1, 0, f"ne2 of the kernel is 1, not {kernel.ne[2]}")
    want(kernel.ne[3] == image.ne[2], 1, f"ne2 of src1 is ne3 of the kernel, {kernel.ne[3]}, not {image.ne[2]}")
    ow, oh = (_size(image, kernel, axis, params) for axis in (0, 1))
    return (ow, oh, image.ne[2], image.ne[3]), image.dtype


def _conv_3d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    kernel, image = _operands(op, inputs)
    c, n, oc = (at_least(params, name, 1) for name in ("c", "n", "oc"))
    want(kernel.ne[3] == c * oc, 0, f"ne3 of the kernel is c * oc, {c * oc}, not {kernel.ne[3]}")
    want(image.ne[3] == c * n, 1, f"ne3 of src1 is c * n, {c * n}, not {image.ne[3]}")
    ow, oh, od = (_size(image, kernel, axis, params) for axis in range(3))
    return (ow, oh, od, oc * n), "f32"


def _conv_transpose_1d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    kernel, image = _operands(op, inputs)
    want(image.ne[2:] == (1, 1), 1, f"src1 of conv_transpose_1d is a matrix, not {text_of(image.ne)}")
    want(kernel.ne[2] == image.ne[1], 1, f"ne1 of src1 is ne2 of the kernel, {kernel.ne[2]}, not {image.ne[1]}")
    want(kernel.ne[3] == 1, 0, f"ne3 of the kernel is 1, not {kernel.ne[3]}")
    for name, only in (("p0", 0), ("d0", 1)):
        if params[name] != only:
            raise ShapeError("params", name, f"ggml supports only {name} = {only}, not {params[name]}")
    return ((image.ne[0] - 1) * at_least(params, "s0", 1) + kernel.ne[0], kernel.ne[1], 1, 1), "f32"


def _conv_transpose_2d(op: str, inputs: Inputs, params: Params) -> tuple[Dims, str]:
    kernel, image = _operands(op, inputs)
    want(kernel.ne[3] == image.ne[2], 1, f"ne2 of src1 is ne3 of the kernel, {kernel.ne[3]}, not {image.ne[2]}")
    s = at_least(params, "stride", 1)
    ow, oh = ((image.ne[i] - 1) * s + kernel.ne[i] for i in (0, 1))
    return (ow, oh, kernel.ne[2], image.ne[3]), "f32"


RULES: Mapping[str, Rule] = {
    "col2im_1d": _col2im_1d,
    "conv_2d": _conv_2d,
    "conv_2d_dw": _conv_2d_dw,
    "conv_3d": _conv_3d,
    "conv_transpose_1d": _conv_transpose_1d,
    "conv_transpose_2d": _conv_transpose_2d,
}

CHOSEN: Mapping[str, ChosenRule] = {
    "im2col": _im2col,
    "im2col_back": _im2col_back,
    "im2col_3d": _im2col_3d,
}


def channels_last(t: TensorDesc) -> TensorDesc:
    """Returns `t` with the channels of each position adjacent, as ggml's conv_2d_dw returns it if src1 is."""
    unit = TYPES[t.dtype].size
    row = t.ne[2] * unit
    return TensorDesc.make(t.ne, t.dtype, (row, t.ne[0] * row, unit, t.ne[0] * t.ne[1] * row))
