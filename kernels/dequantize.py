"""Reads quantized tensors in ggml's block formats; `quantize` writes them.

A quantized tensor is an array of bytes, `[ne3, ne2, ne1, blocks per row, bytes per block]` u8; in the layout `planes` it is
`[ne3, ne2, ne1, bytes per row]` u8. The NEFF's inputs have this form: the kernel that uses the tensor dequantizes it. In the layout
`bf16` it is already dequantized. The formats are the same as in ggml-common.h, the results as in ggml-quants.c.

The lattices of the IQ types (`iq2xxs_grid` and similar) come from the gguf package, which stores them like ggml. In a kernel each
is a table of 16-bit words with the packed codes of one lattice point; the kernel computes the value of a code.
"""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import BF16, FIELDS, PLANES

from .common import Unsupported, f32


def floats(x: Array, tensor: TensorDesc) -> Array:
    """Returns a tensor in its own float type, or dequantized to float32: `[ne3, ne2, ne1, ne0]`.

    A tensor in the layout `bf16` stays bfloat16.
    """
    if not TYPES[tensor.dtype].quantized or tensor.layout == BF16:
        return x
    if tensor.dtype not in DEQUANTIZE:
        raise Unsupported(f"{tensor.dtype} is not dequantized here; types that are: {', '.join(sorted(DEQUANTIZE))}")
    blocks = (
        Planes(x, FIELDS[tensor.dtype], tensor.ne[0] // TYPES[tensor.dtype].block) if tensor.layout == PLANES else x
    )
    return lax.reshape(DEQUANTIZE[tensor.dtype](blocks), tensor.shape)


@dataclass(frozen=True, slots=True)
class Planes:
    """Blocks in planes: a row has the first field of all its blocks, then the second, and so on. `_part` reads it like blocks.

    Attributes:
        rows: [..., bytes per row] u8.
        fields: bytes of each field of a block, in the order of the planes.
        blocks: the number of blocks in a row.
    """

    rows: Array
    fields: tuple[int, ...]
    blocks: int

    @property
    def ndim(self) -> int:
        """The number of axes of the equivalent array of blocks."""
        return self.rows.ndim + 1

    def part(self, start: int, stop: int) -> Array:
        """Returns bytes `start` up to `stop` of each block, which must be in one field: [..., blocks, stop - start] u8."""
        first = 0
        for width in self.fields:
            if first <= start and stop <= first + width:
                plane = lax.slice_in_dim(
                    self.rows, self.blocks * first, self.blocks * (first + width), axis=self.ndim - 2
                )
                blocks = split(plane, self.blocks, width)
                return blocks if stop - start == width else _part(blocks, start - first, stop - first)
            first += width
        raise AssertionError(f"bytes {start} to {stop} of a block are not of one field of {self.fields}")


# --- bits and bytes ---


def _part(x: Array | Planes, start: int, stop: int) -> Array:
    """Returns bytes `start` up to `stop` of each block."""
    if isinstance(x, Planes):
        return x.part(start, stop)
    return lax.slice_in_dim(x, start, stop, axis=x.ndim - 1)


def split(x: Array, *shape: int) -> Array:
    """Returns `x` with its last axis in the given shape."""
    return lax.reshape(x, (*x.shape[:-1], *shape))


def flat(x: Array, n_axes: int) -> Array:
    """Returns `x` with its last `n_axes` axes merged."""
    return lax.reshape(x, (*x.shape[:-n_axes], int(np.prod(x.shape[-n_axes:]))))


def _fields(x: Array, bits: int, width: int, count: int = 0) -> Array:
    """Returns fields of `bits` bits, lowest first: [..., n / width, count, width] from [..., n].

    Each word has `count` fields; by default as many as fit into the type of `x`. Word i of a run of `width` words has element i of
    `count` consecutive runs.
    """
    count = count or 8 * x.dtype.itemsize // bits
    shifts = np.arange(0, bits * count, bits, dtype=x.dtype)[:, None]
    return (split(x, x.shape[-1] // width, 1, width) >> shifts) & x.dtype.type(2**bits - 1)


def _word(x: Array, start: int, stop: int, size: int) -> Array:
    """Returns bytes `start` up to `stop` as little-endian words of `size` bytes, u16 or u32: [..., (stop - start) / size]."""
    kind = {2: jnp.uint16, 4: jnp.uint32}[size]
    parts = lax.convert_element_type(split(_part(x, start, stop), (stop - start) // size, size), kind)
    words = parts << np.arange(0, 8 * size, 8, dtype=kind)
    return lax.reduce(words, kind(0), lax.bitwise_or, (words.ndim - 1,))


def _half(x: Array, at: int) -> Array:
    """Returns the f16 number at byte `at` of each block, [..., 1] f32."""
    return f32(lax.bitcast_convert_type(_word(x, at, at + 2, 2), jnp.float16))


def _signed(x: Array) -> Array:
    return f32(lax.bitcast_convert_type(x, jnp.int8))


def _nibbles(x: Array) -> Array:
    """Returns [..., 2 n] from [..., n]: the lower halves of all bytes, then the upper ones."""
    return flat(_fields(x, 4, x.shape[-1]), 3)


def _bits(x: Array) -> Array:
    """Returns the bits of bytes, lowest first: [..., 8 n] from [..., n]."""
    return flat(_fields(x, 1, 1), 3)


def lookup(table: tuple[int, ...], code: Array) -> Array:
    """Returns `table[code]` as float32; the number of entries is a power of two.

    It is a tree of selects, because devices have no fast gather of single elements.
    """
    rows: list[Array | np.float32] = [np.float32(v) for v in table]
    bit = 1
    while len(rows) > 1:
        odd = (code & code.dtype.type(bit)) != 0
        rows = [jnp.where(odd, high, low) for low, high in zip(rows[0::2], rows[1::2], strict=True)]
        bit *= 2
    return rows[0]


# --- reading: each function takes [..., blocks, bytes per block] u8 and returns [..., blocks, elements per block] f32 ---


def _q1_0(x: Array) -> Array:
    return (f32(_bits(_part(x, 2, 18))) * 2 - 1) * _half(x, 0)


def _q2_0(x: Array) -> Array:
    return (f32(flat(_fields(_part(x, 2, 18), 2, 1), 3)) - 1) * _half(x, 0)


def _q4_0(x: Array) -> Array:
    return (f32(_nibbles(_part(x, 2, 18))) - 8) * _half(x, 0)


def _q4_1(x: Array) -> Array:
    return f32(_nibbles(_part(x, 4, 20))) * _half(x, 0) + _half(x, 2)


def _five(x: Array, high: int, low: int) -> Array:
    """Returns numbers of five bits: 32 bits from byte `high` on are their top bits, 16 bytes from `low` on their lower ones."""
    return f32(_nibbles(_part(x, low, low + 16)) | (_bits(_part(x, high, high + 4)) << np.uint8(4)))


def _q5_0(x: Array) -> Array:
    return (_five(x, 2, 6) - 16) * _half(x, 0)


def _q5_1(x: Array) -> Array:
    return _five(x, 4, 8) * _half(x, 0) + _half(x, 2)


def _q8_0(x: Array) -> Array:
    return _signed(_part(x, 2, 34)) * _half(x, 0)


def _scaled(q: Array, scale: Array, minimum: Array | None = None) -> Array:
    """Returns q * scale - minimum, [..., 256]; `scale` and `minimum`, [..., runs], have a number for each run of `q`."""
    runs = scale.shape[-1]
    y = split(q, runs, q.shape[-1] // runs) * scale[..., None]
    return flat(y if minimum is None else y - minimum[..., None], 2)


def _q2_k(x: Array) -> Array:
    scales = _part(x, 0, 16)
    q = f32(flat(_fields(_part(x, 16, 80), 2, 32), 3))
    return _scaled(q, _half(x, 80) * f32(scales & np.uint8(15)), _half(x, 82) * f32(scales >> np.uint8(4)))


def _q3_k(x: Array) -> Array:
    high = flat(_fields(_part(x, 0, 32), 1, 32), 3)
    low = flat(_fields(_part(x, 32, 96), 2, 32), 3)
    # Sixteen 6-bit scales are in 12 bytes: eight bytes have the lower four bits of all, the other four two more bits of each.
    scale = _nibbles(_part(x, 96, 104)) | (flat(_fields(_part(x, 104, 108), 2, 4), 3) << np.uint8(4))
    return _scaled(f32(low | (high << np.uint8(2))) - 4, _half(x, 108) * (f32(scale) - 32))


def _k_scales(x: Array) -> tuple[Array, Array]:
    """Returns the scales and minima, [..., 8] f32 each, of Q4_K and Q5_K: 6 bits each in bytes 4 to 15."""
    # Numbers 0 to 3 are in the lower bits of the first eight bytes; the others are split.
    low, mid, high = (_part(x, k, k + 4) for k in (4, 8, 12))
    six, four, two = np.uint8(63), np.uint8(4), np.uint8(6)
    scale = lax.concatenate([low & six, (high & np.uint8(15)) | ((low >> two) << four)], x.ndim - 1)
    minimum = lax.concatenate([mid & six, (high >> four) | ((mid >> two) << four)], x.ndim - 1)
    return _half(x, 0) * f32(scale), _half(x, 2) * f32(minimum)


def _q4_k(x: Array) -> Array:
    return _scaled(f32(flat(_fields(_part(x, 16, 144), 4, 32), 3)), *_k_scales(x))


def _q5_k(x: Array) -> Array:
    high = flat(_fields(_part(x, 16, 48), 1, 32), 3)
    low = flat(_fields(_part(x, 48, 176), 4, 32), 3)
    return _scaled(f32(low | (high << np.uint8(4))), *_k_scales(x))


def _q6_k(x: Array) -> Array:
    low = flat(_fields(_part(x, 0, 128), 4, 64), 3)
    high = flat(_fields(_part(x, 128, 192), 2, 32), 3)
    return _scaled(f32(low | (high << np.uint8(4))) - 32, _half(x, 208) * _signed(_part(x, 192, 208)))


def _tq1_0(x: Array) -> Array:
    def digits(start: int, stop: int, count: int) -> Array:
        # A byte is a fraction of 256 in base 3, highest digit first: multiplying by 3^k drops the first k digits as overflow.
        powers = np.array([3**k for k in range(count)], np.uint8)[:, None]
        q = lax.convert_element_type(split(_part(x, start, stop), 1, stop - start) * powers, jnp.uint16)
        return flat((q * np.uint16(3)) >> np.uint16(8), 2)

    q = lax.concatenate([digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)], x.ndim - 1)
    return (f32(q) - 1) * _half(x, 52)


def _tq2_0(x: Array) -> Array:
    return (f32(flat(_fields(_part(x, 0, 64), 2, 32), 3)) - 1) * _half(x, 64)


IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled; scales are halved


def _iq4_nl(x: Array) -> Array:
    return lookup(IQ4_NL, _nibbles(_part(x, 2, 18))) * _half(x, 0)


def _iq4_xs(x: Array) -> Array:
    low = flat(_fields(_part(x, 4, 8), 4, 1), 3)
    high = flat(_fields(_part(x, 2, 4), 2, 1), 3)
    scale = _half(x, 0) * (f32(low | (high << np.uint8(4))) - 32)
    return _scaled(lookup(IQ4_NL, flat(_fields(_part(x, 8, 136), 4, 16), 3)), scale)


def e8m0(e: Array) -> Array:
    """Returns half of 2^(e - 127) as f32, for e in 0 to 254 (`ggml_e8m0_to_fp32_half`)."""
    e = lax.convert_element_type(e, jnp.uint32)
    bits = jnp.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _mxfp4(x: Array) -> Array:
    return lookup(E2M1, _nibbles(_part(x, 1, 17))) * e8m0(_part(x, 0, 1))


def ue4m3(x: Array) -> Array:
    """Returns half of an unsigned E4M3 number as f32; 0x7f counts as 0 (`ggml_ue4m3_to_fp32`)."""
    wide = lax.convert_element_type(x & np.uint8(127), jnp.uint32)
    # Moved into place the bits are a float32 whose exponent is off by 120; half of it, by 119.
    normal = lax.bitcast_convert_type((wide << np.uint32(20)) + np.uint32(119 << 23), jnp.float32)
    number = jnp.where(wide < 8, f32(wide) * np.float32(2.0**-10), normal)
    return jnp.where(x == 127, np.float32(0), number)


def _nvfp4(x: Array) -> Array:
    return _scaled(lookup(E2M1, flat(_fields(_part(x, 4, 36), 4, 8), 3)), ue4m3(_part(x, 0, 4)))


# --- reading lattices ---


@functools.cache
def _lattice(name: str) -> np.ndarray:
    """Returns the words of a lattice of gguf: element i of a point of n has its code at bit `16 / n * i`, [points] u16."""
    from gguf import quants  # a late import, because only some types need it

    quant = getattr(quants, name)
    quant.init_grid()
    points, n = quant.grid_shape
    codes = np.searchsorted(quant.grid_map, quant.grid.reshape(points, n)).astype(np.uint16)
    return np.bitwise_or.reduce(codes << np.arange(0, 16, 16 // n, dtype=np.uint16), axis=1)


def _points(name: str, n: int, index: Array) -> Array:
    """Returns the codes of points of `n` elements, [..., n * points] f32, from their numbers, [..., points] u16."""
    table = _lattice(name)
    words = lax.gather(
        jnp.asarray(table),
        lax.convert_element_type(index, jnp.int32)[..., None],
        lax.GatherDimensionNumbers((), (0,), (0,)),
        (1,),
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )
    return f32(flat(_fields(words, 16 // n, 1, n), 3))


def _with_signs(x: Array, signs: Array) -> Array:
    """Returns numbers, [..., n], negated where the bits of `signs`, [..., n / 8] bytes, are set."""
    return x * (1 - 2 * f32(_bits(signs)))


def _even_signs(index: Array) -> Array:
    """Returns bytes of signs from seven bits each; the eighth bit makes the number of set bits even (`ksigns_iq2xs`)."""
    index = lax.convert_element_type(index, jnp.uint8)
    parity = index ^ (index >> np.uint8(4))
    parity = parity ^ (parity >> np.uint8(2))
    parity = parity ^ (parity >> np.uint8(1))
    return index | (parity << np.uint8(7))


def _iq2(code: Array) -> Array:
    """Returns 8, 25 and 43 for the codes 0, 1 and 2."""
    return code * 17 + jnp.where(code == 2, np.float32(9), np.float32(8))


def _four_signs(words: Array) -> tuple[Array, Array]:
    """Returns the bytes of signs, [..., 4 n], and the upper four bits, [..., n] f32, of 32-bit words."""
    return _even_signs(flat(_fields(words, 7, 1, 4), 3)), f32(words >> np.uint32(28))


def _iq2_xxs(x: Array) -> Array:
    pairs = split(_part(x, 2, 66), 8, 8)
    index = lax.convert_element_type(flat(_part(pairs, 0, 4), 2), jnp.uint16)
    signs, scale = _four_signs(flat(_word(pairs, 4, 8, 4), 2))
    q = _with_signs(_iq2(_points("IQ2_XXS", 8, index)), signs)
    return _scaled(q, _half(x, 0) * (scale + np.float32(0.5)) * np.float32(0.25))


def _quarter_scales(x: Array, start: int, stop: int) -> Array:
    """Returns d * (0.5 + s) / 4 of 4-bit scales, two in a byte: [..., 2 * (stop - start)] f32."""
    scale = f32(flat(_fields(_part(x, start, stop), 4, 1), 3))
    return _half(x, 0) * (scale + np.float32(0.5)) * np.float32(0.25)


def _iq2_xs(x: Array) -> Array:
    words = _word(x, 2, 66, 2)
    q = _iq2(_points("IQ2_XS", 8, words & np.uint16(511)))
    return _scaled(_with_signs(q, _even_signs(words >> np.uint16(9))), _quarter_scales(x, 66, 74))


def _index(low: Array, high: Array) -> Array:
    """Returns numbers from their lower bytes and further bits, [..., n] u16."""
    low, high = (lax.convert_element_type(k, jnp.uint16) for k in (low, high))
    return low | (high << np.uint16(8))


def _iq2_s(x: Array) -> Array:
    index = _index(_part(x, 2, 34), flat(_fields(_part(x, 66, 74), 2, 1), 3))
    q = _iq2(_points("IQ2_S", 8, index))
    return _scaled(_with_signs(q, _part(x, 34, 66)), _quarter_scales(x, 74, 82))


def _iq3_xxs(x: Array) -> Array:
    code = _points("IQ3_XXS", 4, lax.convert_element_type(_part(x, 2, 66), jnp.uint16))
    # 4, 12, … in steps of 8, but 62 at the end.
    q = code * 8 + jnp.where(code == 7, np.float32(6), np.float32(4))
    signs, scale = _four_signs(_word(x, 66, 98, 4))
    return _scaled(_with_signs(q, signs), _half(x, 0) * (scale + np.float32(0.5)) * np.float32(0.5))


def _iq3_s(x: Array) -> Array:
    q = _points("IQ3_S", 4, _index(_part(x, 2, 66), _bits(_part(x, 66, 74)))) * 2 + 1
    scale = f32(flat(_fields(_part(x, 106, 110), 4, 1), 3))
    return _scaled(_with_signs(q, _part(x, 74, 106)), _half(x, 0) * (scale * 2 + 1))


def _shifted(q: Array, down: Array) -> Array:
    """Returns `q`, [..., n], minus 1/8 where `down`, [..., runs] of bool, is set, plus 1/8 elsewhere."""
    delta = jnp.where(down, np.float32(-0.125), np.float32(0.125))
    return flat(split(q, delta.shape[-1], q.shape[-1] // delta.shape[-1]) + delta[..., None], 2)


def _iq1_s(x: Array) -> Array:
    words = _word(x, 34, 50, 2)
    q = _points("IQ1_S", 8, _index(_part(x, 2, 34), flat(_fields(words, 3, 1, 4), 3))) - 1
    scale = _half(x, 0) * (f32((words >> np.uint16(12)) & np.uint16(7)) * 2 + 1)
    return _scaled(_shifted(q, words >= np.uint16(0x8000)), scale)


def _iq1_m(x: Array) -> Array:
    words = _word(x, 48, 56, 2)
    # The upper four bits of the four words form an f16 number.
    quarters = (words >> np.uint16(12)) << np.arange(0, 16, 4, dtype=np.uint16)
    d = lax.reduce(quarters, np.uint16(0), lax.bitwise_or, (words.ndim - 1,))[..., None]
    d = f32(lax.bitcast_convert_type(d, jnp.float16))
    scale = d * (f32(flat(_fields(words, 3, 1, 4), 3)) * 2 + 1)
    high = flat(_fields(_part(x, 32, 48), 4, 1), 3)
    q = _points("IQ1_M", 8, _index(_part(x, 0, 32), high & np.uint8(7))) - 1
    return _scaled(_shifted(q, high >= np.uint8(8)), scale)


DEQUANTIZE = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_K": _q2_k,
    "q3_K": _q3_k,
    "q4_K": _q4_k,
    "q5_K": _q5_k,
    "q6_K": _q6_k,
    "iq2_xxs": _iq2_xxs,
    "iq2_xs": _iq2_xs,
    "iq3_xxs": _iq3_xxs,
    "iq1_s": _iq1_s,
    "iq4_nl": _iq4_nl,
    "iq3_s": _iq3_s,
    "iq2_s": _iq2_s,
    "iq4_xs": _iq4_xs,
    "iq1_m": _iq1_m,
    "tq1_0": _tq1_0,
    "tq2_0": _tq2_0,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "q1_0": _q1_0,
    "q2_0": _q2_0,
}
"""Dequantization by ggml's type name."""
