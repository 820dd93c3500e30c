"""Products by quantized weights in the simulator's library use the same elements as the HLO, bit by bit."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.hlo import execute, proto
from kernelgen.hlo.cpu import client
from kernelgen.simulator import bounds, forms, weights
from kernelgen.spec.op_kernel import KernelSpec

Array = np.ndarray[Any, Any]

M = 96
VECTORS = ("avx512", "avx2")
"""The widest vectors that a call may use, in the order of the library's numbers for them (`vectors` in weights.cpp)."""
HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(Path("/proc/cpuinfo").read_text().split())
HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_K", "q5_K"), (0, 2)),
    **{"q2_K": (80, 82), "q3_K": (108,), "q6_K": (208,), "mxfp4": (), "nvfp4": ()},
    **dict.fromkeys(("iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "q1_0", "q2_0"), (0,)),
    **{"tq1_0": (52,), "tq2_0": (64,), "iq1_m": ()},
}
"""The offsets of the f16 numbers in a block, by type; iq1_m's number is in the upper halves of four bytes."""


@pytest.fixture(scope="module", autouse=True)
def loaded(library: Path) -> None:
    client()
    if not weights.load(str(library)):
        pytest.skip("the processor has no AVX2")


def emitted(op: str, *inputs: str, output: str, **params: int) -> bytes:
    spec = KernelSpec.make(op, [TensorDesc.parse(t) for t in inputs], TensorDesc.parse(output), params)
    chosen = Catalog([builtin_library()]).find(op)
    assert chosen is not None
    return lowering.emit(spec, load_function(*chosen))


def columns(kind: str) -> int:
    return 3 * TYPES[kind].block


def blocks(kind: str, m: int, odd: bool = False) -> Array:
    """Returns random blocks of `m` rows; with `odd` some scales are infinite or NaN."""
    random = np.random.default_rng(1)
    data = random.integers(0, 256, (m, columns(kind) // TYPES[kind].block, TYPES[kind].size), dtype=np.uint8)
    if kind == "mxfp4":  # the exponent
        data[..., 0] = 110 + data[..., 0] % 16
    for at in HALVES[kind]:
        numbers = random.standard_normal(data.shape[:-1]).astype(np.float16)
        if odd:
            special = np.array([0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x0001, 0x83FF], np.uint16).view(np.float16)
            numbers[::2, 0] = random.choice(special, len(numbers[::2]))
        data[..., at : at + 2] = numbers[..., None].view(np.uint8)
    if kind == "iq1_m":
        numbers = random.standard_normal(data.shape[:-1]).astype(np.float16).view(np.uint16)
        for i, at in enumerate((49, 51, 53, 55)):
            data[..., at] = (data[..., at] & 15) | ((numbers >> 4 * i) & 15) << 4
    return data


def products(kind: str, n: int, **params: int) -> bytes:
    k = columns(kind)
    return emitted("mul_mat", f"({k},{M},1,1)/{kind}", f"({k},{n},1,1)/f32", output=f"({M},{n},1,1)/f32", **params)


def calls(hlo: bytes) -> int:
    found = [i for c in proto.parse(hlo).computations for i in c.instructions]
    return sum(i.opcode == "custom-call" and i.custom_call_target == weights.TARGET for i in found)


@pytest.mark.parametrize("kind", weights.TYPES)
def test_products_are_those_of_the_hlo(kind: str) -> None:
    hlo = products(kind, 3)
    rewritten = weights.rewrite(hlo)
    assert calls(hlo) == 0
    assert calls(rewritten) == 1
    rows = np.random.default_rng(2).standard_normal((1, 1, 3, columns(kind)), dtype=np.float32)
    arrays = [blocks(kind, M).reshape(1, 1, M, -1, TYPES[kind].size), rows]
    (expected,) = execute.run(hlo, arrays)
    (actual,) = execute.run(rewritten, arrays)
    # The order of sums changes results by about 1e-7; an element with another rounding would change by 4e-3 of its
    # value.
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("kind", weights.TYPES)
def test_elements_are_gguf_s_rounded_to_bfloat16(kind: str, vectors: str, library: Path) -> None:
    """A row that is 1 at one place and 0 elsewhere selects one element of each row of the matrix."""
    k = columns(kind)
    data = blocks(kind, M)
    one = np.eye(k, dtype=np.float32)
    # One row, and numbers of rows that are not powers of two.
    for rows in (*np.split(one[:5], 5), *np.array_split(one, 7)):
        actual = call(library, kind, data, rows, vectors=vectors)
        np.testing.assert_array_equal(actual, rows @ elements(kind, data).T)


@pytest.mark.parametrize("kind", weights.TYPES)
def test_vectors_of_any_width_and_any_number_of_rows_give_the_same_bits(kind: str, library: Path) -> None:
    if not HAS_AVX512:
        pytest.skip("the processor has no AVX-512")
    rows = np.random.default_rng(3).standard_normal((7, columns(kind)), dtype=np.float32)
    data = blocks(kind, M)
    together = call(library, kind, data, rows)
    alone = np.concatenate([call(library, kind, data, row) for row in np.split(rows, len(rows))])
    np.testing.assert_array_equal(together, call(library, kind, data, rows, vectors="avx2"))
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("vectors", VECTORS)
@pytest.mark.parametrize("kind", weights.TYPES)
def test_one_row_alone_gives_the_bits_that_it_gives_among_others(kind: str, vectors: str, library: Path) -> None:
    """Single rows have their own functions."""
    rows = np.random.default_rng(4).standard_normal((3, columns(kind)), dtype=np.float32)
    data = blocks(kind, M)
    alone = [call(library, kind, data, row, vectors=vectors) for row in np.split(rows, len(rows))]
    np.testing.assert_array_equal(np.concatenate(alone), call(library, kind, data, rows, vectors=vectors))


def test_the_environment_asks_for_narrower_vectors(library: Path) -> None:
    program = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).nrt_simulator_vectors())"
    for asked, expected in (("avx2", 8), ("avx512", 16 if HAS_AVX512 else 8), ("", 16 if HAS_AVX512 else 8)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(library)],
            check=True,
            env=os.environ | {"NEURON_SIMULATOR_VECTORS": asked},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert int(done.stdout) == expected, asked


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q6_K", "iq1_s", "iq2_xs", "iq3_s", "tq1_0", "q2_0"])
def test_scales_that_are_no_numbers(kind: str, library: Path) -> None:
    data = blocks(kind, M, odd=True)
    rows = np.ones((1, columns(kind)), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = elements(kind, data).sum(1)
    assert np.isnan(expected).any()
    assert np.isfinite(expected).any()
    for vectors in VECTORS:
        (actual,) = call(library, kind, data, rows, vectors=vectors)
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))


def test_threads_share_the_rows_of_a_large_matrix(library: Path) -> None:
    """Runs in a process of its own, because threads start once; several calls at a time."""
    program = """
import concurrent.futures, ctypes, sys
import numpy as np
function = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
m, k = 4099, 512
def call(seed):
    random = np.random.default_rng(seed)
    numbers = random.integers(-127, 128, (m, k // 32, 32), dtype=np.int8)
    one = np.full((m, k // 32, 1), 1, np.float16).view(np.uint8).reshape(m, k // 32, 2)
    data = np.concatenate([one, numbers.view(np.uint8)], axis=2)
    x, y = random.integers(-3, 4, (1, k)).astype(np.float32), np.zeros((1, m), np.float32)
    operands = (ctypes.c_void_p * 2)(data.ctypes.data, x.ctypes.data)
    options = sys.argv[3].encode()
    function(ctypes.c_void_p(y.ctypes.data), operands, options, ctypes.c_size_t(len(options)), None)
    assert (y == x @ numbers.reshape(m, k).T.astype(np.float32)).all()
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    list(pool.map(call, range(12)))
"""
    options = f"{weights.TYPES.index('q8_0')} 0 4099 512 1 0 "
    subprocess.run(
        [sys.executable, "-c", program, str(library), weights.TARGET, options],
        check=True,
        env=os.environ | {"PJRT_NPROC": "3"},
        timeout=120,
    )


def test_more_rows_are_left_to_xla() -> None:
    assert calls(weights.rewrite(products("q4_0", weights.MAX_ROWS))) == 1
    hlo = products("q4_0", weights.MAX_ROWS + 1)
    assert weights.rewrite(hlo) == hlo


@pytest.mark.parametrize("kind", weights.TYPES)
def test_a_product_in_float32_is_left_to_xla(kind: str) -> None:
    hlo = products(kind, 1, prec_src1=10)
    assert weights.rewrite(hlo) == hlo


@pytest.mark.parametrize("kind", ["q4_0", "q6_K", "iq2_xxs"])
def test_each_expert_of_mul_mat_id_is_a_weight(kind: str) -> None:
    k, experts = columns(kind), 5
    hlo = emitted(
        "mul_mat_id",
        f"({k},{M},{experts},1)/{kind}",
        f"({k},1,2,1)/f32",
        "(2,2,1,1)/i32",
        output=f"({M},2,2,1)/f32",
    )
    rewritten = weights.rewrite(hlo)
    assert calls(rewritten) == 1
    rows = np.random.default_rng(2).standard_normal((1, 2, 1, k), dtype=np.float32)
    arrays = [
        blocks(kind, experts * M).reshape(1, experts, M, -1, TYPES[kind].size),
        rows,
        np.array([3, 1, 0, 3], np.int32).reshape(1, 1, 2, 2),
    ]
    (expected,) = execute.run(hlo, arrays)
    (actual,) = execute.run(rewritten, arrays)
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["q4_0", "iq2_xxs"])
def test_what_unpacks_them_otherwise_stays_as_it_is(kind: str) -> None:
    """Changes each constant of the HLO, a lattice's too: the library has no function for it."""
    hlo = products(kind, 1)
    assert calls(weights.rewrite(hlo)) == 1
    changed = 0
    for computation, instruction in instructions(hlo):
        module = proto.parse(hlo, weights.Module)
        literal = module.computations[computation].instructions[instruction].literal
        if len(literal.f32s) == 4:
            literal.f32s = np.float32(7).tobytes()
        elif literal.u8s:
            literal.u8s = bytes(b ^ 1 for b in literal.u8s)
        elif literal.u16s:
            literal.u16s = literal.u16s[:-1] + bytes([literal.u16s[-1] ^ 1])
        else:
            continue
        changed += 1
        assert calls(weights.rewrite(proto.serialize(module))) == 0
    assert changed >= 3


@pytest.mark.parametrize("kind", ["q4_0", "iq2_xxs"])
def test_another_slice_of_a_block_is_not_recognized_as_the_types_own(kind: str) -> None:
    hlo = products(kind, 1)
    assert calls(weights.rewrite(hlo)) == 1
    n = len(_slices(proto.parse(hlo, weights.Module)))
    assert n == {"q4_0": 2, "iq2_xxs": 4}[kind]  # two of iq2_xxs belong to another slice
    for i in range(n):
        module = proto.parse(hlo, weights.Module)
        last = _slices(module)[i].slice_dimensions[-1]
        by = -1 if last.start else 1
        last.start += by
        last.limit += by
        assert calls(weights.rewrite(proto.serialize(module))) == 0, i


def _slices(module: Any) -> list[Any]:
    return [i for c in module.computations for i in c.instructions if i.opcode == "slice"]


@pytest.mark.parametrize("kind", weights.POINTS)
def test_indices_of_a_lattice_are_not_checked(kind: str) -> None:
    """Finding the largest index would take longer than the product."""
    hlo = products(kind, 1)
    assert len(bounds.check(hlo).names) == 1
    assert bounds.check(weights.rewrite(hlo)).names == ()


def test_there_is_a_form_of_each_type_for_both_ops() -> None:
    assert set(forms.FORMS.values()) == set(weights.TYPES)
    assert sorted(forms.FORMS.values()) == sorted([*weights.TYPES, *weights.TYPES])


def test_a_library_without_the_functions_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_loaded", False)
    assert not weights.load("libc.so.6")
    assert not weights.load("/there/is/none.so")
    hlo = products("q4_0", 1)
    assert weights.rewrite(hlo) == hlo


def test_without_avx2_products_are_left_to_xla(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    monkeypatch.setattr(weights, "_loaded", False)
    monkeypatch.setattr(weights, "_has_avx2", lambda: False)
    assert not weights.load(str(library))
    hlo = products("q4_0", 1)
    assert weights.rewrite(hlo) == hlo


def instructions(hlo: bytes) -> list[tuple[int, int]]:
    """Returns the places of a module's constants."""
    computations = proto.parse(hlo).computations
    return [
        (c, i)
        for c, computation in enumerate(computations)
        for i, one in enumerate(computation.instructions)
        if one.opcode == "constant"
    ]


def elements(kind: str, data: Array) -> Array:
    """Returns the elements of blocks as gguf decodes them, rounded to bfloat16: [m, k] f32; `fields` decodes the types
    that gguf does not.
    """
    if kind in ("q1_0", "q2_0"):
        return fields(data, 1 if kind == "q1_0" else 2).astype(ml_dtypes.bfloat16).astype(np.float32)
    rows = gguf.quants.dequantize(data.reshape(len(data), -1), gguf.GGMLQuantizationType[kind.upper()])
    return rows.reshape(len(data), -1).astype(ml_dtypes.bfloat16).astype(np.float32)


def fields(data: Array, bits: int) -> Array:
    """Returns the elements of Q1_0 (-d and d) or Q2_0 (-d to 2 d): an f16 number d, then numbers of some bits, lowest first."""
    d = np.ascontiguousarray(data[..., :2]).view(np.float16).astype(np.float32)
    numbers = (data[..., 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & (2**bits - 1)
    numbers = numbers.reshape(*data.shape[:-1], -1).astype(np.float32)
    return ((2 * numbers - 1 if bits == 1 else numbers - 1) * d).reshape(len(data), -1)


@functools.cache
def points(kind: str) -> Array:
    """Returns the library's table of a type's lattice: for each point the code of element i at bit 4 i, [points] u32."""
    if kind not in weights.POINTS:
        return np.zeros(0, np.uint32)
    quant = getattr(gguf.quants, kind.upper())
    quant.init_grid()
    codes = np.searchsorted(quant.grid_map, quant.grid.reshape(quant.grid_shape))
    return sum(codes[:, i].astype(np.uint32) << np.uint32(4 * i) for i in range(codes.shape[1]))


def call(library: Path, kind: str, data: Array, rows: Array, *, vectors: str = "avx512") -> Array:
    """Calls the function as XLA does, with the widest vectors that the processor has and `vectors` allows."""
    n, k = rows.shape
    rows = np.ascontiguousarray(rows)
    out = np.empty((n, len(data)), np.float32)
    operands = (ctypes.c_void_p * 3)(data.ctypes.data, rows.ctypes.data, points(kind).ctypes.data)
    options = "".join(f"{i} " for i in (weights.TYPES.index(kind), 0, len(data), k, n, VECTORS.index(vectors))).encode()
    function = getattr(ctypes.CDLL(str(library)), weights.TARGET)
    function(ctypes.c_void_p(out.ctypes.data), operands, options, ctypes.c_size_t(len(options)), None)
    return out
