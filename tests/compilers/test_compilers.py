"""The choice of a compiler, the simulator, and the properties of all compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelgen import compilers
from kernelgen.cache import Cache, CacheSettings, NeffKey
from kernelgen.compilers.choice import Simulator, resolve
from kernelgen.compilers.neuronx_cc import NeuronxCC
from kernelgen.compilers.settings import CompileConfig
from kernelgen.compilers.simulate import simulate
from kernelgen.compilers.step import compile_file
from kernelgen.errors import EXIT_FAILED, EXIT_USAGE, KernelgenError
from kernelgen.hlo import proto
from kernelgen.neff import container

Install = Callable[..., Path]

TOOLS = str(Path(compilers.__file__).parents[2])


def env(tmp_path: Path, **values: Any) -> dict[str, str]:
    return {"PATH": str(tmp_path / "nowhere"), **{k: str(v) for k, v in values.items()}}


def test_auto_takes_the_sdk_where_there_is_one(install: Install, tmp_path: Path) -> None:
    on_path = install("path")
    compiler = resolve("auto", env=env(tmp_path, PATH=on_path.parent))
    assert isinstance(compiler, NeuronxCC) and compiler.executable == on_path and compiler.note == ""


def test_the_named_environment_wins_over_path(install: Install, tmp_path: Path) -> None:
    on_path, in_sdk = install("path"), install("venv")
    compiler = resolve("neuronx-cc", env=env(tmp_path, PATH=on_path.parent, NEURON_SDK=in_sdk.parent.parent))
    assert isinstance(compiler, NeuronxCC) and compiler.executable == in_sdk


def test_a_given_program_wins_over_all(install: Install, tmp_path: Path) -> None:
    own, in_sdk = install("own"), install("venv")
    compiler = resolve("auto", path=own, env=env(tmp_path, NEURON_SDK=in_sdk.parent.parent))
    assert isinstance(compiler, NeuronxCC) and compiler.executable == own


def test_auto_says_that_it_takes_the_simulator(tmp_path: Path) -> None:
    compiler = resolve("auto", env=env(tmp_path))
    assert isinstance(compiler, Simulator)
    assert "neuronx-cc is not installed" in compiler.note and "no device can load the NEFFs" in compiler.note
    assert resolve("simulator", env=env(tmp_path)).note == "", "no note is needed"


def test_the_sdk_is_demanded(tmp_path: Path) -> None:
    with pytest.raises(KernelgenError, match="neuronx-cc is not installed") as caught:
        resolve("neuronx-cc", env=env(tmp_path))
    assert caught.value.exit_code == EXIT_USAGE and "NEURON_SDK" in str(caught.value)


@pytest.mark.parametrize("choice", ["auto", "neuronx-cc"])
def test_a_named_environment_without_it_is_a_mistake(tmp_path: Path, choice: str) -> None:
    with pytest.raises(KernelgenError, match=r"NEURON_SDK is .*, which has no bin/neuronx-cc"):
        resolve(choice, env=env(tmp_path, NEURON_SDK=tmp_path))


def test_the_empty_package_of_the_public_index_is_not_the_sdk(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages/neuronx_cc-0.0.1.dist-info").mkdir(parents=True)
    with pytest.raises(KernelgenError, match="the public index's empty placeholder"):
        resolve("auto", env=env(tmp_path, NEURON_SDK=tmp_path))


def test_choices(install: Install, tmp_path: Path) -> None:
    with pytest.raises(KernelgenError, match="unknown compiler 'simulater': did you mean 'simulator'"):
        resolve("simulater")
    with pytest.raises(KernelgenError, match="cannot be used for it"):
        resolve("simulator", path=install())
    (tmp_path / "text").write_text("no program")
    with pytest.raises(KernelgenError, match="not a program that can be run"):
        resolve("neuronx-cc", path=tmp_path / "text")


def test_simulator(module: bytes, tmp_path: Path) -> None:
    config = CompileConfig.make("trn2", optlevel=1)
    simulator = resolve("simulator")
    data = simulator.compile(module, config, kernel="k", log_dir=tmp_path)
    assert data == simulator.compile(module, config, kernel="other", log_dir=tmp_path), "the kernel's name is not in it"
    unpacked = container.read_simulated(data)
    assert unpacked.hlo == module
    assert unpacked.info["compiler"] == simulator.identity
    assert unpacked.info["flags"] == config.flags()
    assert list(tmp_path.iterdir()) == []


def broken(module: bytes) -> bytes:
    """Returns HLO that XLA cannot compile: a result of another shape than its operands."""
    message = proto.parse(module)
    for computation in message.computations:
        for i in computation.instructions:
            if i.opcode == "multiply":
                i.shape.dimensions[-1] = 7
    return proto.serialize(message)


_COMPILES_TWICE = """
import os, sys
from pathlib import Path
from kernelgen.hlo.cpu import check_compiles

hlo = Path(sys.argv[1]).read_bytes()
for _ in range(2):
    check_compiles(hlo)
threads = [int(t) for t in os.listdir("/proc/self/task")]
print("jax" in sys.modules, all(os.sched_getaffinity(t) == os.sched_getaffinity(0) for t in threads))
print(len(os.sched_getaffinity(0)))
"""


def test_compiling_needs_no_jax_and_leaves_the_process_all_cores(module: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k.pb"
    path.write_bytes(module)
    command = [sys.executable, "-c", _COMPILES_TWICE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": TOOLS})
    assert done.stdout.split() == ["False", "True", str(len(os.sched_getaffinity(0)))]
    assert done.stderr == ""


def test_simulator_refuses_what_does_not_compile(module: bytes, tmp_path: Path) -> None:
    with pytest.raises(KernelgenError, match="kernel k for trn1: the simulator cannot compile it: ") as caught:
        Simulator().compile(broken(module), CompileConfig.make("trn1"), kernel="k", log_dir=tmp_path)
    assert caught.value.exit_code == EXIT_FAILED


def double_precision(module: bytes) -> bytes:
    message = proto.parse(module)
    for computation in message.computations:
        for i in computation.instructions:
            i.shape.element_type = 12
    return proto.serialize(message)


@pytest.mark.parametrize("which", ["simulator", "neuronx-cc"])
def test_lint_comes_before_the_compiler_and_the_cache(
    install: Install, module: bytes, tmp_path: Path, which: str
) -> None:
    program = install(record=str(tmp_path / "record"))
    compiler = Simulator() if which == "simulator" else NeuronxCC(program, "2.0")
    path, config = tmp_path / "k.hlo.pb", CompileConfig.make("trn1")
    refused = double_precision(module)
    cache = Cache(CacheSettings(tmp_path / "cache"), print)
    cache.neff(NeffKey.make(refused, compiler.identity, config.flags()), "k", lambda: simulate(module, config.flags()))

    def compile_(hlo: bytes, config: CompileConfig) -> None:
        path.write_bytes(hlo)
        compile_file(path, tmp_path / "k.neff", config, compiler, cache=cache)

    with pytest.raises(KernelgenError, match=r"kernel k for trn1: \[NCC_ESPP004\]") as caught:
        compile_(refused, config)
    assert caught.value.exit_code == EXIT_FAILED
    assert not (tmp_path / "record").exists() and not (tmp_path / "k.neff").exists()
    with pytest.raises(KernelgenError, match="kernel k: not a serialized HloModuleProto"):
        compile_(b"junk", config)
    with pytest.raises(KernelgenError, match="unknown target 'trn9'"):
        compile_(module, CompileConfig("trn9"))


def test_compile_file(module: bytes, tmp_path: Path) -> None:
    (tmp_path / "k.hlo.pb").write_bytes(module)
    out = tmp_path / "out" / "k.neff"
    compile_file(tmp_path / "k.hlo.pb", out, CompileConfig.make("inf2"), Simulator())
    assert container.read_simulated(out.read_bytes()).info["flags"] == CompileConfig.make("inf2").flags()
    assert [p.name for p in out.parent.iterdir()] == ["k.neff"]


def test_compile_file_leaves_no_old_result(install: Install, module: bytes, tmp_path: Path) -> None:
    (tmp_path / "k.hlo.pb").write_bytes(module)
    out = tmp_path / "out" / "k.neff"
    out.parent.mkdir()
    out.write_text("of an earlier build")
    with pytest.raises(KernelgenError, match="kernel k for trn1"):
        compile_file(
            tmp_path / "k.hlo.pb", out, CompileConfig.make("trn1"), NeuronxCC(install(exit=3, output="none"), "2")
        )
    assert [p.name for p in out.parent.iterdir()] == ["k.trn1.failed"], (
        "beside the output: only what explains the failure"
    )
    with pytest.raises(KernelgenError, match=r"missing\.hlo\.pb: No such file"):
        compile_file(tmp_path / "missing.hlo.pb", out, CompileConfig.make("trn1"), Simulator())


def test_compile_file_does_not_eat_its_input(module: bytes, tmp_path: Path) -> None:
    path = tmp_path / "k.hlo.pb"
    path.write_bytes(module)
    with pytest.raises(KernelgenError, match="the output is the input"):
        compile_file(path, tmp_path / "." / "k.hlo.pb", CompileConfig.make("trn1"), Simulator())
    assert path.read_bytes() == module
