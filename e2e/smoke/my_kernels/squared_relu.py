"""An op that ggml does not have: relu(x)² · scale."""

import jax.numpy as jnp

from kernelgen.emitters import emitter


@emitter("squared_relu")
def squared_relu(x, *, scale: float = 1.0):
    return jnp.square(jnp.maximum(x, 0)) * jnp.float32(scale)
