"""RMS norm in NKI. Rows lie on partitions; the scalar engine squares a row and sums the squares in one instruction."""

import nki.isa as nisa
import nki.language as nl
from jax import lax

import nki
from kernelgen.emitters import emitter
from kernelgen.languages.nki import inline

from .common import DTYPES, result
from .nki_common import PARTITIONS, blocks, hbm, loaded, sbuf


@nki.jit
def _rms_norm(x, eps, dtype):
    """Normalizes the rows of x, [rows, n], into `dtype`. It reads a row once: n elements of two tiles fit in a partition."""
    rows, n = x.shape
    y = hbm((rows, n), dtype)
    for start, p in blocks(rows, PARTITIONS):
        tile = loaded(x[start : start + p])
        scaled, total = sbuf((p, n)), sbuf((p, 1))
        nisa.activation_reduce(scaled, nl.square, tile, nl.add, total)
        nisa.tensor_scalar(total, total, nl.multiply, 1.0 / n, op1=nl.add, operand1=eps)
        nisa.activation(total, nl.rsqrt, total)
        done = sbuf((p, n), dtype)
        nisa.tensor_scalar(done, tile, nl.multiply, total)
        nisa.dma_copy(dst=y[start : start + p], src=done)
    return y


@emitter("rms_norm", types="float", language="nki", where="x_ne0 <= 12288")
def rms_norm(x, *, eps: float, out):
    """`x / sqrt(mean of squares + eps)` of each row; x: [ne3, ne2, ne1, ne0]."""
    rows = lax.reshape(x, (x.size // x.shape[3], x.shape[3]))
    return result(inline(_rms_norm, rows, eps=eps, dtype=DTYPES[out.dtype])[0], out)
