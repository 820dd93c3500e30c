"""A result in place of an input that changes only in part: the program computes the part, and the helper writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.hlo import execute, proto
from kernelgen.lowering.kernel import traced_hlo
from kernelgen.neff import container
from kernelgen.simulator import device as module
from kernelgen.simulator import updates
from kernelgen.simulator.device import Arena, SimulatedDevice

Array = Any

SIZE = 1 << 20


def row(x: Array, new: Array, at: Array) -> Array:
    from jax import lax

    flat = lax.dynamic_update_slice(x.reshape(16, 24), new.astype(x.dtype), (at[0], np.int32(0)))
    return flat.reshape(x.shape)


def inner(x: Array, new: Array, at: Array) -> Array:
    """Writes two rows of one of several matrices."""
    from jax import lax

    part = new.reshape(1, 2, 12).astype(x.dtype)
    return lax.dynamic_update_slice(x.reshape(4, 8, 12), part, (at[1], at[0], np.int32(0))).reshape(x.shape)


def column(x: Array, new: Array, at: Array) -> Array:
    """Writes elements that are not contiguous."""
    from jax import lax

    part = new.reshape(24, 1)[:16].astype(x.dtype)
    return lax.dynamic_update_slice(x.reshape(16, 24), part, (np.int32(0), at[0])).reshape(x.shape)


def changed(x: Array, new: Array, at: Array) -> Array:
    return row(x + x, new, at)


SHAPES = [((1, 1, 16, 24), ""), ((1, 24), "float32"), ((2,), "int32")]


def traced(function: Callable[..., Any], dtype: str = "float16") -> bytes:
    hlo, _ = traced_hlo(function, [(shape, name or dtype) for shape, name in SHAPES])
    return hlo


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "uint8"])
@pytest.mark.parametrize("function", [row, inner])
def test_the_part_in_its_place_is_the_result(function: Callable[..., Any], dtype: str) -> None:
    hlo = traced(function, dtype)
    found = updates.rewrite(hlo, {0: 0})
    assert found.parts == (0,)
    x, new = np.arange(384).astype(execute.numpy_dtype(dtype)).reshape(1, 1, 16, 24), np.ones((1, 24), np.float32)
    for at in ((0, 0), (3, 1), (5, 2), (15, 3), (99, 99), (-3, -99)):
        arrays = [x, new, np.array(at, np.int32)]
        (expected,) = execute.run(hlo, arrays)
        part, (first,) = execute.run(found.hlo, arrays)
        assert part.size == 24
        actual = x.copy()
        actual.view(np.uint8).reshape(-1)[first : first + part.nbytes] = part.view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("function", [column, changed])
def test_other_results_stay_whole(function: Callable[..., Any]) -> None:
    hlo = traced(function)
    assert updates.rewrite(hlo, {0: 0}) == updates.UpdatingHlo(hlo, ())


def test_a_result_that_is_not_in_place_stays_whole() -> None:
    hlo = traced(row)
    assert updates.rewrite(hlo, {}) == updates.UpdatingHlo(hlo, ())
    assert updates.rewrite(hlo, {0: 1}) == updates.UpdatingHlo(hlo, ())


class Bench:
    """A device with one arena."""

    def __init__(self, *, strict: bool) -> None:
        fd = os.memfd_create("test")
        os.ftruncate(fd, SIZE)
        self.arena = Arena.map(fd, SIZE)
        os.close(fd)
        self.device = SimulatedDevice([self.arena], strict)
        self.memory = np.frombuffer(self.arena.data, np.uint8)

    def load(self, data: bytes) -> int:
        self.memory[: len(data)] = np.frombuffer(data, np.uint8)
        return self.device.load(0, 0, len(data))[0]

    def execute(self, model: int, *offsets: int) -> None:
        places = [(0, offset) for offset in offsets]
        self.device.execute(repr((model, places)).encode(), lambda _: (model, places))


def neff(function: Callable[..., Any], dtype: str, results: int) -> bytes:
    """Returns a NEFF whose first result is in place of its first input."""
    hlo = proto.parse(traced(function, dtype))
    entry = proto.entry(hlo)
    names = ["x" + proto.MUST_ALIAS_SUFFIX, "new", "at"]
    for parameter, name in zip(proto.parameters(entry), names, strict=True):
        parameter.name = name
        parameter.frontend_attributes.map.add(key=proto.INPUT_NAMES, value=name)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    more = [f"y{i}" for i in range(1, results)]
    root.frontend_attributes.map.add(key=proto.OUTPUT_NAMES, value=",".join(["x.updated", *more]))
    alias = hlo.input_output_alias.entries.add(parameter_number=0, kind=proto.MUST_ALIAS)
    if results > 1:
        alias.output_shape_index.append(0)
    return container.write_simulated(proto.serialize(hlo), CompileConfig.make("trn1").flags(), "simulator 1")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_helper_writes_the_part_alone(dtype: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other results of the same execution read the input's old values."""
    compiled: list[bytes] = []
    compile_for_cpu = module.compile_for_cpu
    monkeypatch.setattr(module, "compile_for_cpu", lambda hlo: compiled.append(hlo) or compile_for_cpu(hlo))

    def function(x: Array, new: Array, at: Array) -> Any:
        written = row(x, new, at)
        picked = x.reshape(16, 24)[at]  # a gather, whose bounds a strict device checks
        return written, written.astype(np.float32) * np.float32(2), picked.astype(np.float32)

    bench = Bench(strict=strict)
    model = bench.load(neff(function, dtype, 3))
    (hlo,) = compiled
    shapes = [tuple(shape.dimensions) for shape in proto.result_shapes(proto.parse(hlo))]
    assert shapes[0] == (1, 24)
    kind = execute.numpy_dtype(dtype)
    offsets = [65536, 131072, 196608, 65536, 262144, 327680]
    x = bench.memory[65536 : 65536 + 768].view(kind).reshape(16, 24)
    new = bench.memory[131072 : 131072 + 96].view(np.float32)
    at = bench.memory[196608 : 196608 + 8].view(np.int32)
    twice = bench.memory[262144 : 262144 + 1536].view(np.float32).reshape(16, 24)
    picked = bench.memory[327680 : 327680 + 192].view(np.float32).reshape(2, 24)
    x[:] = np.arange(384).reshape(16, 24) % 100
    before = bench.memory.copy()
    for place in (3, 3, 0, 15):
        was = x.copy()
        new[:], at[:] = place + 0.5, place
        bench.execute(model, *offsets)
        expected = was.copy()
        expected[place] = place + 0.5
        np.testing.assert_array_equal(x, expected)
        np.testing.assert_array_equal(twice, expected.astype(np.float32) * 2)
        np.testing.assert_array_equal(picked[0], was[place].astype(np.float32))
    after = bench.memory.copy()
    for first, size in ((65536, 768), (131072, 96), (196608, 8), (262144, 1536), (327680, 192)):
        before[first : first + size] = after[first : first + size]
    np.testing.assert_array_equal(before, after)
