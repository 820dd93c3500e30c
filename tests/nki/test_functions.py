"""Every function of NKI, both generations, compared with NumPy: all kernels of a generation are compiled and run at once."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from nki_interpreter import kernel, loading
from nki_interpreter.errors import NkiError

HERE = Path(__file__).parent
SINCE_TRN3 = ("activate2", "exponential")


@cache
def cases(generation: str):
    return loading.load_file(HERE / f"{generation}.py").CASES


@cache
def computed(generation: str):
    recorded = {}
    for name, (made, inputs, _) in cases(generation).items():
        with contextlib.suppress(NkiError):  # its own test reports this
            recorded[name] = kernel.record_kernel(made, inputs, {}, **targets(name))
    inputs = {n: list(cases(generation)[n][1]) for n in recorded}
    run = jax.jit(lambda given: {n: recorded[n](*given[n]) for n in recorded})
    return run(inputs)


def targets(name: str) -> dict[str, tuple[str, ...]]:
    return {"targets": ("trn3",)} if name in SINCE_TRN3 else {}


def names(generation: str) -> list[str]:
    return sorted(cases(generation))


@pytest.mark.parametrize("name", names("newer"))
def test_newer(name):
    check("newer", name)


@pytest.mark.parametrize("name", names("older"))
def test_older(name):
    check("older", name)


def check(generation: str, name: str) -> None:
    made, inputs, reference = cases(generation)[name]
    kernel.record_kernel(made, inputs, {}, **targets(name))
    expected = (
        reference(*(a.astype(np.float64) if a.dtype == np.float32 else a for a in inputs))
        if ("view" not in name)
        else reference(*inputs)
    )
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = computed(generation)[name]
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=2e-5, atol=2e-5)
