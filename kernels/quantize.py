"""Quantizes tensors to ggml's block formats; `dequantize` reads them.

The results are the same as of ggml's `quantize_row_*_ref`, which its CPU backend uses. Several formats search for the scale that
fits best. Each candidate's error is a sum, and the next steps depend on the smallest error, so this module adds in ggml's order
and rounds products before it adds them. If the scale of a part of a block becomes zero, ggml keeps the part's numbers from the
search, while this module computes them from the elements. Both represent the same values.
"""

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES

from .common import DTYPES, Unsupported, f32
from .dequantize import E2M1, IQ4_NL, e8m0, flat, split, ue4m3

_MAX = float(np.finfo(np.float32).max)
_GROUP_MAX_EPS = 1e-15


def stored(x: Array, tensor: TensorDesc) -> Array:
    """Returns `x`, [..., ne0], as a tensor's elements: rounded to its type, or quantized to its blocks."""
    if not TYPES[tensor.dtype].quantized:
        return lax.convert_element_type(x, DTYPES[tensor.dtype])
    if tensor.dtype not in QUANTIZE:
        raise Unsupported(f"nothing quantizes to {tensor.dtype} here; types that can be: {', '.join(sorted(QUANTIZE))}")
    block = TYPES[tensor.dtype].block
    return QUANTIZE[tensor.dtype](split(f32(x), x.shape[-1] // block, block))


# --- numbers ---


def _rounded(x: Array) -> Array:
    """Returns `x`, which is finite. The clamp keeps compilers from fusing a product with a sum, which would round only once."""
    return lax.clamp(np.float32(-_MAX), x, np.float32(_MAX))


def _in_order(x: Array) -> Array:
    """Returns sums over the last axis, [...] f32, added from the first element to the last."""
    terms = lax.transpose(x, (x.ndim - 1, *range(x.ndim - 1)))
    return lax.scan(lambda total, term: (total + term, None), lax.full(x.shape[:-1], 0.0, jnp.float32), terms)[0]


def _in_halves(x: Array) -> Array:
    """Returns sums over the last axis, whose length is a power of two: adds one half to the other until one number is left."""
    while (n := x.shape[-1]) > 1:
        x = lax.slice_in_dim(x, 0, n // 2, axis=-1) + lax.slice_in_dim(x, n // 2, n, axis=-1)
    return lax.squeeze(x, (-1,))


def _quotient(a: Array | np.float32, b: Array) -> Array:
    """Returns a / b, 0 where b is 0."""
    return jnp.where(b == 0, np.float32(0), a / jnp.where(b == 0, np.float32(1), b))


def _over(x: Array, n: float) -> Array:
    """Returns x / n. Compilers replace division by a constant with multiplication by its inverse, which rounds differently."""
    return x / jnp.where(x == 0, np.float32(1), np.float32(n))


def _inverse(d: Array) -> Array:
    return _quotient(np.float32(1), d)


def _nearest(x: Array, low: float, high: float) -> Array:
    """Returns `x` rounded to integers, ties to even, within the limits (`nearest_int`)."""
    return lax.clamp(np.float32(low), lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), np.float32(high))


def _top(x: Array) -> Array:
    """Returns the largest magnitude, [..., 1] from [..., n]."""
    return lax.reduce_max(lax.abs(x), (x.ndim - 1,))[..., None]


def _extreme(x: Array) -> Array:
    """Returns the value of the largest magnitude with its sign, the first one where both signs occur: [..., 1]."""
    magnitude = lax.abs(x)
    place = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    at_top = magnitude == lax.reduce_max(magnitude, (x.ndim - 1,))[..., None]
    first = lax.reduce_min(jnp.where(at_top, place, np.int32(x.shape[-1])), (x.ndim - 1,))[..., None]
    return lax.reduce_sum(jnp.where(place == first, x, np.float32(0)), (x.ndim - 1,))[..., None]


# --- bits and bytes ---


def _u8(x: Array) -> Array:
    """Converts numbers of 0 to 255 of any type to bytes."""
    return lax.convert_element_type(x, jnp.uint8)


def _bytes_of_half(x: Array) -> Array:
    """Returns the two bytes of [..., 1] numbers as f16, [..., 2] u8."""
    return _bytes_of(lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float16), jnp.uint16))


def _bytes_of(x: Array) -> Array:
    """Returns the bytes of [..., 1] 16-bit words, [..., 2] u8."""
    return _join(x & np.uint16(255), x >> np.uint16(8))


def _join(*parts: Array) -> Array:
    """Returns the bytes of a block from its parts."""
    return lax.concatenate([_u8(p) for p in parts], parts[0].ndim - 1)


def _pack(q: Array, bits: int, width: int) -> Array:
    """Packs numbers of `bits` bits into bytes, lowest first: the inverse of `_fields` in `dequantize`, flat."""
    count = 8 // bits
    fields = split(_u8(q), q.shape[-1] // (count * width), count, width)
    shifted = fields << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return flat(lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (shifted.ndim - 2,)), 2)


# --- plain formats: [..., blocks, elements per block] f32 to [..., blocks, bytes per block] u8 ---


def _to_q1_0(x: Array) -> Array:
    d = _in_halves(lax.abs(x))[..., None] / np.float32(128)
    return _join(_bytes_of_half(d), _pack(x >= 0, 1, 1))


def _to_q2_0(x: Array) -> Array:
    d = _top(x)
    q = lax.round(x * _inverse(d), lax.RoundingMethod.AWAY_FROM_ZERO) + 1
    return _join(_bytes_of_half(d), _pack(lax.clamp(np.float32(0), q, np.float32(3)), 2, 1))


def _towards_zero(x: Array, add: float, top: float) -> Array:
    """Returns x + add truncated to an integer, at most `top`."""
    return lax.min(lax.floor(_rounded(x) + np.float32(add)), np.float32(top))


def _to_q4_0(x: Array) -> Array:
    d = _extreme(x) / np.float32(-8)
    return _join(_bytes_of_half(d), _pack(_towards_zero(x * _inverse(d), 8.5, 15), 4, 16))


def _above_minimum(x: Array, top: int) -> tuple[Array, Array]:
    """Returns the bytes of scale and minimum, and numbers from 0 to `top`."""
    low = lax.reduce_min(x, (x.ndim - 1,))[..., None]
    d = _over(lax.reduce_max(x, (x.ndim - 1,))[..., None] - low, top)
    return _join(_bytes_of_half(d), _bytes_of_half(low)), _towards_zero((x - low) * _inverse(d), 0.5, top)


def _to_q4_1(x: Array) -> Array:
    head, q = _above_minimum(x, 15)
    return _join(head, _pack(q, 4, 16))


def _five(q: Array) -> Array:
    """Returns the bytes of 32 numbers of five bits: the top bits, then the others."""
    q = _u8(q)
    return _join(_pack(q >> np.uint8(4), 1, 1), _pack(q & np.uint8(15), 4, 16))


def _to_q5_0(x: Array) -> Array:
    d = _extreme(x) / np.float32(-16)
    return _join(_bytes_of_half(d), _five(_towards_zero(x * _inverse(d), 16.5, 31)))


def _to_q5_1(x: Array) -> Array:
    head, q = _above_minimum(x, 31)
    return _join(head, _five(q))


def _to_q8_0(x: Array) -> Array:
    top = _top(x)
    # Ties are common in F16 and BF16 tensors. They round to the even number, as in ggml's vector instructions.
    q = _nearest(x * _quotient(np.float32(127), top), -127, 127)
    quants = lax.bitcast_convert_type(lax.convert_element_type(q, jnp.int8), jnp.uint8)
    return _join(_bytes_of_half(_over(top, 127)), quants)


def _ternary(x: Array) -> tuple[Array, Array]:
    """Returns the bytes of the scale, and 0, 1 and 2 for negative, zero and positive elements, u8."""
    d = _top(x)
    return _bytes_of_half(d), _u8(lax.round(x * _inverse(d), lax.RoundingMethod.AWAY_FROM_ZERO) + 1)


def _to_tq1_0(x: Array) -> Array:
    d, q = _ternary(x)

    def digits(start: int, stop: int, count: int) -> Array:
        parts = split(lax.slice_in_dim(q, start, stop, axis=q.ndim - 1), count, (stop - start) // count)
        powers = np.array([3**k for k in (4, 3, 2, 1, 0)[:count]], np.uint16)[:, None]
        number = lax.reduce_sum(lax.convert_element_type(parts, jnp.uint16) * powers, (parts.ndim - 2,))
        # number * 256 / 243, rounded up. neuronx-cc divides integers inexactly; adding 242.5 keeps quotients away from integers.
        quotient = (f32(number) * np.float32(256) + np.float32(242.5)) * np.float32(1 / 243)
        return lax.convert_element_type(lax.floor(quotient), jnp.uint16)

    return _join(digits(0, 160, 5), digits(160, 240, 5), digits(240, 256, 4), d)


def _to_tq2_0(x: Array) -> Array:
    d, q = _ternary(x)
    return _join(_pack(q, 2, 32), d)


def _to_e2m1(x: Array, d: Array) -> Array:
    """Returns the numbers of the nearest values of `E2M1` times d, u8; of two equally near values the smaller magnitude."""
    size = lax.abs(x)
    code = lax.full_like(x, 0)
    errors = [lax.abs(_rounded(np.float32(v) * d) - size) for v in E2M1[:8]]
    for near, far in itertools.pairwise(errors):
        code = code + f32(far < near)
    return _u8(jnp.where((x < 0) & (code > 0), code + 8, code))


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _to_mxfp4(x: Array) -> Array:
    # The exponent of the largest magnitude minus 2, because the largest value is 6.
    e = _u8(lax.max((_bits(_top(x)) >> 23) - np.int32(2), np.int32(0)))
    return _join(e, _pack(_to_e2m1(x, e8m0(e)), 4, 16))


def _to_ue4m3(x: Array) -> Array:
    """Returns a number of at least 0 as unsigned E4M3, u8 (`ggml_fp32_to_ue4m3`)."""
    # Rounds a float32 to three bits of mantissa, half up, and changes its exponent's bias from 127 to 7.
    number = ((_bits(lax.min(x, np.float32(448))) >> 19) + 1 >> 1) - np.int32(120 << 3)
    small = lax.min(lax.floor(_rounded(x * np.float32(512)) + np.float32(0.5)), np.float32(7))
    normal = _bits(x) >= np.int32(121 << 23)
    return _u8(jnp.where(normal, lax.min(number, np.int32(0x7E)), lax.convert_element_type(small, jnp.int32)))


def _to_nvfp4(x: Array) -> Array:
    parts = split(x, 4, 16)
    scale = _to_ue4m3(_over(_top(parts), 6))
    quants = _pack(flat(_to_e2m1(parts, ue4m3(scale)), 2), 4, 8)
    return _join(flat(scale, 2), quants)


# --- formats with a search ---


def _iq4(x: Array, weights: np.ndarray) -> Array:
    """Returns the sum of the weights of values of IQ4_NL, except the first, that are at least as near to `x` as the one before."""
    total = lax.full_like(x, 0)
    for (low, high), weight in zip(itertools.pairwise(IQ4_NL), weights, strict=True):
        beyond = ~(x - np.float32(low) < np.float32(high) - x)
        total = total + jnp.where(beyond, np.float32(weight), np.float32(0))
    return total


def _iq4_code(x: Array) -> Array:
    """Returns the numbers of the nearest values of IQ4_NL, [...] f32."""
    return _iq4(x, np.ones(15))


def _iq4_sums(x: Array, scaled: Array, add: Callable[[Array], Array]) -> tuple[Array, Array]:
    """Returns the sums of x² q x and x² q q over the last axis, where q are the values of IQ4_NL nearest to `scaled`."""
    q = _iq4(scaled, np.diff(IQ4_NL)) + np.float32(IQ4_NL[0])
    wq = _rounded(x * x) * q
    return add(_rounded(wq * x)), add(_rounded(wq * q))


def _to_iq4_nl(x: Array) -> Array:
    top = _extreme(x)
    scaled = _inverse(_over(top, IQ4_NL[0])) * x
    # The scale that fits these numbers best. The order of its sums hardly ever changes the f16 number.
    scale = _quotient(*_iq4_sums(x, scaled, _in_halves))[..., None]
    return _join(_bytes_of_half(_unless_zero(top, scale)), _pack(_iq4_code(scaled), 4, 16))


def _unless_zero(top: Array, scale: Array) -> Array:
    """Returns `scale`, but 0 where the largest magnitude is almost 0."""
    return jnp.where(lax.abs(top) < np.float32(_GROUP_MAX_EPS), np.float32(0), scale)


def _best_fit(factors: Array, sums: Callable[[Array], tuple[Array, Array]]) -> Array:
    """Returns the scale that fits rows of numbers best, [...] f32.

    Args:
        factors: the factors by which a row is multiplied before it is rounded, in the order in which ggml tries them,
            [tries, ..., 1]: a later factor must be better than all before it.
        sums: returns the sums of weight * number * rounded and of weight * rounded * rounded, [tries, ...] each, for the factors.
    """
    over, under = sums(factors)

    def better(best: tuple[Array, Array], tried: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        scale, score = best
        over, under = tried
        found = (under > 0) & (over * over > score * under)
        fit = _quotient(over, under)
        return (jnp.where(found, fit, scale), jnp.where(found, fit * over, score)), None

    first = _quotient(over[0], under[0])
    return lax.scan(better, (first, first * over[0]), (over[1:], under[1:]))[0][0]


def _column(values: np.ndarray, like: Array) -> np.ndarray:
    """Returns values along a new axis before the axes of `like`."""
    return values.astype(np.float32).reshape(-1, *[1] * like.ndim)


def _to_iq4_xs(x: Array) -> Array:
    parts = split(x, 8, 32)
    top = _extreme(parts)
    tries = _column(np.arange(-7, 8) + IQ4_NL[0], top)
    factors = lax.concatenate([_inverse(_over(top, -IQ4_NL[0]))[None], tries / top], 0)
    scales = _best_fit(factors, lambda factor: _iq4_sums(parts, factor * parts, _in_order))
    scales = _unless_zero(flat(top, 2), scales)
    d = _extreme(scales) / np.float32(-32)
    rounded = _nearest(_inverse(d) * scales, -32, 31)
    code = _iq4_code(_inverse(d * rounded)[..., None] * parts)
    rounded = _u8(rounded + 32)
    high, low = _pack(rounded >> np.uint8(4), 2, 1), _pack(rounded & np.uint8(15), 4, 1)
    return _join(_bytes_of_half(d), high, low, _pack(flat(code, 2), 4, 16))


def _to_q6_k(x: Array) -> Array:
    parts = split(x, 16, 16)
    top = _extreme(parts)
    wx = _rounded(parts * parts) * parts

    def sums(factor: Array) -> tuple[Array, Array]:
        q = _nearest(factor * parts, -32, 31)
        return _in_order(_rounded(wx * q)), _in_order(_rounded(parts * parts) * q * q)

    steps = np.array([0, *range(-9, 0), *range(1, 10)], np.float32)
    tries = _column(-(np.float32(32) + np.float32(0.1) * steps), top)
    scales = _unless_zero(flat(top, 2), _best_fit(tries / top, sums))
    largest = _extreme(scales)
    factor = _quotient(np.float32(-128), _unless_zero(largest, largest))
    d = _inverse(factor)
    rounded = _nearest(factor * scales, -128, 127)
    q = _numbers(parts, None, _half(d) * rounded, -32, 31, 32)
    scales = lax.bitcast_convert_type(lax.convert_element_type(rounded, jnp.int8), jnp.uint8)
    return _or_zeros(factor, _pack(q & np.uint8(15), 4, 64), _pack(q >> np.uint8(4), 2, 32), scales, _bytes_of_half(d))


def _half(x: Array) -> Array:
    """Returns numbers rounded to f16."""
    return f32(lax.convert_element_type(x, jnp.float16))


def _numbers(parts: Array, minimum: Array | None, scale: Array, low: int, high: int, add: int) -> Array:
    """Returns (x + minimum) / scale rounded, within the limits, plus `add`: [..., 256] u8; `add` where the scale is 0.

    `parts` is x, [..., runs, n]; minimum and scale are [..., runs].
    """
    x = parts if minimum is None else parts + _rounded(minimum)[..., None]
    scale = lax.broadcast_in_dim(scale, x.shape, range(x.ndim - 1))
    return flat(_u8(_nearest(_quotient(x, scale), low, high) + add), 2)


def _q3_scales(x: Array) -> Array:
    """Returns scales, [...] from [..., 16], for numbers of -4 to 3, which it changes one by one while the fit improves."""
    top = _extreme(x)
    w = _rounded(x * x)
    wx = _rounded(w * x)
    q = _nearest(_quotient(np.float32(-4), top) * x, -4, 3)
    sums = _in_order(_rounded(wx * q)), _in_order(_rounded(w * q * q))
    axes = (x.ndim - 1, *range(x.ndim - 1))
    x, w, wx, q = (lax.transpose(t, axes) for t in (x, w, wx, q))

    def element(sums: tuple[Array, Array], item: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        over, under = sums
        x, w, wx, q = item
        rest, rest_under = over - _rounded(wx * q), under - _rounded(w * q * q)
        new = _nearest(_quotient(x * rest_under, rest), -4, 3)
        new_over, new_under = rest + _rounded(wx * new), rest_under + _rounded(w * new * new)
        better = new_over * new_over * under > over * over * new_under
        taken = (rest > 0) & (new != q) & (new_under > 0) & better
        sums = jnp.where(taken, new_over, over), jnp.where(taken, new_under, under)
        return sums, jnp.where(taken, new, q)

    def once(state: tuple[tuple[Array, Array], Array], _: None) -> tuple[tuple[tuple[Array, Array], Array], None]:
        sums, q = state
        return lax.scan(element, sums, (x, w, wx, q)), None

    (over, under), _ = lax.scan(once, (sums, q), None, length=5)[0]
    return _unless_zero(lax.squeeze(top, (-1,)), _quotient(over, under))


def _to_q3_k(x: Array) -> Array:
    parts = split(x, 16, 16)
    scales = _q3_scales(parts)
    factor = _quotient(np.float32(-32), _extreme(scales))
    d = _inverse(factor)
    rounded = _nearest(factor * scales, -32, 31)
    q = _numbers(parts, None, _half(d) * rounded, -4, 3, 4)
    scale = _u8(rounded + 32)
    scales = _join(_pack(scale & np.uint8(15), 4, 8), _pack(scale >> np.uint8(4), 2, 4))
    return _or_zeros(factor, _pack(q >> np.uint8(2), 1, 32), _pack(q & np.uint8(3), 2, 32), scales, _bytes_of_half(d))


def _or_zeros(factor: Array, *parts: Array) -> Array:
    """Returns the bytes of a block from its parts; zeros where the factor is 0, which means a block of zeros."""
    return jnp.where(factor == 0, np.uint8(0), _join(*parts))


def _line(
    x: Array, weights: Array, top: int, first: float, tries: int, error: Callable[[Array], Array]
) -> tuple[Array, Array]:
    """Returns scale and minimum, [...] each, that fit x by scale * q - minimum best, q from 0 to `top` (`make_qkx2_quants`).

    Args:
        x: [..., n].
        weights: the weights of its elements.
        top: the largest number.
        first: the difference of the first factor and `top`; each further factor is larger by 0.1.
        tries: the number of factors.
        error: returns the error of a difference.
    """
    low = lax.min(lax.reduce_min(x, (x.ndim - 1,)), np.float32(0))
    high = lax.reduce_max(x, (x.ndim - 1,))
    sum_w, sum_x = _in_order(weights), _in_order(_rounded(weights * x))

    def numbers(factor: Array, low: Array) -> Array:
        return _nearest(factor[..., None] * (x - low[..., None]), 0, top)

    def total_error(scale: Array, low: Array, q: Array) -> Array:
        difference = _rounded(scale[..., None] * q) + low[..., None] - x
        return _in_order(_rounded(weights * _rounded(error(difference))))

    def step(best: tuple[Array, Array, Array], k: Array) -> tuple[tuple[Array, Array, Array], None]:
        scale, low, least = best
        q = numbers(_quotient(k, high - low), low)
        wq = _rounded(weights * q)
        sum_q, sum_qq, sum_xq = _in_order(wq), _in_order(_rounded(wq * q)), _in_order(_rounded(wq * x))
        det = _rounded(sum_w * sum_qq) - _rounded(sum_q * sum_q)
        new = _quotient(_rounded(sum_w * sum_xq) - _rounded(sum_x * sum_q), det)
        new_low = _quotient(_rounded(sum_qq * sum_x) - _rounded(sum_q * sum_xq), det)
        new = jnp.where(new_low > 0, _quotient(sum_xq, sum_qq), new)
        new_low = lax.min(new_low, np.float32(0))
        found = total_error(new, new_low, q)
        taken = (det > 0) & (found < least)
        pairs = ((new, scale), (new_low, low), (found, least))
        return tuple(jnp.where(taken, a, b) for a, b in pairs), None

    factor = _quotient(np.float32(top), high - low)
    scale = _inverse(factor)
    start = scale, low, total_error(scale, low, numbers(factor, low))
    factors = np.float32(first) + np.float32(0.1) * np.arange(tries, dtype=np.float32) + np.float32(top)
    found, found_low, _ = lax.scan(step, start, factors)[0]
    level = high == low
    return jnp.where(level, np.float32(0), found), -jnp.where(level, low, found_low)


def _six_bits(scales: Array, minima: Array) -> Array:
    """Returns the 12 bytes of eight scales and eight minima of six bits, u8."""
    parts = [lax.slice_in_dim(k, a, a + 4, axis=-1) for k in (scales, minima) for a in (0, 4)]
    low, high, low_minima, high_minima = parts
    four, six = np.uint8(4), np.uint8(6)
    both = (high & np.uint8(15)) | ((high_minima & np.uint8(15)) << four)
    return _join(low | ((high >> four) << six), low_minima | ((high_minima >> four) << six), both)


def _up_to(values: Array, top: int) -> tuple[Array, Array]:
    """Returns the scale of values of at least 0, [..., 1], and the scaled values, 0 to `top`, [..., n] f32."""
    largest = lax.max(lax.reduce_max(values, (values.ndim - 1,))[..., None], np.float32(0))
    return _over(largest, top), _nearest(_quotient(np.float32(top), largest) * values, 0, top)


def _line_k(x: Array, top: int, first: float, tries: int) -> tuple[Array, Array]:
    """Returns the 16 bytes of scales and minima, and the numbers, [..., 256] u8, of Q4_K and Q5_K."""
    parts = split(x, 8, 32)
    mean = lax.sqrt(_in_order(_rounded(parts * parts)) / np.float32(32))
    scales, minima = _line(parts, mean[..., None] + lax.abs(parts), top, first, tries, lambda t: t * t)

    (d, scale), (d_minimum, minimum) = _up_to(scales, 63), _up_to(minima, 63)
    q = _numbers(parts, _half(d_minimum) * minimum, _half(d) * scale, 0, top, 0)
    return _join(_bytes_of_half(d), _bytes_of_half(d_minimum), _six_bits(_u8(scale), _u8(minimum))), q


def _to_q4_k(x: Array) -> Array:
    head, q = _line_k(x, 15, -1.0, 21)
    return _join(head, _pack(q, 4, 32))


def _to_q5_k(x: Array) -> Array:
    head, q = _line_k(x, 31, -0.5, 16)
    return _join(head, _pack(q >> np.uint8(4), 1, 32), _pack(q & np.uint8(15), 4, 32))


def _to_q2_k(x: Array) -> Array:
    parts = split(x, 16, 16)
    scales, minima = _line(parts, lax.abs(parts), 3, -0.5, 16, lax.abs)

    (d, scale), (d_minimum, minimum) = _up_to(scales, 15), _up_to(minima, 15)
    q = _numbers(parts, _half(d_minimum) * minimum, _half(d) * scale, 0, 3, 0)
    heads = _u8(scale) | (_u8(minimum) << np.uint8(4))
    return _join(heads, _pack(q, 2, 32), _bytes_of_half(d), _bytes_of_half(d_minimum))


QUANTIZE = {
    "q4_0": _to_q4_0,
    "q4_1": _to_q4_1,
    "q5_0": _to_q5_0,
    "q5_1": _to_q5_1,
    "q8_0": _to_q8_0,
    "q2_K": _to_q2_k,
    "q3_K": _to_q3_k,
    "q4_K": _to_q4_k,
    "q5_K": _to_q5_k,
    "q6_K": _to_q6_k,
    "iq4_nl": _to_iq4_nl,
    "iq4_xs": _to_iq4_xs,
    "tq1_0": _to_tq1_0,
    "tq2_0": _to_tq2_0,
    "mxfp4": _to_mxfp4,
    "nvfp4": _to_nvfp4,
    "q1_0": _to_q1_0,
    "q2_0": _to_q2_0,
}
"""Quantization of [..., blocks, elements per block] f32 to [..., blocks, bytes per block] u8, by ggml's type name.

The other readable types require a table of each lattice's neighbours, and most of them weights from a calibration: ggml's CPU
backend does not write them either.
"""
