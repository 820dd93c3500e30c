"""Python code in a kernel that AWS's tracer refuses is noted at its line, and runs here."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from nki_interpreter import kernel, loading

with loading.interpreter():
    import nki.isa as nisa
    import nki.language as nl

X = np.zeros((128, 512), np.float32)
ROW = (128, 512)


def sbuf(shape=ROW):
    return nl.ndarray(shape, np.float32, buffer=nl.sbuf)


def copied(x, tile):
    result = nl.ndarray(ROW, np.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=tile, src=x)
    nisa.dma_copy(dst=result, src=tile)
    return result


def comprehension(x):
    return copied(x, [sbuf() for _ in range(2)][1])  # here


def keys(x):
    return copied(x, {0: sbuf()}[0])  # here


def expansion(x):
    options = {"shape": ROW}
    return copied(x, sbuf(**options))  # here


def partial(x):
    return copied(x, functools.partial(sbuf, ROW)())  # here


def helper(x):
    return copied(x, {1: sbuf()}[1])  # here


def inner(x):
    tile = sbuf()

    def doubled():
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)

    def turn(i):
        doubled()  # here

    nisa.memset(tile, 1.0)
    nl.fori_loop(0, 2, turn)
    return copied(x, tile)


def inner_in_a_loop(x):
    tile = sbuf()

    def doubled():
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)

    nisa.memset(tile, 1.0)
    for _ in nl.dynamic_range(2):
        doubled()  # here
    return copied(x, tile)


def calls_a_helper(x):
    return between(x)


def between(x):
    return helper(x)


def taken(x):
    """Strings as keys, an unrolled loop, inner functions as bodies, and no comprehension in a kernel's head."""
    tiles = {"a": sbuf()}

    def doubled(i=0):
        nisa.tensor_scalar(tiles["a"], tiles["a"], nl.multiply, 2.0)

    nisa.memset(tiles["a"], 1.0)
    for _ in range(2):
        doubled()
    nl.fori_loop(0, 2, doubled)
    return copied(x, tiles["a"])


def notes(function, older=False):
    found = kernel.record(function, [X], {}, older=older).notes
    return [note for note in found if "AWS's tracer" in note]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (comprehension, "a comprehension"),
        (keys, "a dictionary with a key that is not text"),
        (expansion, "`**` in a call"),
        (partial, "functools.partial"),
        (calls_a_helper, "a dictionary with a key that is not text"),
        (inner, "a call of an inner function in the body of a device's loop"),
        (inner_in_a_loop, "a call of an inner function in the body of a device's loop"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_the_tracer_refuses_is_noted_at_its_line(function, what):
    (note,) = notes(function)
    file, line, said = note.split(":", 2)
    assert file == __file__ and said.startswith(f" AWS's tracer refuses {what}")
    assert Path(__file__).read_text(encoding="utf-8").splitlines()[int(line) - 1].endswith("# here")


def test_what_the_tracer_takes_is_not_noted():
    assert notes(taken) == []
    assert notes(lambda x: taken(x)) == [], "what has no definition of its own is not looked at"
