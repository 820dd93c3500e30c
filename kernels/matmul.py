"""Matrix products."""

from jax import lax

from kernelgen.emitter import emitter

from .common import grouped_dot, result
from .quants import floats


@emitter("mul_mat", types="float quantized, float")
def mul_mat(a, b, *, prec: int = 0, hint: int = 0, inputs, out):
    """The product of `b` and the transpose of `a`, accumulated in float32: dst[n, m] = sum over k of b[n, k] * a[m, k].

    As ggml's CPU backend does, `b` is first rounded to the type of `a` (F16, BF16). Quantized weights are dequantized to
    float32, and `b` stays float32. `prec` may ask for float32 accumulation, which is what happens always; `hint` says what the
    result is for and changes no number.

    a: [A3, A2, m, k] f32, f16, bf16 or quantized; b: [B3, B2, n, k] f32, f16 or bf16; A3 divides B3 and A2 divides B2, and each
    matrix of `a` serves that many of `b`. Returns [B3, B2, n, m] f32.
    """
    del prec, hint
    a = floats(a, inputs[0])
    return result(grouped_dot(a, lax.convert_element_type(b, a.dtype), 3), out)
