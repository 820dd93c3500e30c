"""Matrix products."""

import jax.numpy as jnp
from jax import lax
from kernelgen.emitter import emitter

from .common import f32, result


@emitter("mul_mat")
def mul_mat(a, b, *, prec: int, hint: int, inputs, out):
    """dst[m, n] = sum over k of a[k, m] * b[k, n], in GGML's order of dimensions, accumulated in float32.

    As ggml's CPU backend does, `b` is first rounded to the type of `a` (F16, BF16). `prec` asks for float32 accumulation, which
    is what happens always; `hint` says how a result is used and changes nothing.

    Args:
        a: [A3, A2, m, k] f32, f16 or bf16.
        b: [B3, B2, n, k] f32, f16 or bf16; A2 divides B2, A3 divides B3: each matrix of `a` serves that many of `b`.

    Returns:
        [B3, B2, n, m] f32.
    """
    b = lax.convert_element_type(b, a.dtype)
    a3, a2, m, k = a.shape
    b3, b2, n, _ = b.shape
    # Batches of `b` that share a matrix of `a` become axes of their own, so `a` is read where it lies and never repeated.
    b = lax.reshape(b, (a3, b3 // a3, a2, b2 // a2, n, k))
    y = lax.dot_general(
        b, a, (((5,), (3,)), ((0, 2), (0, 1))), preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST
    )  # [a3, a2, b3/a3, b2/a2, n, m]
    return result(lax.transpose(y, (0, 2, 1, 3, 4, 5)), out)
