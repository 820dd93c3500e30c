"""Softmax as attention uses it: scaled, masked, with ALiBi and sinks."""

import numpy as np
from jax import lax

from kernelgen.emitter import emitter

from .common import add_mask, f32, result


@emitter("soft_max")
def soft_max(x, mask=None, sinks=None, *, scale: float = 1.0, max_bias: float = 0.0, out):
    """The softmax of each row of `scale * x + slope * mask`.

    `max_bias` above 0 gives each head (axis 1) its ALiBi slope. A head's sink takes part in the maximum and in the sum and has no
    result of its own. A row that the mask hides altogether has no defined result.

    x: [B, H, n, n_kv] f32; mask: [M3, M2, n or more, n_kv] f32 or f16, M3 dividing B and M2 dividing H; sinks: [1, 1, 1, H] f32.
    """
    x = f32(x) * np.float32(scale)
    if mask is not None:
        x = add_mask(x, mask, max_bias)
    top = lax.reduce_max(x, (3,))[..., None]
    if sinks is not None:
        sinks = lax.reshape(f32(sinks), (1, x.shape[1], 1, 1))
        top = lax.max(top, lax.broadcast_in_dim(sinks, top.shape, range(4)))
    e = lax.exp(x - top)
    total = lax.reduce_sum(e, (3,))[..., None]
    if sinks is not None:
        total = total + lax.exp(sinks - top)
    return result(e / total, out)
