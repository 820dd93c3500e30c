"""Products by quantized weights, computed by the simulator's library: of the same elements, bit by bit."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

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
from kernelgen.simulator import forms, weights
from kernelgen.spec.op_kernel import KernelSpec

Array = np.ndarray[Any, Any]

M = 96
HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_K", "q5_K"), (0, 2)),
    **{"q2_K": (80, 82), "q3_K": (108,), "q6_K": (208,), "mxfp4": ()},
}
"""Where the f16 numbers are in a block, by type."""


@pytest.fixture(scope="module", autouse=True)
def loaded(library: Path) -> None:
    client()
    assert weights.load(str(library))


def emitted(op: str, *inputs: str, output: str) -> bytes:
    spec = KernelSpec.make(op, [TensorDesc.parse(t) for t in inputs], TensorDesc.parse(output), {})
    chosen = Catalog([builtin_library()]).find(op)
    assert chosen is not None
    return lowering.emit(spec, load_function(*chosen))


def columns(kind: str) -> int:
    return 3 * TYPES[kind].block


def blocks(kind: str, *shape: int, odd: bool = False) -> Array:
    """Returns random blocks; `odd`: whose numbers are also infinite, or none."""
    random = np.random.default_rng(1)
    data = random.integers(0, 256, (*shape, columns(kind) // TYPES[kind].block, TYPES[kind].size), dtype=np.uint8)
    if kind == "mxfp4":  # exponents; with the smallest ones elements are denormal, which XLA takes for 0
        data[..., 0] = 2 + data[..., 0] % 254 if odd else 110 + data[..., 0] % 16
    for at in HALVES[kind]:
        numbers = random.standard_normal(data.shape[:-1]).astype(np.float16)
        if odd:
            special = np.array([0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x0001, 0x83FF], np.uint16).view(np.float16)
            numbers[..., 0] = random.choice(special, numbers.shape[:-1])
        data[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return data


def products(kind: str, n: int) -> bytes:
    k = columns(kind)
    return emitted("mul_mat", f"({k},{M},1,1)/{kind}", f"({k},{n},1,1)/f32", output=f"({M},{n},1,1)/f32")


def calls(hlo: bytes) -> int:
    found = [i for c in proto.parse(hlo).computations for i in c.instructions]
    return sum(i.opcode == "custom-call" and i.custom_call_target == weights.TARGET for i in found)


@pytest.mark.parametrize("n", [1, 3, weights.MAX_ROWS + 1])
@pytest.mark.parametrize("kind", weights.TYPES)
def test_products_are_those_of_the_hlo(kind: str, n: int) -> None:
    hlo = products(kind, n)
    rewritten = weights.rewrite(hlo)
    assert calls(hlo) == 0
    assert calls(rewritten) == 1
    rows = np.random.default_rng(2).standard_normal((1, 1, n, columns(kind)), dtype=np.float32)
    arrays = [blocks(kind, 1, 1, M), rows]
    (expected,) = execute.run(hlo, arrays)
    (actual,) = execute.run(rewritten, arrays)
    # Of such sums what differs by their order is some 1e-7, and an element that is rounded otherwise would be 4e-3 of its own.
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("n", [weights.MAX_ROWS, weights.MAX_ROWS + 1])
@pytest.mark.parametrize("kind", weights.TYPES)
def test_elements_have_the_bits_that_the_hlo_gives_them(kind: str, n: int) -> None:
    """A row that is 1 at one place and 0 elsewhere gives an element."""
    k = columns(kind)
    rewritten = execute.compile_for_cpu(weights.rewrite(products(kind, n)))
    data = blocks(kind, 1, 1, M)
    expected = rounded(elements(kind, data))
    for first in range(0, k, n):
        rows = np.eye(n, k, first, np.float32).reshape(1, 1, n, k)
        (actual,) = rewritten.run([data, rows])
        wanted = np.zeros((n, M), np.float32)
        wanted[: k - first] = expected[:, first : first + n].T
        np.testing.assert_array_equal(actual.reshape(n, M), wanted)


@pytest.mark.parametrize("portable", [0, 1], ids=["this processor", "any processor"])
@pytest.mark.parametrize("kind", weights.TYPES)
def test_blocks_whose_numbers_are_no_numbers(kind: str, portable: int, library: Path) -> None:
    data = blocks(kind, 1, 1, M, odd=True)
    expected = elements(kind, data)
    for round_, wanted in ((0, expected), (1, rounded(expected))):
        np.testing.assert_array_equal(call(library, kind, data, portable=portable, rounded=round_), wanted)


@pytest.mark.parametrize("kind", weights.TYPES)
def test_any_processor_computes_the_same(kind: str, library: Path) -> None:
    data = blocks(kind, 1, 1, M)
    elements = rounded(call(library, kind, data, portable=1, rounded=0))
    for n, portable in itertools.product((1, 2, 7), (0, 1)):
        rows = np.random.default_rng(2).standard_normal((n, columns(kind)), dtype=np.float32)
        expected = rows @ elements.T
        actual = call(library, kind, data, rows, portable=portable)
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["q4_0", "q6_K"])
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
    arrays = [blocks(kind, 1, experts, M), rows, np.array([3, 1, 0, 3], np.int32).reshape(1, 1, 2, 2)]
    (expected,) = execute.run(hlo, arrays)
    (actual,) = execute.run(rewritten, arrays)
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def test_what_unpacks_them_otherwise_stays_as_it_is() -> None:
    """Of each constant of the HLO another value: no function computes that."""
    hlo = products("q4_0", 1)
    changed = 0
    for computation, instruction in instructions(hlo):
        module = proto.parse(hlo, weights.Module)
        literal = module.computations[computation].instructions[instruction].literal
        if len(literal.f32s) == 4:
            literal.f32s = np.float32(7).tobytes()
        elif literal.u8s:
            literal.u8s = bytes(b ^ 1 for b in literal.u8s)
        else:
            continue
        changed += 1
        assert calls(weights.rewrite(proto.serialize(module))) == 0
    assert changed >= 3


def test_another_slice_of_a_block_is_not_taken_for_the_one_of_the_type() -> None:
    hlo = products("q4_0", 1)
    module = proto.parse(hlo, weights.Module)
    slices = [i for c in module.computations for i in c.instructions if i.opcode == "slice"]
    assert slices
    for one in slices:
        one.slice_dimensions[-1].start += 0 if one.slice_dimensions[-1].start else 1
        one.slice_dimensions[-1].limit += 0 if one.slice_dimensions[-1].limit == TYPES["q4_0"].size else 1
    assert calls(weights.rewrite(proto.serialize(module))) == 0


def test_there_is_a_form_of_each_type_for_both_ops() -> None:
    assert set(forms.FORMS.values()) == set(weights.TYPES)
    assert sorted(forms.FORMS.values()) == sorted([*weights.TYPES, *weights.TYPES])


def test_a_library_without_the_functions_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_loaded", False)
    assert not weights.load("libc.so.6")
    assert not weights.load("/there/is/none.so")
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
    """Returns what the emitter makes of blocks: [m, k] f32."""
    k = columns(kind)
    hlo = emitted("cpy", f"({k},{M},1,1)/{kind}", f"({k},{M},1,1)/f32", output=f"({k},{M},1,1)/f32")
    arrays = [data, np.zeros((1, 1, M, k), np.float32)]
    return execute.run(hlo, arrays[: len(execute.parameters(hlo))])[0].reshape(M, k)


def rounded(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def call(library: Path, kind: str, data: Array, rows: Array | None = None, *, portable: int, rounded: int = 1) -> Array:
    """Calls the function as XLA does; with `portable` that for any processor."""
    k, n = columns(kind), 0 if rows is None else len(rows)
    out = np.empty((n or M, M if n else k), np.float32)
    operands = (ctypes.c_void_p * 2)(data.ctypes.data, 0 if rows is None else rows.ctypes.data)
    options = "".join(f"{number} " for number in (weights.TYPES.index(kind), rounded, 0, M, k, n, portable)).encode()
    function = getattr(ctypes.CDLL(str(library)), weights.TARGET)
    function(ctypes.c_void_p(out.ctypes.data), operands, options, ctypes.c_size_t(len(options)), None)
    return out
