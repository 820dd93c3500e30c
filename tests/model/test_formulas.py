"""Formulas hold at every size that they were fitted to, and at others."""

from __future__ import annotations

import itertools

import pytest

from kernelgen.model.formulas import Fitter, Formula

NAMES = ("n_tokens", "n_kv", "n_outputs")
POINTS = [
    {"n_tokens": t, "n_kv": k, "n_outputs": o}
    for t, k, o in itertools.product((1, 22, 512), (512, 768, 2048), (1, 3, 512))
    if o <= t
]


def fit(function: object) -> Formula | None:
    assert callable(function)
    return Fitter(NAMES, POINTS).fit([function(**point) for point in POINTS])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda n_tokens, n_kv, n_outputs: 4096, "4096"),
        (lambda n_tokens, n_kv, n_outputs: n_tokens, "n_tokens"),
        (lambda n_tokens, n_kv, n_outputs: 2048 * n_kv, "2048 * n_kv"),
        (lambda n_tokens, n_kv, n_outputs: 4 * n_kv * n_tokens, "4 * n_tokens * n_kv"),
        (lambda n_tokens, n_kv, n_outputs: n_kv // 2, "n_kv // 2"),
        (lambda n_tokens, n_kv, n_outputs: n_kv + 1, "n_kv + 1"),
        (lambda n_tokens, n_kv, n_outputs: 2 * n_tokens - 1, "2 * n_tokens - 1"),
    ],
)
def test_the_simplest_formula_is_found_and_holds_at_other_sizes(function: object, text: str) -> None:
    found = fit(function)
    assert str(found) == text and found is not None and callable(function)
    other = {"n_tokens": 100, "n_kv": 1024, "n_outputs": 7}
    assert found.value(other) == function(**other)


@pytest.mark.parametrize(
    "function",
    [
        lambda n_tokens, n_kv, n_outputs: n_tokens * n_tokens,
        lambda n_tokens, n_kv, n_outputs: -(-n_tokens // 64) * 64,
        lambda n_tokens, n_kv, n_outputs: min(n_kv, 768),
        lambda n_tokens, n_kv, n_outputs: n_tokens + n_kv,
    ],
)
def test_values_without_such_a_formula(function: object) -> None:
    assert fit(function) is None


def test_two_points_don_t_make_a_line() -> None:
    points = [{"n": 1}, {"n": 5}]
    assert Fitter(("n",), points).fit([10, 18]) is None  # 2 n + 8, among many others
    assert Fitter(("n",), points).fit([2, 10]) == Formula(0, 2, 1, ("n",))


def test_no_formula_is_requested_where_any_value_will_do() -> None:
    fitter = Fitter(("n",), [{"n": 1}, {"n": 3}, {"n": 7}])
    assert fitter.fit([None, 6, 14]) == Formula(0, 2, 1, ("n",))
    assert fitter.fit([None, None, None]) == Formula(1)
    with pytest.raises(ValueError, match="2 values at 3 points"):
        fitter.fit([1, 2])
