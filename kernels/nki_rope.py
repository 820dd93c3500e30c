"""Rotary position embedding in NKI. Tokens lie on partitions; the kernel computes a token's angles once for all heads."""

import math

import nki.isa as nisa
import nki.language as nl
import numpy as np
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.languages.nki import inline

from .common import DTYPES, f32, result
from .nki_common import PARTITIONS, blocks, hbm, loaded, sbuf
from .rope import IMROPE, MROPE, NORMAL, VISION, _frequencies, _yarn_ramp, refuse

CHANNELS = 4096
"""Channels of a token that one step rotates."""

# 2 pi in three parts (Cody and Waite). The first two have few bits, so their products with small integers are exact.
TURN = (np.float32(6.28125), np.float32(1.93500518798828125e-3), np.float32(3.0199159819e-7))


@nki.jit
def _rope(x, positions, tables, factors, settings, dtype):
    """Rotates pairs of channels.

    x: [ne3, n_tokens, n_heads, ne0]; positions: [components, n_tokens, 1] i32; tables: [components (+ 1 with YaRN), pairs] f32:
    each pair's angle at position 1 by component, and the share of its own frequency that it keeps; factors: [1, pairs] f32 or None.
    """
    outer, n_tokens, n_heads, ne0 = x.shape
    y = hbm(x.shape, dtype)
    at_once = max(1, CHANNELS // ne0)
    for i in nl.affine_range(outer):
        for start, p in blocks(n_tokens, PARTITIONS):
            cos, sin = _turns(_angles(positions, tables, factors, start, p, settings), settings)
            for head, count in blocks(n_heads, at_once):
                part = loaded(x[i, start : start + p, head : head + count], nl.float32)
                done = sbuf((p, count, ne0), dtype)
                _rotate(done, part, cos, sin, settings)
                nisa.dma_copy(dst=y[i, start : start + p, head : head + count], src=done)
    return y


def _angles(positions, tables, factors, start, p, settings):
    """Returns the angle of each pair of p tokens: [p, pairs] f32."""
    pairs = tables.shape[1]
    theta = sbuf((p, pairs))
    for c in range(positions.shape[0]):
        position = loaded(positions[c, start : start + p], nl.float32)
        term = loaded(tables[c : c + 1].broadcast_to((p, pairs)))
        nisa.tensor_scalar(term, term, nl.multiply, position)
        if c == 0:
            theta = term
        else:
            nisa.tensor_tensor(theta, theta, term, nl.add)
    if factors is not None:
        nisa.tensor_tensor(theta, theta, loaded(factors.broadcast_to((p, pairs))), nl.divide)
    if not settings["ext_factor"]:
        nisa.tensor_scalar(theta, theta, nl.multiply, settings["freq_scale"])
        return theta
    # YaRN: scale * (1 - mix) * theta + mix * theta.
    mix = loaded(tables[positions.shape[0] : positions.shape[0] + 1].broadcast_to((p, pairs)))
    kept, stretched = sbuf((p, pairs)), sbuf((p, pairs))
    nisa.tensor_tensor(kept, theta, mix, nl.multiply)
    nisa.tensor_scalar(mix, mix, nl.multiply, -1.0, op1=nl.add, operand1=1.0)
    nisa.scalar_tensor_tensor(stretched, theta, nl.multiply, settings["freq_scale"], nl.multiply, mix)
    nisa.tensor_tensor(theta, stretched, kept, nl.add)
    return theta


def _turns(theta, settings):
    """Returns cosine and sine of the angles, times the magnitude.

    The scalar engine's sine accepts only angles from -pi to pi, so the function first subtracts whole turns.
    """
    found = []
    for shift, sign in ((math.pi / 2, 1.0), (0.0, settings["direction"])):
        turns, whole = sbuf(theta.shape, nl.int32), sbuf(theta.shape)
        # The number of whole turns: a conversion to an integer rounds to the nearest.
        nisa.tensor_scalar(turns, theta, nl.add, shift, op1=nl.multiply, operand1=1 / (2 * math.pi))
        nisa.tensor_copy(dst=whole, src=turns)
        left = theta
        for part in TURN:
            less = sbuf(theta.shape)
            nisa.scalar_tensor_tensor(less, whole, nl.multiply, -float(part), nl.add, left)
            left = less
        angle = sbuf(theta.shape)
        nisa.tensor_scalar(angle, left, nl.add, shift)
        nisa.activation(angle, nl.sin, angle)
        nisa.tensor_scalar(angle, angle, nl.multiply, sign * settings["magnitude"])
        found.append(angle)
    return found


def _rotate(done, part, cos, sin, settings):
    """Writes the rotated channels of [p, heads, ne0], and copies the channels outside the rotated range."""
    _p, heads, ne0 = part.shape
    pairs, first = cos.shape[1], settings["n_offs"]
    end = first + 2 * pairs
    if settings["adjacent"]:
        one, other = slice(first, end, 2), slice(first + 1, end, 2)
    else:
        one, other = slice(first, first + pairs), slice(first + pairs, end)
    cos, sin = (t.expand_dim(1).broadcast(1, heads) for t in (cos, sin))
    x0, x1 = part[:, :, one], part[:, :, other]
    for target, left, right, op in ((one, cos, sin, nl.subtract), (other, sin, cos, nl.add)):
        a, b = sbuf(x0.shape), sbuf(x0.shape)
        nisa.tensor_tensor(a, x0, left, nl.multiply)
        nisa.tensor_tensor(b, x1, right, nl.multiply)
        nisa.tensor_tensor(done[:, :, target], a, b, op)
    for low, high in ((0, first), (end, ne0)):
        if low < high:
            nisa.tensor_copy(dst=done[:, :, low:high], src=part[:, :, low:high])


@emitter(
    "rope",
    "rope_back",
    types="f32 f16, i32, f32",
    language="nki",
    where=("x_ne0 <= 4096", "n_dims <= x_ne0 - n_offs", "n_dims % 2 == 0", "n_offs % 2 == 0"),
)
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
    """Rotates pairs of channels by angles that grow with the position; see the JAX emitter (`rope`).

    x: [ne3, n_tokens, n_heads, ne0] f32 or f16; pos: [1, 1, 1, n_tokens] i32, four times as long in the multi-dimensional modes;
    freq_factors: [1, 1, 1, n_dims / 2 or more] f32.
    """
    refuse(x, pos, n_dims, mode, n_offs)
    n_tokens, ne0 = x.shape[1], x.shape[3]
    pairs = (ne0 if mode == VISION else n_dims) // 2
    tables = [_frequencies(n_dims, pairs, mode, freq_base, (section0, section1, section2, section3))]
    components = 4 if mode in (MROPE, VISION, IMROPE) else 1
    magnitude = np.float32(attn_factor)
    if ext_factor:
        mix = _yarn_ramp(n_dims, pairs, n_ctx_orig, freq_base, beta_fast, beta_slow) * np.float32(ext_factor)
        tables.append(mix[None, :].astype(np.float32))
        magnitude *= np.float32(1) + np.float32(0.1) * np.log(np.float32(1) / np.float32(freq_scale))
    settings = {
        "adjacent": mode == NORMAL,
        "direction": -1.0 if op == "rope_back" else 1.0,
        "ext_factor": ext_factor,
        "freq_scale": freq_scale,
        "magnitude": float(magnitude),
        "n_offs": n_offs,
    }
    factors = None if freq_factors is None else lax.slice_in_dim(f32(freq_factors)[0, 0], 0, pairs, axis=1)
    positions = lax.reshape(pos, (components, n_tokens, 1))
    values = inline(_rope, x, positions, np.concatenate(tables), factors, settings=settings, dtype=DTYPES[out.dtype])
    return result(values[0], out)
