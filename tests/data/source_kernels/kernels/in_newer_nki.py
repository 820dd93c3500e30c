"""A kernel of the generation whose instructions name their destinations."""

import nki.isa as nisa
import nki.language as nl

import nki


@nki.jit
def matmul(stationary, moving):
    out = nl.ndarray((stationary.shape[1], moving.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    a = nl.ndarray(stationary.shape, dtype=stationary.dtype, buffer=nl.sbuf)
    b = nl.ndarray(moving.shape, dtype=moving.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=a, src=stationary)
    nisa.dma_copy(dst=b, src=moving)
    sums = nl.ndarray(out.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=a, moving=b)
    result = nl.ndarray(out.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=sums)
    nisa.dma_copy(dst=out, src=result)
    return out
