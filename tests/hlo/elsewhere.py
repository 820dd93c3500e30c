"""Modules for which others published what neuronx-cc and the runtime did: instruction counts, refusals, and loads.

A module here has the published module's products, gathers and elementwise work, not its bytes.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax, nn
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


def video_decoder(frames: int, height: int = 60, width: int = 104) -> bytes:
    """Returns Wan 2.1's decoder of latent frames, one frame at a time with the two before it: 3 by 3 by 3 convolutions
    of 384 to 96 channels, norms and SiLU. It doubles height and width three times, and time twice after the first
    frame.
    """

    def convolution(x: Any, outer: int, taps: tuple[int, int, int]) -> Any:
        kernel = jnp.zeros((*taps, x.shape[-1], outer), x.dtype)
        padding = [(taps[0] - 1, 0), (taps[1] // 2,) * 2, (taps[2] // 2,) * 2]
        return lax.conv_general_dilated(x, kernel, (1, 1, 1), padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC"))

    def norm(x: Any) -> Any:
        return nn.silu(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6))

    def block(x: Any, outer: int) -> Any:
        y = convolution(norm(convolution(norm(x), outer, (3, 3, 3))), outer, (3, 3, 3))
        return y + (x if x.shape[-1] == outer else convolution(x, outer, (1, 1, 1)))

    def doubled(x: Any, times: int) -> Any:
        if times == 2:
            y = convolution(x, 2 * x.shape[-1], (3, 1, 1))
            x = jnp.concatenate([y[..., : x.shape[-1]], y[..., x.shape[-1] :]], axis=1)
        x = jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)
        return convolution(x, x.shape[-1] // 2, (1, 3, 3))

    def decode(x: Any) -> Any:
        made = []
        for n in range(frames):
            y = convolution(x[:, n : n + 1], 384, (3, 3, 3))
            y = block(block(y, 384), 384)
            for channels, times in ((384, 2), (384, 2), (192, 1), (96, 0)):
                for _ in range(3):
                    y = block(y, channels)
                if times:
                    y = doubled(y, times if n else 1)
            made.append(convolution(norm(y), 3, (3, 3, 3)))
        return jnp.concatenate(made, axis=1)

    return raw(decode, ((1, frames, height, width, 16), BF16))
