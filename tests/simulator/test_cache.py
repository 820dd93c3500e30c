"""The simulator reuses compiled programs from its folder, but only for the same HLO, machine and flags."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernelgen.hlo.execute import Executable, compile_for_cpu
from kernelgen.simulator import cache

Hlo = Callable[[str], bytes]
Run = Callable[..., subprocess.CompletedProcess[str]]

ARRAYS = [np.arange(8, dtype=np.float32), np.full(8, 3, np.float32)]


@pytest.fixture
def hlo() -> Hlo:
    from kernelgen import lowering
    from kernelgen.emitters.library import builtin_library
    from kernelgen.emitters.loading import load_function
    from kernelgen.ggml.tensor import TensorDesc
    from kernelgen.spec.kernel import KernelSpec

    def make(op: str) -> bytes:
        source = builtin_library()
        t = TensorDesc.parse("(8,1,1,1)/f32")
        spec = KernelSpec.make(op, [t, t], t, {})
        return lowering.emit(spec, load_function(source, source.scan()[op]))

    return make


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, hlo: bytes) -> Executable:
        self.count += 1
        return compile_for_cpu(hlo)

    def result(self, hlo: bytes) -> np.ndarray:
        arrays = [a.reshape(1, 1, 1, 8) for a in ARRAYS]
        executable = cache.compiled(hlo, self)
        (found,) = executable.run(
            [a.reshape(shape) for a, (_, _, shape) in zip(arrays, executable.parameters, strict=True)]
        )
        return found.ravel()


def test_nothing_is_kept_unless_requested(hlo: Hlo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    compile_ = Counting()
    for _ in range(2):
        np.testing.assert_array_equal(compile_.result(hlo("add")), ARRAYS[0] + ARRAYS[1])
    assert compile_.count == 2


def test_the_same_hlo_is_compiled_once(hlo: Hlo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    compile_ = Counting()
    for _ in range(3):
        np.testing.assert_array_equal(compile_.result(hlo("add")), ARRAYS[0] + ARRAYS[1])
        np.testing.assert_array_equal(compile_.result(hlo("mul")), ARRAYS[0] * ARRAYS[1])
    assert compile_.count == 2
    assert len(list((tmp_path / "cache").rglob("*.xla"))) == 2


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"\xff" + data[41:], lambda data: b""]
)
def test_a_damaged_file_is_made_again(
    hlo: Hlo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    compile_ = Counting()
    compile_.result(hlo("add"))
    (file,) = tmp_path.rglob("*.xla")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    np.testing.assert_array_equal(compile_.result(hlo("add")), ARRAYS[0] + ARRAYS[1])
    assert compile_.count == 2
    np.testing.assert_array_equal(compile_.result(hlo("add")), ARRAYS[0] + ARRAYS[1])
    assert compile_.count == 2


def test_another_machine_or_other_flags_compile_for_themselves(
    hlo: Hlo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    compile_ = Counting()
    compile_.result(hlo("add"))
    monkeypatch.setattr(cache, "_cpu", lambda: b"another")
    cache._machine.cache_clear()
    compile_.result(hlo("add"))
    monkeypatch.setenv("PJRT_NPROC", "7")
    cache._machine.cache_clear()
    compile_.result(hlo("add"))
    cache._machine.cache_clear()
    assert compile_.count == 3
