"""Two kernels in NKI with the same imports."""

import nki.isa as nisa
import nki.language as nl

import nki
import published.constants

from ..constants import FACTOR
from .utils.tiles import loaded


@nki.jit
def scaled(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = loaded(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=FACTOR)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit
def shifted(x):
    from published.core.utils import tiles

    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = tiles.loaded(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=published.constants.FACTOR)
    nisa.dma_copy(dst=out, src=tile)
    return out
