"""Modules for which others published what neuronx-cc and the runtime did: instruction counts, refusals, and loads.

A module here has the published module's products, gathers and elementwise work, not its bytes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import nn
from toys import raw

BF16, FP8 = "bfloat16", "float8_e5m2"


def product(rows: int, inner: int, columns: int) -> bytes:
    """Returns [rows, inner] times [inner, columns] in float16."""
    return raw(lambda x, y: x @ y, ((rows, inner), "float16"), ((inner, columns), "float16"))


def gathered_experts(units: int, tokens: int = 32, used: int = 4, experts: int = 128, width: int = 2880) -> bytes:
    """Returns a layer of gpt-oss-120b in FP8 that gathers its experts, with `units` each, for each pair of token and expert."""

    def layer(x: Any, index: Any, up: Any, up_scale: Any, down: Any, down_scale: Any) -> Any:
        def weights(values: Any, scale: Any) -> Any:
            return values[index].astype(jnp.bfloat16) * scale[index][:, None, None]

        x = jnp.repeat(x, used, axis=0)
        both = jnp.einsum("pk,pnk->pn", x, weights(up, up_scale))
        gate, linear = both[:, :units], both[:, units:]
        return jnp.einsum("pk,pnk->pn", nn.silu(gate) * linear, weights(down, down_scale))

    return raw(
        layer,
        ((tokens, width), BF16),
        ((tokens * used,), "int32"),
        ((experts, 2 * units, width), FP8),
        ((experts,), BF16),
        ((experts, width, units), FP8),
        ((experts,), BF16),
    )
