"""Computations of several devices. Each device runs the same program on tensors of its own."""

from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from kernelgen.emitters import emitter

_all_reduce = Primitive("all_reduce")
"""A sum over devices that requires only their number. JAX's own sums require the devices when they are lowered."""


@_all_reduce.def_abstract_eval
def _(x: Any, *, n_devices: int) -> Any:
    return x


def _lower(context: Any, x: Any, *, n_devices: int) -> Any:
    groups = ir.DenseIntElementsAttr.get(np.arange(n_devices, dtype=np.int64).reshape(1, n_devices))
    op = stablehlo.AllReduceOp([x.type], [x], groups, channel_handle=stablehlo.ChannelHandle.get(1, 0))
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(x.type).element_type)
    body = op.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return op.results


mlir.register_lowering(_all_reduce, _lower)


@emitter("all_reduce", types="f32")
def all_reduce(x, *, n_devices: int):
    """The sum of `x` over `n_devices` devices, on each of them, in the shape of `x`."""
    return _all_reduce.bind(x, n_devices=n_devices)
