"""Kernels in NumPy: assignment to parameters, loops, dtypes, knobs, and refused code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from traced import run

from kernelgen.emitters.loading import load_file
from kernelgen.errors import KernelgenError
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.languages import Call
from kernelgen.languages.numpy import (
    all_reduce,
    constant,
    conv2d,
    conv3d,
    fori_loop,
    full,
    knob,
    rms_norm,
    softmax,
    topk,
    trace,
    zeros,
)
from kernelgen.lowering.function import lower_function

X = np.arange(24, dtype=np.float32).reshape(4, 6)


def lower(function: Callable[..., Any], *arrays: Any, targets: tuple[str, ...] = ()) -> Any:
    call = Call(tuple((a.shape, a.dtype.name) for a in arrays), targets=targets)
    return lower_function("numpy", function, call, function.__name__)


def refusal(function: Callable[..., Any], *arrays: Any, targets: tuple[str, ...] = ()) -> str:
    """Returns the error of a kernel, preceded by the number of lines from its `def`."""
    with pytest.raises(KernelgenError) as caught:
        lower(function, *arrays, targets=targets)
    (found,) = caught.value.diagnostics
    assert found.location is not None and found.location.file == __file__
    below = found.location.line - function.__code__.co_firstlineno
    return f"{below}: {found.message}" + (f" ({found.hint})" if found.hint else "")


# --- assignment -------------------------------------------------------------------------------------------------------


def test_a_parameter_that_is_assigned_to_is_an_aliased_result_after_those_returned() -> None:
    def kernel(x: Any, y: Any) -> Any:
        y[1:3, ::2] = x[1:3, :3]
        y[0] += 10
        x += 1  # another array, not the parameter
        return x * 2

    y = np.full((4, 6), 7, np.float32)
    lowered = lower(kernel, X, y)
    assert (lowered.outputs, lowered.aliases) == (("output0", "input1.updated"), {1: 1})
    result, new = run(kernel, X, y)
    want = y.copy()
    want[1:3, ::2] = X[1:3, :3]
    want[0] += 10
    np.testing.assert_array_equal(result, (X + 1) * 2)
    np.testing.assert_array_equal(new, want)


def test_a_changed_parameter_that_is_returned_is_one_result() -> None:
    def kernel(x: Any) -> Any:
        x[...] = x * 2
        return x, x[0]

    lowered = lower(kernel, X)
    assert (lowered.outputs, lowered.aliases) == (("input0.updated", "output1"), {0: 0})


def test_every_way_to_assign() -> None:
    def kernel(x: Any, i: Any) -> Any:
        made = np.zeros((4, 6), np.float32)
        made[0] = 1
        made[1, 1:3] = x[0, :2]
        made[2:, ::-2] = x[2:, :3]
        made[-1, -1] = x[1, 1]
        rows = np.copy(x)
        rows[i] = -1.0
        rows[[3, 0], 2] = np.array([8, 9])
        bounded = np.empty(6)
        bounded[:] = x[2]
        bounded[bounded > 15] = 15
        along = np.ones_like(x)
        np.put_along_axis(along, np.argmax(x, axis=1, keepdims=True), 5.0, axis=1)
        copied = np.zeros_like(x)
        np.copyto(copied, x, where=x > 5)
        into = np.zeros((4, 6))
        np.add(x, 1, out=into)
        np.multiply(x, 2, out=into, where=x > 20)
        stepped = np.copy(x)
        stepped[::2, 1::3] = x[:2, :2]
        stepped[i[0], ::2] = 3
        parted = np.zeros((2, 4, 6), np.float32)
        parted[:, [3, 0], ..., [1, 2]] = x[:2, :2]  # `...` without axes separates the index arrays
        into.T[0] = 100  # a slice is a copy
        return made, rows, bounded, along, copied, stepped, parted, into

    found = run(kernel, X, np.array([1, 2], np.int32))
    want = kernel(X.copy(), np.array([1, 2]))
    want[-1].T[0] = X[:, 0] + 1  # NumPy's views write through
    for have, expected in zip(found, want, strict=True):
        np.testing.assert_array_equal(have, expected)


def test_fori_loop_stays_a_loop_and_slices_by_its_index() -> None:
    def kernel(x: Any) -> Any:
        def body(i: Any, state: Any) -> Any:
            total, rows = state
            tile = x[i * 2 : i * 2 + 2]
            rows[2 * (1 - i) : 2 * (1 - i) + 2] = tile
            return total + np.sum(tile) + i + x[i, 0], rows

        return fori_loop(0, 2, body, (0.0, np.zeros((4, 6))))

    total, rows = run(kernel, X)
    assert total == X.sum() + 1 + X[0, 0] + X[1, 0]
    np.testing.assert_array_equal(rows, X[[2, 3, 0, 1]])
    assert b"while" in lower(kernel, X).hlo


# --- functions that NumPy does not have ---------------------------------------------------------------------------------


def test_functions_of_networks_in_a_kernel_and_outside() -> None:
    rng = np.random.default_rng(1)
    image, weight = rng.normal(size=(2, 4, 7, 6)).astype(np.float32), rng.normal(size=(6, 2, 3, 2)).astype(np.float32)
    ties = np.array([[3, -np.inf, 5, 5, 1], [-np.inf, -np.inf, 2, -np.inf, 2]], np.float32)

    def kernel(x: Any, w: Any, ties: Any) -> Any:
        return (
            softmax(x, axis=1),
            rms_norm(x, np.full(6, 2.0), eps=0.1),
            *topk(ties, 4),
            *topk(ties, 2, is_ascend=True),
            conv2d(x, w, np.arange(6), stride=(2, 1), padding=1, dilation=(1, 2), groups=2),
            conv3d(np.expand_dims(x, 2), np.expand_dims(w, 2), padding=(0, 1, 0), groups=2),
            all_reduce(ties, [[0]]),
            constant([1, 2]) + zeros(2, np.int32) + full(2, 3, np.int32),
        )

    found = run(kernel, image, weight, ties)
    e = np.exp(image - image.max(1, keepdims=True))
    np.testing.assert_allclose(found[0], e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(found[1], 2 * image / np.sqrt((image**2).mean(-1, keepdims=True) + 0.1), rtol=1e-5)
    np.testing.assert_array_equal(found[3], [[2, 3, 0, 4], [2, 4, 0, 1]])
    np.testing.assert_array_equal(found[2], np.take_along_axis(ties, found[3].astype(int), 1))
    np.testing.assert_array_equal(found[5], [[1, 4], [0, 1]])
    padded = np.pad(image, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, :, :, ::2]
    halves = windows.reshape(2, 2, 2, *windows.shape[2:]), weight.reshape(2, 3, 2, 3, 2)
    want = np.einsum("bgcyxhw,gkchw->bgkyx", *halves).reshape(2, 6, 4, 6) + np.arange(6)[:, None, None]
    np.testing.assert_allclose(found[6], want, rtol=1e-4, atol=1e-4)
    assert found[7].shape == (2, 6, 1, 7, 5)
    np.testing.assert_array_equal(found[8], ties)
    np.testing.assert_array_equal(found[9], [4, 5])
    for one, other in zip(kernel(image, weight, ties), found, strict=True):
        assert type(one) is np.ndarray
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# --- dtypes -------------------------------------------------------------------------------------------------------------

PROMOTED = """
bool 1 int32, bool 1.5 float32, int8 3 int8, int8 1.5 float32, float16 1.5 float16, bfloat16 3 bfloat16, float8_e4m3 2.0 float8_e4m3
int8 uint8 int16, int32 uint32 int32, int16 uint8 int16, int64 uint8 int32, int32 float16 float16, bool float16 float16
float16 bfloat16 float32, bfloat16 float32 float32, float64 float16 float32
"""


def test_promotion() -> None:
    rows = [row.split() for line in PROMOTED.split("\n") for row in line.split(",") if row]

    def kernel(x: Any) -> Any:
        def value(name: str) -> Any:
            return np.copy(x).astype(getattr(ml_dtypes, name, name)) if name[0].isalpha() else eval(name)

        pairs = [(value(one), value(other)) for one, other, _ in rows]
        return [r for one, other in pairs for r in (one + other, other * one)]

    dtypes = [r.dtype.name for r in run(kernel, np.zeros(1, np.int8))]
    assert dtypes == [expected for *_, expected in rows for _ in range(2)]


def test_halves_are_added_up_in_float32_and_stay_halves() -> None:
    def kernel(x: Any, y: Any) -> Any:
        return x @ y, np.sum(x), np.mean(x, axis=0), x * 1.5, x / 2, x + np.float32(1)

    x = np.full((2, 3000), 1, np.float16)
    found = run(kernel, x, x.T.copy())
    assert [r.dtype.name for r in found] == ["float16"] * 5 + ["float32"]
    assert found[0][0, 0] == 3000 and found[1] == 6000


def test_fp8_of_ieee_is_read_and_returned() -> None:
    x = np.array([0.1, -3, 240], np.float32).astype(ml_dtypes.float8_e4m3)
    (found,) = run(lambda x: x * x.dtype.type(0.5), x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, (x.astype(np.float32) / 2).astype(x.dtype))


# --- refusals ---------------------------------------------------------------------------------------------------------


def branches(x: Any) -> Any:
    y = x * 2
    if np.sum(y) > 3:
        return y
    return x


def repeats(x: Any) -> Any:
    while x[0, 0] < 3:
        x = x + 1
    return x


def escapes(x: Any) -> Any:
    def body(i: Any, v: Any) -> Any:
        x[0] = v[0]
        return v

    return fori_loop(0, 2, body, x * 1)


def hosts(x: Any) -> Any:
    table = np.arange(3)
    table[1] = x[0, 0]
    return x


BRANCH = "a branch or loop depends on values that are not known while the kernel is traced"
UNKNOWN = "int(), or an assignment to an element of an array of NumPy's, needs a value that is not known while the kernel is traced"
REFUSED: list[tuple[Callable[..., Any], str]] = [
    (
        branches,
        f"2: {BRANCH} (choose between values with np.where, and repeat with kernelgen.languages.numpy.fori_loop)",
    ),
    (repeats, f"1: {BRANCH}"),
    (escapes, "2: the body of fori_loop changes an array from outside of it"),
    (hosts, f"2: {UNKNOWN}"),
    (
        lambda x: float(x[0, 0]),
        "0: float(), or an assignment to an element of an array of NumPy's, needs a value that is not",
    ),
    (
        lambda x: np.arange(x[0, 0]),
        "0: an array that is not known while the kernel is traced can't be made one of NumPy's",
    ),
    (lambda x: np.sort(x), "0: np.sort is not supported in a kernel (use kernelgen.languages.numpy.topk)"),
    (
        lambda x: np.fft.fft(x),
        "0: np.fft.fft is not supported in a kernel (docs/reference/kernels-in-numpy.md lists the functions",
    ),
    (
        lambda x: np.nonzero(x),
        "0: np.nonzero is not supported in a kernel (use np.where(condition, x, y): how many there are is not",
    ),
    (
        lambda x: np.where(x > 2),
        "0: np.where needs a value that is not known while the kernel is traced (use np.where(condition, x, y))",
    ),
    (lambda x: x[x > 2], "0: an array can't be indexed by bools"),
    (lambda x: x + x[:, :5], "0: np.add: operands could not be broadcast together with shapes (4,6) (4,5)"),
    (lambda x: x + np.array([None] * 6), "0: np.add: "),
    (lambda x: x * 1j, "0: a kernel computes with numbers and bools, not with complex64"),
    (lambda x: np.add(x, 1, where=x > 2), "0: where= leaves elements undefined"),
    (
        lambda x: x.astype(ml_dtypes.float8_e4m3) + x.astype(ml_dtypes.float8_e5m2),
        "0: np.add: float8_e4m3 and float8_e5m2 have no common dtype (convert one of them: x.astype(np.float32))",
    ),
    (lambda x: np.reshape(x, (5, -1)), "0: np.reshape: cannot reshape array of size 24 into shape (5,newaxis)"),
    (lambda x: np.transpose(x, (0,)), "0: np.transpose: axes don't match array"),
    (lambda x: np.linalg.norm(x[0], ord="fro"), "0: np.linalg.norm: Invalid norm order 'fro' for vectors"),
    (lambda x: x[..., 0, ...], "0: an index: an index can only have a single ellipsis ('...')"),
    (lambda x: x[4], "0: an index: index 4 is out of bounds for axis 0 of size 4"),
    (lambda x: x[[0, 4]], "0: an index: an index from 0 to 4 is out of bounds for axis 0 of size 4"),
    (
        lambda x: fori_loop(0, 2, lambda i, v: np.stack([v, v]), x),
        "0: fori_loop: value 0 is float32[4, 6] in init, and the body makes it float32[2, 4, 6]",
    ),
    (lambda x: (x, "text"), "0: kernel '<lambda>': result 1 is str, not an array"),
]


@pytest.mark.parametrize(("function", "expected"), REFUSED)
def test_what_a_kernel_cannot_do_is_refused_at_its_line(function: Callable[..., Any], expected: str) -> None:
    found = refusal(function, X)
    assert found.startswith(expected), found


# --- knobs --------------------------------------------------------------------------------------------------------------


def test_knobs_are_recorded_and_change_no_byte() -> None:
    def hinted(x: Any, w: Any) -> Any:
        y = x @ w
        knob.knob(y).tile_op(tile_size=[4, 3, 2]).layout(mem_space="Psum", tile_size=[4, 3])
        z = knob(np.sum(y, axis=1), mem_space="Sbuf", partition_dim=0, reduction_tile=[3])
        e, h = z + 1, z * 2
        for part in (e, h):
            knob.knob(part).tile_op(tile_size=[2])
        knob.fuse(e, h)
        return knob(e * h, mem_space="SharedHbm", tile_size=4)

    def plain(x: Any, w: Any) -> Any:
        y = np.sum(x @ w, axis=1)
        return (y + 1) * (y * 2)

    w = np.ones((6, 3), np.float32)
    with_knobs, without = lower(hinted, X, w), lower(plain, X, w)
    assert canonicalize(with_knobs.hlo, with_knobs.inputs) == canonicalize(without.hlo, without.inputs)
    assert without.notes == {}
    first = hinted.__code__.co_firstlineno
    assert with_knobs.notes["knobs"][:2] == [
        {"array": "float32[4, 3]", "tile_op": {"tile_size": [4, 3, 2]}, "line": first + 2},
        {"array": "float32[4, 3]", "layout": {"mem_space": "Psum", "tile_size": [4, 3]}, "line": first + 2},
    ]
    assert with_knobs.notes["knobs"][-2] == {"fuse": 2, "tile_size": [2], "loops": [4], "line": first + 7}
    np.testing.assert_array_equal(hinted(X, w), plain(X, w))


def fuses_unequal(x: Any) -> Any:
    y, z = x + 1, x[:2] + 1
    knob.knob(y).tile_op(tile_size=[2, 6])
    knob.knob(z).tile_op(tile_size=[2, 6])
    knob.fuse(y, z)


REFUSED_KNOBS: list[tuple[Callable[..., Any], str]] = [
    (lambda x: knob(x * 2, mem_space="Sram"), "mem_space: 'Sram' is not one of Hbm, Psum, Sbuf, SharedHbm"),
    (lambda x: knob(x, partition_dim=2), "partition_dim: 2 is not a dimension of an array of rank 2"),
    (
        lambda x: knob(x @ x.T, partition_dim=1),
        "partition_dim: 1 of an array that is not made by an elementwise operation",
    ),
    (lambda x: knob.knob(x).tile_op(tile_size=[4, 6]), "tile_op: a parameter is not made by an operation"),
    (
        lambda x: knob.knob(x.T).tile_op(tile_size=[4, 6]),
        "tile_size: entry 1 is 6, and the loops of this copy are [6, 4]",
    ),
    (lambda x: knob.knob(x + 1).tile_op(tile_size=[4, 0]), "tile_size: expected numbers of at least 1, not [4, 0]"),
    (
        lambda x: knob.knob(x + 1).tile_op(tile_size=[4, 7]),
        "tile_size: entry 1 is 7, and the loops of this elementwise are [4, 6]",
    ),
    (
        lambda x: knob.knob(x @ x.T).tile_op(tile_size=[4, 4]),
        "tile_size: 2 entries for 3: the loops of this matmul are [4, 4, 6]",
    ),
    (
        lambda x: knob.knob(x[0] @ x.T).tile_op(tile_size=4),
        "tile_size: 1 entries for 3: the loops of this matmul are [1, 4, 6]",
    ),
    (
        lambda x: knob(x + 1, reduction_tile=4),
        "reduction_tile: this array is not made by a reduction or a matrix product",
    ),
    (
        lambda x: knob(np.zeros((4, 300)) + 1, mem_space="Sbuf", partition_dim=1, tile_size=[4, 256]),
        "tile_size: 256 elements of dimension 1 lie across partitions, and there are 128",
    ),
    (
        lambda x: knob(np.zeros((4, 300, 2)) + 1, mem_space="Psum", tile_size=[4, 300, 2]),
        "tile_size: 2400 bytes in a partition, and a bank of PSUM has 2048",
    ),
    (
        lambda x: knob(np.zeros((4, 50000)) + 1, mem_space="Sbuf", tile_size=[4, 50000]),
        "tile_size: 200000 bytes in a partition, and SBUF of trn1 has 180224",
    ),
    (lambda x: knob.fuse(x + 1), "knob.fuse joins the loops of two arrays or more, not of 1"),
    (fuses_unequal, "knob.fuse: the loops of array 1 are [2, 6] by [2, 6], those of array 0 are [4, 6] by [2, 6]"),
]


@pytest.mark.parametrize(("function", "expected"), REFUSED_KNOBS)
def test_a_knob_beyond_a_limit_is_refused_at_its_line(function: Callable[..., Any], expected: str) -> None:
    found = refusal(function, X, targets=("trn1", "trn2"))
    assert found.startswith(f"{4 if function is fuses_unequal else 0}: {expected}"), found


def test_a_kernel_computes_without_kernelgen() -> None:
    @trace(input_specs=[((4, 6), "f32")])
    def kernel(x: Any) -> Any:
        return fori_loop(0, 3, lambda i, v: v + i, knob(x, mem_space="Sbuf"))

    np.testing.assert_array_equal(kernel(X), X + 3)


# --- imports ----------------------------------------------------------------------------------------------------------

PUBLISHED = """
import numpy as np
from nkigen import trace
from nkigen.apis import fori_loop, knob
from nkipy.core import tensor_apis
from nkipy.core.trace import NKIPyKernel


@trace(input_specs=[((4, 6), "f32")])
def halves(x):
    return fori_loop(0, 3, lambda i, y: y * 0.5, knob(np.abs(x), partition_dim=0))


@NKIPyKernel.trace
def probabilities(x):
    return tensor_apis.softmax(x)
"""


def test_published_kernels_import_nkipy_and_nkigen_though_they_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("nkipy", "nkigen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('what is installed is not for tracing')")
    (tmp_path / "kernels.py").write_text(PUBLISHED)
    for name, expected in (("halves", np.abs(X) / 8), ("probabilities", np.exp(X) / np.exp(X).sum(-1, keepdims=True))):
        language, function = load_file(tmp_path / "kernels.py", name)
        assert language == "numpy"
        (found,) = run(function, X)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not {"nkipy", "nkigen"} & {name.partition(".")[0] for name in sys.modules}
