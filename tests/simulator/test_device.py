"""The helper's device without a client: it compiles models once, and writes results to the right places."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernelgen.ggml.tensor import TensorDesc
from kernelgen.simulator import device as module
from kernelgen.simulator.device import Arena, DeviceError, SimulatedDevice
from kernelgen.spec.kernel import KernelSpec

Make = Callable[..., Path]

SIZE = 1 << 20


class Bench:
    """A device with one arena, which runs kernels of two f32 inputs."""

    def __init__(self) -> None:
        fd = os.memfd_create("test")
        os.ftruncate(fd, SIZE)
        self.arena = Arena.map(fd, SIZE)
        os.close(fd)
        self.device = SimulatedDevice([self.arena])
        self.memory = np.frombuffer(self.arena.data, np.uint8)

    def load(self, path: Path) -> int:
        data = path.read_bytes()
        self.memory[: len(data)] = np.frombuffer(data, np.uint8)
        return self.device.load(0, 0, len(data))[0]

    def at(self, offset: int, count: int) -> np.ndarray:
        return self.memory[offset : offset + 4 * count].view(np.float32)

    def execute(self, model: int, *offsets: int) -> None:
        places = [(0, offset) for offset in offsets]
        self.device.execute(repr((model, places)).encode(), lambda _: (model, places))


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Returns a list to which each compile appends its HLO."""
    hlos: list[bytes] = []
    compile_for_cpu = module.compile_for_cpu
    monkeypatch.setattr(module, "compile_for_cpu", lambda hlo: hlos.append(hlo) or compile_for_cpu(hlo))
    return hlos


def binary(make_neff: Make, op: str, alias: int | None = None) -> Path:
    f32 = TensorDesc.parse("(16,1,1,1)/f32")
    return make_neff(KernelSpec.make(op, [f32, f32], f32, alias=alias))


def test_equal_hlo_is_compiled_once(bench: Bench, compiled: list[bytes], make_neff: Make) -> None:
    path = binary(make_neff, "add")
    models = [bench.load(path) for _ in range(3)]
    assert len(set(models)) == 3
    for model in models:
        bench.device.unload(model)
    with pytest.raises(DeviceError, match=f"no model {models[0]}"):
        bench.execute(models[0], 65536, 131072, 196608)
    bench.load(path)
    assert len(compiled) == 1


def test_is_compiled_once_by_several_threads(bench: Bench, compiled: list[bytes], make_neff: Make) -> None:
    data = binary(make_neff, "add").read_bytes()
    bench.memory[: len(data)] = np.frombuffer(data, np.uint8)
    threads = [threading.Thread(target=bench.device.load, args=(0, 0, len(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def test_more_models_than_are_kept_compiled(
    bench: Bench, compiled: list[bytes], make_neff: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EXECUTABLES", 2)
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    models = {op: bench.load(binary(make_neff, op)) for op in functions}
    a, b, out = bench.at(65536, 16), bench.at(131072, 16), bench.at(196608, 16)
    for turn in range(2):
        a[:], b[:] = np.arange(16), turn + 1
        for op, function in functions.items():
            bench.execute(models[op], 65536, 131072, 196608)
            assert np.array_equal(out, function(a, b))
    assert len(compiled) == 9  # two stay compiled, and the oldest of three is never among them


@pytest.mark.parametrize(
    "offsets",
    [
        (65536, 131072, 196608),
        (65540, 131072, 196608),  # an input that must be copied
        (65536, 131076, 196612),
        (65536, 65536, 196608),  # one tensor as both inputs
        (65536, 131072, 65536),  # the result over an input
        (65536, 131072, 65552),  # the result over a part of an input
    ],
)
def test_places(bench: Bench, make_neff: Make, offsets: tuple[int, int, int]) -> None:
    model = bench.load(binary(make_neff, "sub"))
    a, b, out = (bench.at(offset, 16) for offset in offsets)
    for turn in range(3):
        a[:], b[:] = np.arange(16), 7 * turn
        if offsets[0] == offsets[1]:
            a[:] = b[:] = np.arange(16) + turn
        expected = a - b
        bench.execute(model, *offsets)
        assert np.array_equal(out, expected)


def test_in_place(bench: Bench, make_neff: Make) -> None:
    model = bench.load(binary(make_neff, "add", alias=0))
    a, b = bench.at(65536, 16), bench.at(131072, 16)
    a[:], b[:] = 0, 1
    for turn in range(5):
        bench.execute(model, 65536, 131072, 65536)
        assert np.array_equal(a, np.full(16, turn + 1))


def test_an_input_that_is_left_out_is_not_given(make_neff: Make) -> None:
    """The other inputs keep their order, and an input that shares memory with the result stays."""

    def function(x, unused, y):  # type: ignore[no-untyped-def]
        del unused
        return x - y

    def replaced(x, unused):  # type: ignore[no-untyped-def]
        del unused
        return x

    f32 = TensorDesc.parse("(16,1,1,1)/f32")
    bench = Bench()
    bench.device = SimulatedDevice([bench.arena], strict=True)
    model = bench.load(make_neff(KernelSpec.make("my_second_unused", [f32] * 3, f32), function))
    bench.at(65536, 16)[:], bench.at(131072, 16)[:] = 7, 5
    bench.execute(model, 65536, 131072, 196608)
    assert np.array_equal(bench.at(196608, 16), np.full(16, 2))
    model = bench.load(make_neff(KernelSpec.make("my_replaced", [f32] * 2, f32, alias=1), replaced))
    bench.execute(model, 65536, 131072, 131072)
    assert np.array_equal(bench.at(131072, 16), np.full(16, 7))


def test_bindings_do_not_pile_up(bench: Bench, make_neff: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BINDINGS_PER_MODEL", 4)
    model = bench.load(binary(make_neff, "add"))
    for n in range(11):
        offset = 65536 + 1024 * n
        bench.at(offset, 16)[:] = n
        bench.execute(model, offset, offset, offset + 512)
        assert np.array_equal(bench.at(offset + 512, 16), np.full(16, 2 * n))
        assert len(bench.device._bindings) <= 4


@pytest.mark.parametrize("offsets", [(65536, 131072), (SIZE - 60, 131072, 65536), (65536, 131072, SIZE - 60)])
def test_invalid_places(bench: Bench, make_neff: Make, offsets: tuple[int, ...]) -> None:
    model = bench.load(binary(make_neff, "add"))
    with pytest.raises(DeviceError):
        bench.execute(model, *offsets)
