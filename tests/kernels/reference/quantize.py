"""Quantization as in ggml's `quantize_row_*_ref`, for types that the gguf package does not write or writes differently.

Transcribes ggml-quants.c in float32, one operation at a time; only a tensor's rows are computed in parallel.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
F = np.float32

IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F)
EPS = F(1e-15)


def nearest(x: Array, low: float, high: float) -> Array:
    return np.clip(np.rint(x), low, high).astype(F)


def total(terms: Array) -> Array:
    """Returns the sums over the last axis, added from the first element to the last as a loop does."""
    y = np.zeros(terms.shape[:-1], F)
    for i in range(terms.shape[-1]):
        y = y + terms[..., i]
    return y


def ratio(a: Array, b: Array) -> Array:
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape, F), where=b != 0)


def extreme(x: Array) -> Array:
    """Returns the first element of the largest magnitude."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], -1)[..., 0]


def half(x: Array) -> Array:
    return x.astype(np.float16).astype(F)


def half_bytes(x: Array) -> Array:
    return np.ascontiguousarray(x[..., None].astype(np.float16)).view(np.uint8)


def pack(q: Array, bits: int, width: int) -> Array:
    """Packs numbers into runs of `width` bytes; each run holds 8 / bits runs of numbers in its bits, lowest first."""
    count = 8 // bits
    runs = q.astype(np.uint8).reshape(*q.shape[:-1], -1, count, width)
    y = np.zeros((*runs.shape[:-2], width), np.uint8)
    for i in range(count):
        y |= runs[..., i, :] << np.uint8(bits * i)
    return y.reshape(*q.shape[:-1], -1)


def q8_0(x: Array) -> Array:
    """Rounds as ggml's vector code does; its scalar code and gguf round ties away from zero."""
    top = np.abs(x).max(axis=-1)
    quants = np.rint(x * ratio(F(127), top)[..., None]).astype(np.int8)
    return np.concatenate([half_bytes(top / F(127)), quants.view(np.uint8)], axis=-1)


def q1_0(x: Array) -> Array:
    return np.concatenate([half_bytes(total(np.abs(x)) / F(128)), pack(x >= 0, 1, 1)], axis=-1)


def q2_0(x: Array) -> Array:
    d = np.abs(x).max(axis=-1)
    rounded = gguf.quants.np_roundf(x * ratio(F(1), d)[..., None])
    return np.concatenate([half_bytes(d), pack(np.clip(rounded + 1, 0, 3), 2, 1)], axis=-1)


def nvfp4(x: Array) -> Array:
    xb = x.reshape(*x.shape[:-1], 4, 16)
    scale = gguf.quants.NVFP4.fp32_to_ue4m3(np.abs(xb).max(axis=-1) / F(6))
    d = gguf.quants.NVFP4.ue4m3_to_fp32(scale).astype(F)
    values = np.array(gguf.quants.NVFP4.kvalues, F)
    index = np.abs(values * d[..., None, None] - xb[..., None]).argmin(axis=-1)
    return np.concatenate([scale, pack(index.reshape(x.shape), 4, 8)], axis=-1)


def best_index(x: Array) -> Array:
    """Returns `best_index_int8` for the values of IQ4_NL."""
    upper = np.clip(np.searchsorted(IQ4_NL, x, side="right"), 1, 15)
    return np.where(x - IQ4_NL[upper - 1] < IQ4_NL[upper] - x, upper - 1, upper)


def iq4_nl(x: Array) -> Array:
    index = best_index(x * ratio(F(1), extreme(x) / IQ4_NL[0])[..., None])
    q, w = IQ4_NL[index].astype(np.float64), x.astype(np.float64) ** 2
    d = (w * q * x).sum(axis=-1) / (w * q * q).sum(axis=-1)
    return np.concatenate([half_bytes(d), pack(index, 4, 16)], axis=-1)


def best_scale(sums: list[tuple[Array, Array]]) -> Array:
    """Returns the scale of the best try; a later try must be better than all before it."""
    over, under = sums[0]
    scale, best = over / under, over / under * over
    for over, under in sums[1:]:
        better = (under > 0) & (over * over > best * under)
        scale, best = np.where(better, over / under, scale), np.where(better, over / under * over, best)
    return scale


def iq4_xs(x: Array) -> Array:
    xb = x.reshape(*x.shape[:-1], 8, 32)
    w = xb * xb
    top = extreme(xb)
    tries = [F(1) / (-top / IQ4_NL[0]), *((F(k) + IQ4_NL[0]) / top for k in range(-7, 8))]
    rounded = [IQ4_NL[best_index(factor[..., None] * xb)] for factor in tries]
    d = best_scale([(total(w * q * xb), total(w * q * q)) for q in rounded])
    scale = -extreme(d) / F(32)
    rounded = nearest(ratio(F(1), scale)[..., None] * d, -32, 31)
    index = best_index(ratio(F(1), scale[..., None] * rounded)[..., None] * xb).reshape(x.shape)
    scales = (rounded + 32).astype(np.uint8)
    return np.concatenate(
        [half_bytes(scale), pack(scales >> 4, 2, 1), pack(scales & 15, 4, 1), pack(index, 4, 16)], axis=-1
    )


def line(x: Array, w: Array, nmax: int, rmin: float, nstep: int, mad: bool) -> tuple[Array, Array]:
    """Returns the result of `make_qkx2_quants`: (scale, negated minimum)."""
    low, high = np.minimum(x.min(axis=-1), 0), x.max(axis=-1)
    sum_w, sum_x = total(w), total(w * x)

    def error(scale: Array, low: Array, q: Array) -> Array:
        diff = scale[..., None] * q + low[..., None] - x
        return total(w * (np.abs(diff) if mad else diff * diff))

    def numbers(factor: Array) -> Array:
        return nearest(factor[..., None] * (x - low[..., None]), 0, nmax)

    iscale = F(nmax) / (high - low)
    scale = F(1) / iscale
    best = error(scale, low, numbers(iscale))
    for i in range(nstep + 1):
        q = numbers((F(rmin) + F(0.1) * F(i) + F(nmax)) / (high - low))
        sum_l, sum_l2, sum_xl = total(w * q), total(w * q * q), total(w * q * x)
        det = sum_w * sum_l2 - sum_l * sum_l
        new_scale = ratio(sum_w * sum_xl - sum_x * sum_l, det)
        new_low = ratio(sum_l2 * sum_x - sum_l * sum_xl, det)
        new_scale = np.where(new_low > 0, ratio(sum_xl, sum_l2), new_scale)
        new_low = np.minimum(new_low, 0)
        now = error(new_scale, new_low, q)
        better = (det > 0) & (now < best)
        best, scale, low = (np.where(better, a, b) for a, b in ((now, best), (new_scale, scale), (new_low, low)))
    return scale, -low


def levels(values: Array, top: int) -> tuple[Array, Array]:
    """Returns scales or minima as numbers up to `top`, and the value of a number's unit before it is rounded to f16."""
    largest = values.max(axis=-1)
    return nearest(ratio(F(top), largest)[..., None] * values, 0, top), largest / F(top)


def fit(xb: Array, d: Array, low: int, high: int, minimum: Array | None = None) -> Array:
    shifted = xb if minimum is None else xb + minimum[..., None]
    return nearest(ratio(shifted, np.broadcast_to(d[..., None], xb.shape)), low, high).reshape(*xb.shape[:-2], -1)


def q2_k(x: Array) -> Array:
    xb = x.reshape(*x.shape[:-1], 16, 16)
    scales, minima = line(xb, np.abs(xb), 3, -0.5, 15, True)
    (s, d), (m, dmin) = levels(scales, 15), levels(minima, 15)
    q = fit(xb, half(d)[..., None] * s, 0, 3, half(dmin)[..., None] * m)
    bytes_ = (s + 16 * m).astype(np.uint8)
    return np.concatenate([bytes_, pack(q, 2, 32), half_bytes(d), half_bytes(dmin)], axis=-1)


def q3_k(x: Array) -> Array:
    xb = x.reshape(*x.shape[:-1], 16, 16)
    w = xb * xb
    q = nearest(F(-4) / extreme(xb)[..., None] * xb, -4, 3)
    over, under = total(w * xb * q), total(w * q * q)
    for _ in range(5):
        for i in range(16):
            wi, xi, qi = w[..., i], xb[..., i], q[..., i].copy()
            slx, sl2 = over - wi * xi * qi, under - wi * qi * qi
            new = nearest(xi * sl2 / slx, -4, 3)
            new_slx, new_sl2 = slx + wi * xi * new, sl2 + wi * new * new
            better = (slx > 0) & (new != qi) & (new_sl2 > 0)
            better &= new_slx * new_slx * under > over * over * new_sl2
            q[..., i] = np.where(better, new, qi)
            over, under = np.where(better, new_slx, over), np.where(better, new_sl2, under)
    scales = over / under
    iscale = F(-32) / extreme(scales)
    s, d = nearest(iscale[..., None] * scales, -32, 31), F(1) / iscale
    q = (fit(xb, half(d)[..., None] * s, -4, 3) + 4).astype(np.uint8)
    s = (s + 32).astype(np.uint8)
    return np.concatenate(
        [pack(q >> 2, 1, 32), pack(q & 3, 2, 32), pack(s & 15, 4, 8), pack(s >> 4, 2, 4), half_bytes(d)], axis=-1
    )


def _line_k(x: Array, nmax: int, rmin: float, nstep: int) -> tuple[Array, Array]:
    """Returns the head of Q4_K and Q5_K, and the numbers."""
    xb = x.reshape(*x.shape[:-1], 8, 32)
    weights = np.sqrt(total(xb * xb) / F(32))[..., None] + np.abs(xb)
    scales, minima = line(xb, weights, nmax, rmin, nstep, False)
    (s, d), (m, dmin) = levels(scales, 63), levels(minima, 63)
    q = fit(xb, half(d)[..., None] * s, 0, nmax, half(dmin)[..., None] * m).astype(np.uint8)
    s, m = s.astype(np.uint8), m.astype(np.uint8)
    packed = np.zeros((*x.shape[:-1], 12), np.uint8)
    for j in range(4):
        packed[..., j] = s[..., j] | s[..., j + 4] >> 4 << 6
        packed[..., j + 4] = m[..., j] | m[..., j + 4] >> 4 << 6
        packed[..., j + 8] = s[..., j + 4] & 15 | (m[..., j + 4] & 15) << 4
    return np.concatenate([half_bytes(d), half_bytes(dmin), packed], axis=-1), q


def q4_k(x: Array) -> Array:
    head, q = _line_k(x, 15, -1.0, 20)
    return np.concatenate([head, pack(q, 4, 32)], axis=-1)


def q5_k(x: Array) -> Array:
    head, q = _line_k(x, 31, -0.5, 15)
    return np.concatenate([head, pack(q >> 4, 1, 32), pack(q & 15, 4, 32)], axis=-1)


def q6_k(x: Array) -> Array:
    xb = x.reshape(*x.shape[:-1], 16, 16)
    w = xb * xb
    top = extreme(xb)
    tries = [-(F(32) + F(0.1) * F(k)) / top for k in (0, *range(-9, 0), *range(1, 10))]
    rounded = [nearest(factor[..., None] * xb, -32, 31) for factor in tries]
    scales = best_scale([(total(w * xb * q), total(w * q * q)) for q in rounded])
    iscale = F(-128) / extreme(scales)
    s, d = nearest(iscale[..., None] * scales, -128, 127), F(1) / iscale
    q = (fit(xb, half(d)[..., None] * s, -32, 31) + 32).astype(np.uint8)
    return np.concatenate(
        [pack(q & 15, 4, 64), pack(q >> 4, 2, 32), s.astype(np.int8).view(np.uint8), half_bytes(d)], axis=-1
    )


QUANTIZE = {
    "q8_0": q8_0,
    "q1_0": q1_0,
    "q2_0": q2_0,
    "nvfp4": nvfp4,
    "iq4_nl": iq4_nl,
    "iq4_xs": iq4_xs,
    "q2_K": q2_k,
    "q3_K": q3_k,
    "q4_K": q4_k,
    "q5_K": q5_k,
    "q6_K": q6_k,
}
"""Functions from float32 [..., elements] to blocks of bytes [..., bytes], by type."""
