"""Softmax of attention: scaled, masked, with ALiBi and sinks; its gradient, and the older ops that mask a triangle."""

import numpy as np
from jax import lax

from kernelgen.emitters import emitter

from .common import add_mask, f32, per_head, per_row, result


@emitter("soft_max", types="f32, f32 f16, f32")
def soft_max(x, mask=None, sinks=None, *, scale: float = 1.0, max_bias: float = 0.0, out):
    """The softmax of each row of `scale * x + slope * mask`.

    `max_bias` above 0 gives each head (axis 1) its ALiBi slope. A head's sink is part of the maximum and of the sum, and has no
    result of its own. The result of a row that the mask hides completely is undefined.

    x: [B, H, n, n_kv] f32; mask: [M3, M2, n or more, n_kv] f32 or f16, M3 dividing B and M2 dividing H; sinks: [1, 1, 1, H] f32.
    """
    x = f32(x) * np.float32(scale)
    if mask is not None:
        x = add_mask(x, mask, max_bias)
    top = lax.reduce_max(x, (3,))
    if sinks is not None:
        sinks = per_head(sinks, x)
        top = lax.max(top, sinks)
    e = lax.exp(x - per_row(top, x))
    total = lax.reduce_sum(e, (3,))
    if sinks is not None:
        total = total + lax.exp(sinks - top)
    return result(e / per_row(total, e), out)


@emitter("soft_max_back", types="f32, f32")
def soft_max_back(grad, y, *, scale: float = 1.0, max_bias: float = 0.0, out):
    """The gradient of `soft_max` with respect to its input: `scale * y * (grad - sum(grad * y))` in each row.

    It does not depend on the mask and on `max_bias`, which weights the mask: the mask is a constant that `y` includes.

    grad, y: [ne3, ne2, ne1, ne0] f32; y is the result of `soft_max`.
    """
    total = lax.reduce_sum(grad * y, (3,))
    return result((grad - per_row(total, grad)) * y * np.float32(scale), out)


@emitter("diag_mask_inf", "diag_mask_zero", types="f32")
def diag_mask(x, *, n_past: int = 0, op, out):
    """`x` with -inf or 0 right of the diagonal that begins at column `n_past`: a token attends to itself and earlier tokens.

    x: [ne3, ne2, n, n_kv] f32.
    """
    row, column = (lax.broadcasted_iota(np.int32, x.shape, axis) for axis in (2, 3))
    masked = lax.full_like(x, -np.inf if op == "diag_mask_inf" else 0)
    return result(lax.select(column > row + np.int32(n_past), masked, x), out)
