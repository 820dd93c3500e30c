"""The cache of NEFFs: what it has is not compiled, what it can't give or keep does no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen import compilers
from kernelgen.compilers import Simulator, cache
from kernelgen.errors import KernelgenError
from kernelgen.plan import CompileConfig

TRN1 = CompileConfig.make("trn1")


def test_a_name_depends_on_the_hlo_the_compiler_and_the_flags_alone() -> None:
    names = {
        cache.key("aa", "neuronx-cc 2", TRN1),
        cache.key("ab", "neuronx-cc 2", TRN1),
        cache.key("aa", "neuronx-cc 3", TRN1),
        cache.key("aa", "neuronx-cc 2", CompileConfig.make("inf2")),
        cache.key("aa", "neuronx-cc 2", CompileConfig.make("trn1", optlevel=1)),
    }
    assert len(names) == 5
    assert cache.key("aa", "neuronx-cc 2", CompileConfig.make("trn1")) in names


def test_what_is_there_is_not_compiled_and_what_is_damaged_is_made_again(
    module: bytes, install: Callable[..., Path], tmp_path: Path
) -> None:
    hlo = tmp_path / "k.hlo.pb"
    hlo.write_bytes(module)
    folder = tmp_path / "cache"

    def run(file: str, **manners: object) -> bytes:
        compiler = compilers.resolve("neuronx-cc", path=install(**manners))
        compilers.compile_file(hlo, tmp_path / file, TRN1, compiler, cache=folder)
        return (tmp_path / file).read_bytes()

    first = run("first.neff")
    [stored] = folder.iterdir()
    assert stored.read_bytes() == first
    # The double's NEFFs differ from run to run.
    assert run("second.neff", exit=1, output="none") == first
    stored.write_bytes(first[:100])
    with pytest.raises(KernelgenError):
        run("third.neff", exit=1, output="none")
    again = run("fourth.neff")
    assert again != first
    assert stored.read_bytes() == again


def test_a_cache_that_can_not_be_written_is_done_without(module: bytes, tmp_path: Path) -> None:
    hlo = tmp_path / "k.hlo.pb"
    hlo.write_bytes(module)
    (tmp_path / "file").touch()
    compilers.compile_file(hlo, tmp_path / "k.neff", TRN1, Simulator(), cache=tmp_path / "file" / "cache")
    assert (tmp_path / "k.neff").is_file()
