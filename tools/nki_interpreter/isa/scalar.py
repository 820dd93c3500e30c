"""The scalar engine: activation functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_interpreter import checks
from nki_interpreter.dtypes import bfloat16, float32, is_float
from nki_interpreter.elementwise import UNARY, check_op, op_name
from nki_interpreter.errors import NkiTypeError, NkiValueError
from nki_interpreter.isa.common import (
    ReduceCmd,
    Reduction,
    destination,
    fitted,
    full,
    operand,
    reduced,
    write_reduced,
)
from nki_interpreter.isa.constants import nc_version, needs
from nki_interpreter.lazy import jnp
from nki_interpreter.lower import Context, lowering, to_float
from nki_interpreter.operators import apply_binary, emit, immediate, number
from nki_interpreter.program import Instruction, current
from nki_interpreter.tensors import NkiTensor


@lowering("activation")
def _lower_activation(context: Context, instruction: Instruction) -> None:
    name, steps, reduction = instruction.attributes
    reads = list(instruction.reads)
    source = reads.pop(0)
    value = to_float(context.read(source))
    for op, fixed, swapped in steps:
        other = immediate(fixed) if fixed is not None else full(context.read(reads.pop(0)), None, value)
        value = to_float(apply_binary(op, *((other, value) if swapped else (value, other))))
    value = to_float(UNARY[name](value))
    target, *rest = instruction.writes
    context.write(target, fitted(jnp.broadcast_to(value, source.shape), target))
    if reduction is not None:
        values = [context.read(t) for t in reads]
        write_reduced(context, rest, reduced(reduction, values, value, source))


def activation(
    dst: NkiTensor | None,
    op: Any,
    data: Any,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = ReduceCmd.idle,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> NkiTensor:
    """Computes `op(data · scale + bias)`; scale is a number or one float32 per partition, bias one number per partition.

    The reduction is a sum: AWS's documentation has no other `reduce_op` for it.
    """
    data = checks.on_chip(data, "data")
    name = check_op(op_name(op), UNARY, "activation")
    check = current().check
    if check and reduce_op is not None and op_name(reduce_op) != "add":
        raise NkiValueError(
            "err_unsupported_op",
            f"activation takes nl.add as reduce_op only, not '{op_name(reduce_op)}'; reduce with tensor_reduce afterwards",
        )
    if name == "copy" and isinstance(bias, NkiTensor) and not current().older:
        needs(nc_version.gen3, "activation of nl.copy with a tile as bias, not a number,", "NCC_IBVF043")
    if check and isinstance(bias, NkiTensor) and bias.dtype not in (float32, *_BIAS):
        raise NkiTypeError(
            "err_activation_bias_invalid_type", f"bias is float32, float16 or bfloat16, not {bias.dtype}"
        )
    if check and isinstance(scale, NkiTensor) and scale.dtype != float32:
        raise NkiTypeError("err_activation_scale_invalid_type", f"a scale per partition is float32, not {scale.dtype}")
    steps = []
    reads = []
    for step, value in (("multiply", scale), ("add", bias)):
        if value is None or (not isinstance(value, NkiTensor) and step == "multiply" and value == 1.0):
            continue
        fixed, tensors = operand(value, data, "scale" if step == "multiply" else "bias")
        steps.append((step, None if fixed is None else float(fixed), False))
        reads += tensors
    return _activation(dst, name, data, steps, reads, (reduce_op, reduce_res, reduce_cmd), dtype, mask)


_BIAS = (np.dtype(np.float16), bfloat16)


def _activation(
    dst: NkiTensor | None,
    name: str,
    data: NkiTensor,
    steps: list[Any],
    reads: list[NkiTensor],
    reduce: tuple[Any, NkiTensor | None, Any],
    dtype: Any,
    mask: Any,
) -> NkiTensor:
    op, res, command = reduce
    target = destination(dst, data.shape, dtype or (data.dtype if is_float(data.dtype) else float32), [data], mask)
    reduction = Reduction("scalar", data, command, op, res)
    emit(
        "activation",
        [data.with_mask(mask), *reads, *reduction.reads],
        [target, *reduction.writes],
        (name, tuple(steps), reduction.attributes),
    )
    return target


def activate2(
    dst: NkiTensor,
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
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = ReduceCmd.idle,
) -> NkiTensor:
    """Computes `op((data op0 imm0) op1 imm1)`."""
    if number(relu_param) != 0:
        raise NkiValueError(
            "err_unsupported_op", "activate2 takes 0 as relu_param here: it has no parameterized function"
        )
    data = checks.on_chip(data, "data")
    steps, reads = [], []
    for step, value, swapped in ((op0, imm0, reverse0), (op1, imm1, reverse1)):
        name = "bypass" if step is None else op_name(step)
        if name != "bypass":
            fixed, tensors = operand(value, data, "an immediate")
            steps.append((name, None if fixed is None else float(fixed), bool(swapped)))
            reads += tensors
    name = check_op(op_name(op), UNARY, "activate2")
    return _activation(dst, name, data, steps, reads, (reduce_op, reduce_res, reduce_cmd), None, None)


def exponential(
    dst: NkiTensor,
    src: Any,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: Any = ReduceCmd.idle,
    reduce_init: Any = 0.0,
) -> NkiTensor:
    """Computes `exp(src - max_value)`, and its sum."""
    data = checks.on_chip(src, "src")
    fixed, reads = operand(max_value, data, "max_value")
    reduction = Reduction("vector", data, reduce_cmd, "add", reduce_res, reduce_init)
    target = destination(dst, data.shape, dst.dtype, [data], None)
    steps = (("subtract", None if fixed is None else float(fixed), False),)
    emit(
        "activation",
        [data, *reads, *reduction.reads],
        [target, *reduction.writes],
        ("exp", steps, reduction.attributes),
    )
    return target
