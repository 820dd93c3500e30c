"""The scalar engine: activation functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import bfloat16, float32
from nki_interpreter.elementwise import UNARY, check_op, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import ReduceCmd, Reduction, destination, full, operand, reduced, reduction
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lazy import jnp
from nki_interpreter.lower import Context, lowering, to_float
from nki_interpreter.operators import apply_binary, emit, immediate, number
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor


@lowering("activation")
def _lower_activation(context: Context, instruction: Instruction) -> Any:
    name, steps, reduction = instruction.attributes
    source, *reads = instruction.reads
    value = to_float(context.read(source))
    for op, fixed, swapped in steps:
        other = immediate(fixed) if fixed is not None else full(context.read(reads.pop(0)), None, value)
        value = to_float(apply_binary(op, *((other, value) if swapped else (value, other))))
    value = to_float(UNARY[name](value))
    return jnp.broadcast_to(value, source.shape), *reduced(reduction, [context.read(t) for t in reads], value, source)


_BIAS = (float32, np.dtype(np.float16), bfloat16)


def activation(
    dst: Any,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = ReduceCmd.idle,
) -> None:
    """Computes `op(data · scale + bias)`; scale is a number or one float32 per partition, bias one number per partition.

    The reduction is a sum: AWS's documentation has no other `reduce_op` for it.
    """
    data = checks.on_chip(data, "data")
    name = check_op(op_name(op), UNARY, "activation")
    if reduce_op is not None and op_name(reduce_op) != "add":
        raise NkiValueError(
            "err_unsupported_op",
            f"activation takes nl.add as reduce_op only, not '{op_name(reduce_op)}'; reduce with tensor_reduce afterwards",
        )
    if not current().older and bias is not None and number(bias):
        needs(nc_version.gen3, "a number as bias of activation")
    if not current().older and name == "copy" and isinstance(bias, NkiTensor):
        needs(nc_version.gen3, "activation of nl.copy with a tile as bias, not a number,", "NCC_IBVF043")
    if isinstance(bias, NkiTensor) and bias.dtype not in _BIAS:
        raise NkiTypeError(
            "err_activation_bias_invalid_type", f"bias is float32, float16 or bfloat16, not {bias.dtype}"
        )
    if isinstance(scale, NkiTensor) and scale.dtype != float32:
        raise NkiTypeError("err_activation_scale_invalid_type", f"a scale per partition is float32, not {scale.dtype}")
    steps = [("multiply", scale, False, "scale"), ("add", bias, False, "bias")]
    if not isinstance(scale, NkiTensor) and scale == 1.0:
        del steps[0]
    _emit(dst, name, data, steps, reduction("scalar", data, reduce_cmd, reduce_op, reduce_res))


def _emit(dst: Any, name: str, data: NkiTensor, steps: list[Any], reduction: Reduction) -> None:
    """Emits an activation after steps: (operation, operand, whether the two are swapped, the operand's name); None: nothing."""
    described, tiles = [], [data]
    for op, value, swapped, what in steps:
        if value is not None:
            fixed, reads = operand(value, data, what)
            described.append((op, None if fixed is None else float(fixed), bool(swapped)))
            tiles += reads
    attributes, reads, writes = reduction
    emit("activation", [*tiles, *reads], [destination(dst, data.shape), *writes], (name, tuple(described), attributes))


def activation_reduce(
    dst: Any, op: Any, data: Any, reduce_op: Any, reduce_res: Any, bias: Any = None, scale: Any = 1.0
) -> None:
    activation(dst, op, data, bias, scale, reduce_op, reduce_res, ReduceCmd.reset_reduce)


def reciprocal(dst: Any, data: Any) -> None:
    activation(dst, "reciprocal", data)


def activate2(
    dst: Any,
    op: Any,
    data: Any,
    imm0: Any,
    imm1: Any,
    op0: Any,
    op1: Any,
    relu_param: Any = 0.0,
    reverse0: bool = False,
    reverse1: bool = False,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = ReduceCmd.idle,
) -> None:
    """Computes `op((data op0 imm0) op1 imm1)`."""
    needs(nc_version.gen4, "activate2")
    if number(relu_param) != 0:
        raise NkiValueError(
            "err_unsupported_op", "activate2 takes 0 as relu_param here: it has no parameterized function"
        )
    data = checks.on_chip(data, "data")
    steps = [
        (op_name(step), value, swapped, "an immediate")
        for step, value, swapped in ((op0, imm0, reverse0), (op1, imm1, reverse1))
        if step is not None and op_name(step) != "bypass"
    ]
    name = check_op(op_name(op), UNARY, "activate2")
    _emit(dst, name, data, steps, reduction("scalar", data, reduce_cmd, reduce_op, reduce_res))


def exponential(
    dst: Any,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: Any = None,
    reduce_cmd: Any = ReduceCmd.idle,
    reduce_init: Any = 0.0,
) -> None:
    """Computes `exp(src - max_value)`, and its sum."""
    needs(nc_version.gen4, "exponential")
    data = checks.on_chip(src, "src")
    sums = reduction("vector", data, reduce_cmd, "add", reduce_res, reduce_init)
    _emit(dst, "exp", data, [("subtract", max_value, False, "max_value")], sums)
