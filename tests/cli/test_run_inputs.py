"""The random inputs of `kernelgen run`."""

import os
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from kernelgen.cli.run_kernel import _arrays, _described, _keywords
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


def write_header(path, shape):
    header = f"{{'descr':'<f4','fortran_order':False,'shape':({shape})}}\n".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ("-" * 9000 + "1,", "its header is too large"),
        ("(" * 9000 + ")" * 9000, r"Header info length \(\d+\) is large"),
        (f"{1 << 62},{1 << 62}", "array is too big"),
        (f"{1 << 40},", "mmap length is greater than file size"),
    ],
)
def test_an_array_with_a_hostile_header_is_refused(tmp_path, shape, reason):
    path = tmp_path / "x.npy"
    write_header(path, shape)
    with pytest.raises(KernelgenError, match=f"{path}: not a .npy file of numbers: {reason}[^\n]*$"):
        _described(str(path))


def test_an_array_of_text_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array(["a"]))
    with pytest.raises(KernelgenError, match="it has elements of type"):
        _described(str(tmp_path / "x.npy"))


def test_an_array_larger_than_memory_is_not_read(tmp_path):
    path = tmp_path / "x.npy"
    write_header(path, f"{1 << 40},")
    os.truncate(path, path.stat().st_size + (4 << 40))
    with pytest.raises(KernelgenError, match=r"the inputs need 4194304 MiB"):
        _arrays([str(path)], [_described(str(path))], 0)


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000])
def test_a_hostile_parameter_is_refused_in_one_line(value):
    with pytest.raises(KernelgenError, match=r"--param a=.{78}: expected NAME=VALUE") as caught:
        _keywords([f"a={value}"])
    assert len(str(caught.value)) < 200
