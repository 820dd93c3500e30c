"""Ops that move and convert elements without other changes: copies, reshapes, transposes.

In a graph, reshape and transpose are views and cost nothing; as kernels they copy the view.
"""

from jax import lax

from kernelgen.emitters import emitter

from .common import result
from .dequantize import floats
from .quantize import stored


@emitter("cont", "dup", "reshape", types="number")
def cont(x, *, out):
    """The elements of `x` in order, contiguous, in the result's shape and type."""
    return result(x, out)


@emitter("transpose", types="number")
def transpose(x, *, out):
    """`x` with ggml's dimensions 0 and 1 swapped: [ne3, ne2, ne0, ne1]."""
    return result(lax.transpose(x, (0, 1, 3, 2)), out)


@emitter("cpy", types=("any, same", "number quantized, number quantizable"))
def cpy(x, dst, *, inputs):
    """The elements of `x`, in order, written to `dst` in its shape and type; in place.

    x, dst: the same number of elements; any type if both have the same, otherwise numbers or quantized.
    """
    if inputs[0].dtype == inputs[1].dtype:
        return lax.reshape(x, dst.shape)
    values = lax.reshape(floats(x, inputs[0]), inputs[1].shape)
    return lax.reshape(stored(values, inputs[1]), dst.shape)
