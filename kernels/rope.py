"""Rotary position embedding with YaRN scaling, and its gradient: plain, NEOX, and the multi-dimensional modes of vision models."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.emitters import emitter

from .common import Unsupported, f32, result

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40


@emitter("rope", "rope_back", types="f32 f16, i32, f32")
def rope(
    x,
    pos,
    freq_factors=None,
    *,
    n_dims: int,
    mode: int = 0,
    n_ctx_orig: int = 0,
    freq_base: float = 10000.0,
    freq_scale: float = 1.0,
    ext_factor: float = 0.0,
    attn_factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    section0: int = 0,
    section1: int = 0,
    section2: int = 0,
    section3: int = 0,
    n_offs: int = 0,
    op,
    out,
):
    """Rotates pairs of channels by angles that grow with the position; channels outside of [n_offs, n_offs + n_dims) are copied.

    Pair i is (2i, 2i + 1) in mode 0 and (i, i + n_dims / 2) otherwise; the vision mode rotates all of ne0 = 2 n_dims. The angle is
    position * freq_base^(-2i / n_dims) / freq_factors[i], stretched by `freq_scale` and YaRN's `ext_factor`. `rope_back` rotates by
    the opposite angle: it turns the gradient of the result into the gradient of the input.

    x: [ne3, n_tokens, n_heads, ne0] f32 or f16; pos: [1, 1, 1, n_tokens] i32, four times as long in the multi-dimensional modes;
    freq_factors: [1, 1, 1, n_dims / 2 or more] f32.
    """
    n_tokens, ne0 = x.shape[1], x.shape[3]
    refuse(x, pos, n_dims, mode, n_offs)
    pairs = (ne0 if mode == VISION else n_dims) // 2
    frequencies = _frequencies(n_dims, pairs, mode, freq_base, (section0, section1, section2, section3))
    # Each pair reads one of the position's components; the others have frequency 0 and add nothing.
    components = lax.reshape(f32(pos), (len(frequencies), n_tokens, 1))
    theta = sum(components[c] * f[None, :] for c, f in enumerate(frequencies))  # [n_tokens, pairs]
    if freq_factors is not None:
        theta = theta / lax.slice_in_dim(f32(freq_factors)[0, 0], 0, pairs, axis=1)
    magnitude = np.float32(attn_factor)
    stretched = theta * np.float32(freq_scale)
    if ext_factor:
        mix = _yarn_ramp(n_dims, pairs, n_ctx_orig, freq_base, beta_fast, beta_slow) * np.float32(ext_factor)
        theta = stretched * (np.float32(1) - mix) + theta * mix
        magnitude *= np.float32(1) + np.float32(0.1) * np.log(np.float32(1) / np.float32(freq_scale))
    else:
        theta = stretched
    cos, sin = (lax.reshape(f(theta) * magnitude, (1, n_tokens, 1, pairs)) for f in (lax.cos, lax.sin))
    if op == "rope_back":
        sin = -sin

    before, part, after = (lax.slice_in_dim(x, *ends, axis=3) for ends in _split(n_offs, 2 * pairs, ne0))
    part = _rotate(f32(part), cos, sin, adjacent=mode == NORMAL)
    return result(jnp.concatenate([f32(before), part, f32(after)], axis=3), out)


def refuse(x: Array, pos: Array, n_dims: int, mode: int, n_offs: int) -> None:
    """Raises `Unsupported` if the mode is unknown, or the channels or positions do not fit the tensors."""
    n_tokens, ne0 = x.shape[1], x.shape[3]
    if mode not in (NORMAL, NEOX, MROPE, VISION, IMROPE):
        raise Unsupported(f"rope has no mode {mode}; 0, 2, 8, 24 and 40 are known")
    if n_dims < 2 or n_dims % 2 or n_offs % 2 or n_offs + n_dims > ne0:
        raise Unsupported(f"{n_dims} channels from {n_offs} can't be rotated in rows of {ne0}")
    if mode == VISION and (n_dims * 2 != ne0 or n_offs):
        raise Unsupported(f"in vision mode n_dims is half of the row, {ne0 // 2}, not {n_dims}")
    multi = mode in (MROPE, VISION, IMROPE)
    if pos.shape[3] != n_tokens * (4 if multi else 1):
        raise Unsupported(f"{pos.shape[3]} positions for {n_tokens} tokens in mode {mode}")


def _split(start: int, length: int, total: int) -> tuple[tuple[int, int], ...]:
    return (0, start), (start, start + length), (start + length, total)


def _rotate(x: Array, cos: Array, sin: Array, *, adjacent: bool) -> Array:
    """Returns pairs of channels of `x` rotated; x: [ne3, n, h, 2 * pairs], cos and sin: [1, n, 1, pairs]."""
    *rows, channels = x.shape
    shape = (*rows, channels // 2, 2) if adjacent else (*rows, 2, channels // 2)
    axis = 4 if adjacent else 3
    split = lax.reshape(x, shape)
    x0, x1 = lax.index_in_dim(split, 0, axis, keepdims=False), lax.index_in_dim(split, 1, axis, keepdims=False)
    rotated = [x0 * cos - x1 * sin, x0 * sin + x1 * cos]
    return lax.reshape(jnp.concatenate([lax.expand_dims(r, (axis,)) for r in rotated], axis=axis), x.shape)


def _frequencies(n_dims: int, pairs: int, mode: int, base: float, sections: tuple[int, ...]) -> np.ndarray:
    """Returns the angle of each pair at position 1, per component of the position: [components, pairs] f32, 0 where unused.

    ggml multiplies by base^(-2 / n_dims) from pair to pair in float32. At large positions the accumulated rounding is visible, so
    this function takes the same steps.
    """
    step = np.float32(base ** (-2.0 / n_dims))
    if mode in (NORMAL, NEOX):
        table = np.empty((1, pairs), np.float32)
        value = np.float32(1)
        for i in range(pairs):
            table[0, i] = value
            value = value * step
        return table
    total = sum(sections)
    if total <= 0 or total > 2 * pairs or min(sections) < 0:
        raise Unsupported(f"sections {sections} do not share out {pairs} pairs")
    ends = [sum(sections[: c + 1]) for c in range(4)]
    table = np.zeros((4, pairs), np.float32)
    values = [np.float32(1)] * 4
    for i in range(pairs):
        sector = i % total
        if mode == VISION:  # each section starts its own sequence
            for c in range(4):
                if sector == (0, *ends)[c]:
                    values[c] = np.float32(1)
        if mode == IMROPE:  # time, height and width take turns
            c = sector % 3 if sector < 3 * sections[sector % 3] else 3
        else:
            c = next((c for c in range(3) if sector < ends[c]), 3)
        table[c, i] = values[c]
        values = [v * step for v in values]
    return table


def _yarn_ramp(n_dims: int, pairs: int, n_ctx_orig: int, base: float, fast: float, slow: float) -> np.ndarray:
    """Returns the share of each pair's own frequency, from 1 (its own) to 0 (the stretched one), [pairs] f32.

    Source: YaRN, arXiv:2309.00071, section 3.2. Without an original context, all but the first pair are stretched, as in ggml,
        where
    this results from the logarithm of 0.
    """
    if n_ctx_orig <= 0:
        return (np.arange(pairs) == 0).astype(np.float32)

    def dim(rotations: float) -> np.float32:
        return (
            np.float32(n_dims)
            * np.log(np.float32(n_ctx_orig / (rotations * 2 * np.float32(math.pi))))
            / np.float32(2 * math.log(base))
        )

    low = max(0.0, math.floor(dim(fast)))
    high = min(n_dims - 1.0, math.ceil(dim(slow)))
    y = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(max(0.001, high - low))
    return (1 - np.clip(y, 0, 1)).astype(np.float32)
