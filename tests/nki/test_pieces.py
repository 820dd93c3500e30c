"""Kernels that are run piece by piece: what they compute, and what is said of them, does not depend on where they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from kernelgen.languages.nki import kernel, loading, pieces

with loading.interpreter():
    import nki.isa as nisa
    import nki.language as nl

X = np.arange(64 * 4, dtype=np.float32).reshape(64, 4)


def _sums(x, places):
    """Adds rows of `x` at places that are known at run time, writes them back, and returns their sum and a row that stays."""
    result = nl.ndarray((1, 4), x.dtype, buffer=nl.shared_hbm)
    kept = nl.ndarray((1, 4), x.dtype, buffer=nl.shared_hbm)
    total = nl.zeros((1, 4), x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=kept, src=x[3:4, :])
    for i in range(6):
        at = nl.ndarray((1, 1), nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=at, src=places[i : i + 1, :])
        row = nl.ndarray((1, 4), x.dtype, buffer=nl.sbuf)
        view = x.ap(pattern=[[4, 1], [1, 4]], offset=0, scalar_offset=at, indirect_dim=0)
        nisa.dma_copy(dst=row, src=view)
        nisa.tensor_tensor(dst=total, data1=total, data2=row, op=nl.add)
    nisa.dma_copy(dst=result, src=total)
    return result, kept


def _places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32).reshape(-1, 1)


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_a_kernel_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(pieces, "PIECE", piece)
    places = _places(1, 5, 5, 9, 0, 63)
    total, kept = kernel.Kernel(_sums, older=False)(X, places)
    assert np.array_equal(total[0], X[places[:, 0]].sum(0)) and np.array_equal(kept, X[3:4])


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_an_index_outside_is_said_with_its_line_however_it_is_cut(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(pieces, "PIECE", piece)
    with pytest.raises(IndexError, match="index 256 is out of bounds") as caught:
        kernel.Kernel(_sums, older=False)(X, _places(1, 5, 64, 9, 0, 2))
    line = _sums.__code__.co_firstlineno + 11
    assert any(f"test_pieces.py:{line}" in note for note in caught.value.__notes__)
