"""Sorting rows, and finding their largest elements."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_harness import check, emit, spec

from kernelgen.hlo import execute, proto
from kernelgen.hlo.lint import lint
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import TARGETS

SPECIAL = np.array(
    [0, -0.0, np.inf, 1e-40, -np.inf, -1e-40, 3.4e38, 0, -3.4e38, np.inf, -1, 1, -np.inf, 1.0000001], np.float32
)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 60, 64, 65, 1025])
def test_argsort(n: int, order: int) -> None:
    check(spec("argsort", [f"({n},2,3,1)/f32"], f"({n},2,3,1)/i32", order=order))


@pytest.mark.parametrize("order", [0, 1])
def test_equal_elements_keep_their_order(order: int) -> None:
    x = np.random.default_rng(5).integers(0, 5, (3, 77)).astype(np.float32)
    check(spec("argsort", ["(77,3,1,1)/f32"], "(77,3,1,1)/i32", order=order), src0=x)


@pytest.mark.parametrize("order", [0, 1])
def test_the_ends_of_the_numbers_sort(order: int) -> None:
    # Infinities occur beside the padding of a row; subnormal numbers may be flushed to 0, and then keep their order.
    x = np.where(np.abs(SPECIAL) == np.float32(1e-40), 0, SPECIAL)
    n = len(x)
    check(spec("argsort", [f"({n},1,1,1)/f32"], f"({n},1,1,1)/i32", order=order), src0=x)


def test_argsort_of_a_view() -> None:
    check(spec("argsort", ["(5,4,3,2)/f32/(16,4,80,240)"], "(5,4,3,2)/i32", order=1))


@pytest.mark.parametrize("op, params", [("argsort", {"order": 0}), ("argsort", {"order": 1}), ("top_k", {})])
def test_nan_does_not_lead_out_of_the_row(op: str, params: dict[str, int]) -> None:
    """A NaN may be at any place, but every index is in range and occurs once."""
    x = np.random.default_rng(6).normal(size=21).astype(np.float32)
    x[[2, 3, 11]] = np.nan
    x[[5, 6]] = np.inf
    n = 21 if op == "argsort" else 4
    y = run(spec(op, ["(21,1,1,1)/f32"], f"({n},1,1,1)/i32", **params), x)
    assert len(set(y)) == n
    assert set(y) <= set(range(21))


def run(kernel: KernelSpec, x: np.ndarray) -> list[int]:
    (y,) = execute.run(emit(kernel), [x.reshape(1, 1, 1, -1)])
    return y.ravel().tolist()


@pytest.mark.parametrize(
    "n, k", [(1, 1), (2, 1), (2, 2), (3, 2), (16, 15), (60, 7), (1023, 1000), (1025, 1025), (4096, 3)]
)
def test_top_k(n: int, k: int) -> None:
    check(spec("top_k", [f"({n},2,3,1)/f32"], f"({k},2,3,1)/i32"))


@pytest.mark.parametrize("k", [1, 2, 30, 76, 77])
def test_the_first_of_equal_elements_are_taken(k: int) -> None:
    x = np.random.default_rng(5).integers(-2, 3, (3, 77)).astype(np.float32)
    check(spec("top_k", ["(77,3,1,1)/f32"], f"({k},3,1,1)/i32"), src0=x)


@pytest.mark.parametrize("k", range(1, len(SPECIAL) + 1))
def test_the_ends_of_the_numbers_are_found(k: int) -> None:
    x = np.where(np.abs(SPECIAL) == np.float32(1e-40), 0, SPECIAL)
    n = len(x)
    check(spec("top_k", [f"({n},1,1,1)/f32"], f"({k},1,1,1)/i32"), src0=x)


@pytest.mark.parametrize("op, n", [("argsort", 100), ("top_k", 7)])
def test_every_target_takes_it_and_its_size_does_not_grow(op: str, n: int) -> None:
    """trn2 has no sort."""
    params = {"order": 1} if op == "argsort" else {}
    counts = []
    for row in (100, 100000):
        hlo = emit(spec(op, [f"({row},1,1,1)/f32"], f"({row if op == 'argsort' else n},1,1,1)/i32", **params))
        for target in TARGETS.values():
            assert lint(hlo, target) == []
        counts.append(sum(len(c.instructions) for c in proto.parse(hlo).computations))
    assert counts[1] < 1.6 * counts[0]
