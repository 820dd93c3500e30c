"""Softmax as attention uses it: scaled, masked, with ALiBi and sinks."""

import numpy as np
from jax import lax

from kernelgen.emitter import emitter

from .common import add_mask, f32, per_head, per_row, result


@emitter("soft_max", types="f32, f32 f16, f32")
def soft_max(x, mask=None, sinks=None, *, scale: float = 1.0, max_bias: float = 0.0, out):
    """The softmax of each row of `scale * x + slope * mask`.

    `max_bias` above 0 gives each head (axis 1) its ALiBi slope. A head's sink takes part in the maximum and in the sum and has no
    result of its own. A row that the mask hides altogether has no defined result.

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
