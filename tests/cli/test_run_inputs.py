"""The random inputs of `kernelgen run`."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from kernelgen.cli.run_kernel import _arrays
from kernelgen.errors import KernelgenError
from kernelgen.hlo import judge


def test_inputs_that_do_not_fit_are_refused_before_they_are_made():
    with pytest.raises(KernelgenError, match=r"the inputs need 400000000 MiB, and there are [0-9]+ MiB of memory"):
        _arrays(["f32[10000000,10485760]"], [((10000000, 10485760), "float32")], 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_values_are_those_of_the_whole_array_made_at_once(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    rng = np.random.default_rng(3)
    size = (3, (1 << 20) - 7)
    wanted = (rng.normal(size=size) if dtype in ("float32", "bfloat16") else rng.integers(0, 2, size)).astype(kind)
    assert np.array_equal(judge.random(size, dtype, 3), wanted)


def test_values_of_f32_are_not_made_as_doubles():
    tracemalloc.start()
    made = judge.random((8, 1 << 20), "float32", 0)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < made.nbytes + (10 << 20)
