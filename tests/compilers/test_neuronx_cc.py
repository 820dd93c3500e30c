"""The driver of neuronx-cc with a double that has the known behaviour and misbehaviour of the real one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernelgen import lowering
from kernelgen.compilers.neuronx_cc import NeuronxCC
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import EXIT_FAILED, KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

TRN1 = CompileConfig.make("trn1")
KERNEL = "sqr-64x4-f32-0123456789ab"

Install = Callable[..., Path]


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def compile_with(program: Path, module: bytes, log_dir: Path, **limits: Any) -> bytes:
    return NeuronxCC.open(program).compile(module, TRN1, kernel=KERNEL, log_dir=log_dir, **limits)


def failure(program: Path, module: bytes, log_dir: Path, **limits: Any) -> str:
    """Returns the error of a compile, after checking the parts that every such error has."""
    with pytest.raises(KernelgenError) as caught:
        compile_with(program, module, log_dir, **limits)
    assert caught.value.exit_code == EXIT_FAILED
    text = str(caught.value)
    assert f"kernel {KERNEL} for trn1: neuronx-cc " in text
    log = re.search(r"the whole log: (.*)", text)
    assert log and Path(log[1]).is_file() and Path(log[1]).is_relative_to(log_dir)
    assert "compile hlo_module.pb --framework XLA --target trn1" in Path(log[1]).read_text(errors="replace")
    assert f"to run it again: cd {Path(log[1]).parent} && {program} compile " in text
    assert (Path(log[1]).parent / "hlo_module.pb").read_bytes() == module
    return text


def test_compiles(install: Install, module: bytes, tmp_path: Path) -> None:
    data = compile_with(install(), module, tmp_path / "logs", timeout=30, memory_mb=2000)
    header = container.read_header(data)
    assert not header.simulated and header.pkg_version == 2 and header.lnc_size == 1
    assert "sg00/PE.bin" in container.unpack(data)
    assert not (tmp_path / "logs").exists(), "nothing is kept when all goes well"


def test_command_environment_and_folder(
    install: Install, module: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NEURON_CC_FLAGS", "PYTHONPATH", "NEURON_COMPILE_CACHE_URL", "LD_PRELOAD_X"):
        monkeypatch.setenv(name, "leaked")
    record = tmp_path / "record"
    program = install(record=str(record))
    config = CompileConfig.make(
        "trn2", optlevel=3, auto_cast="matmult", extra_flags=("--enable-fast-loading-neuron-binaries",)
    )
    before = set(Path.cwd().iterdir())
    NeuronxCC.open(program).compile(module, config, kernel=KERNEL, log_dir=tmp_path)
    version, run = records(record)
    assert version["arguments"] == ["--version"]
    assert (
        run["arguments"]
        == (
            "compile hlo_module.pb --framework XLA --target trn2 --optlevel 3 --model-type generic --auto-cast matmult "
            "--auto-cast-type bf16 --lnc 2 --enable-fast-loading-neuron-binaries --output kernel.neff --logfile log-neuron-cc.txt"
        ).split()
    )
    assert "leaked" not in run["environment"].values()
    folder = Path(run["folder"])
    assert Path(run["environment"]["HOME"]).is_relative_to(folder)
    assert Path(run["environment"]["TMPDIR"]).is_relative_to(folder)
    assert "hlo_module.pb" in run["files"]
    assert not folder.exists(), "the scratch folder is removed"
    assert set(Path.cwd().iterdir()) == before, "no litter where the caller works"


def test_status(install: Install, module: bytes, tmp_path: Path) -> None:
    program = install(exit=70, output="none", print="[F134] backend: out of registers")
    text = failure(program, module, tmp_path)
    assert "neuronx-cc ended with status 70\n" in text
    assert "  | [F134] backend: out of registers" in text
    assert re.search(r"the compiler's own log: .*log-neuron-cc\.txt", text)
    command = text.partition("to run it again: ")[2]
    # The double writes into its home like the compiler; run by hand, that is the user's.
    home = os.environ | {"HOME": str(tmp_path)}
    again = subprocess.run(command, shell=True, capture_output=True, text=True, env=home)
    assert again.returncode == 70 and "out of registers" in again.stdout


def test_no_file(install: Install, module: bytes, tmp_path: Path) -> None:
    assert "neuronx-cc ended with status 0 but wrote no NEFF\n" in failure(install(output="none"), module, tmp_path)


def test_status_with_file(install: Install, module: bytes, tmp_path: Path) -> None:
    text = failure(install(exit=1), module, tmp_path)
    assert re.search(r"ended with status 1, although it wrote \d+ bytes, which are not used", text)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("garbage", "package version"),
        ("truncated", "its header says"),
        ("empty", "0 bytes, less than the header"),
        ("error", "5 bytes, less than the header"),
    ],
)
def test_bad_file(install: Install, module: bytes, tmp_path: Path, output: str, reason: str) -> None:
    text = failure(install(output=output), module, tmp_path)
    assert "ended with status 0 but what it wrote is not a NEFF: " in text and reason in text


def test_hang(install: Install, module: bytes, tmp_path: Path) -> None:
    record = tmp_path / "record"
    # The background child outlives the compiler, unless the whole group is killed.
    program = install(hang=True, record=str(record))
    compiler = NeuronxCC(program, "2.0")
    begun = time.monotonic()
    with pytest.raises(KernelgenError, match=r"still running after 3 s, and was stopped") as caught:
        compiler.compile(module, TRN1, kernel=KERNEL, log_dir=tmp_path, timeout=3)
    assert time.monotonic() - begun < 30
    assert "  | Compiler status PASS" in str(caught.value), "what it printed before is shown"
    (run,) = records(record)
    assert len(run["pids"]) == 2
    assert wait_for(lambda: not any(map(alive, run["pids"])))


def test_background(install: Install, module: bytes, tmp_path: Path) -> None:
    record = tmp_path / "record"
    NeuronxCC(install(background=True, record=str(record)), "2.0").compile(
        module, TRN1, kernel=KERNEL, log_dir=tmp_path
    )
    (run,) = records(record)
    assert wait_for(lambda: not any(map(alive, run["pids"]))), "nothing is left running after a good compile either"


def test_killed(install: Install, module: bytes, tmp_path: Path) -> None:
    text = failure(install(signal=int(signal.SIGKILL)), module, tmp_path)
    assert "was killed, most likely because the machine ran out of memory, although it wrote" in text
    assert "memory_per_compile" in text
    text = failure(install(exit=1, output="none", print="[F137] neuronx-cc was forcibly killed"), module, tmp_path)
    assert "was killed, most likely because the machine ran out of memory\n" in text
    text = failure(install(signal=int(signal.SIGSEGV), output="none"), module, tmp_path)
    assert "was killed by SIGSEGV\n" in text
    text = failure(install(signal=37, output="none"), module, tmp_path)  # a real-time signal, which has no name
    assert "was killed by signal 37\n" in text


def test_memory(install: Install, module: bytes, tmp_path: Path) -> None:
    text = failure(install(memory_mb=400), module, tmp_path, memory_mb=150, timeout=30)
    used = re.search(r"used (\d+) MiB of memory, more than its 150 MiB, and was stopped", text)
    assert used and int(used[1]) > 150
    assert "raise memory_per_compile in the manifest's `compiler`" in text


def test_the_log_of_a_compile_that_goes_well_is_kept_where_it_is_requested(
    install: Install, module: bytes, tmp_path: Path
) -> None:
    log = tmp_path / "kept.log"
    compile_with(install(print="a \x1b[31mred\x1b[0m word"), module, tmp_path / "logs", log=log)
    first, *rest = log.read_text().splitlines()
    assert first.startswith("$ ") and "compile hlo_module.pb --framework XLA --target trn1" in first
    assert rest == ["Compiler status PASS", "a \x1b[31mred\x1b[0m word"]
    log.unlink()
    failure(install(exit=1, output="none"), module, tmp_path / "logs", log=log)
    assert not log.exists()


def test_version(install: Install) -> None:
    compiler = NeuronxCC.open(install())
    assert (compiler.name, compiler.identity) == ("neuronx-cc", "neuronx-cc 2.24.5133.0+58f8de22")


@pytest.mark.parametrize("version", ["", "usage: neuronx-cc", "\nNeuronX Compiler version 2.0", "\x00\xff"])
def test_odd_version(install: Install, version: str) -> None:
    with pytest.raises(KernelgenError, match=r"--version ended with status 0 and the first line") as caught:
        NeuronxCC.open(install(version=version))
    assert "expected 'NeuronX Compiler version …'" in str(caught.value)


def product(rows: int, depth: int, columns: int, batch: int = 1) -> bytes:
    """Returns the HLO of a float16 product of `batch` pairs of matrices."""

    import jax

    left, right = (TensorDesc.parse(f"({depth},{n},{batch},1)/f16") for n in (rows, columns))
    result = TensorDesc.parse(f"({columns},{rows},{batch},1)/f16")

    def squeezed(a: Any, b: Any) -> Any:
        return jax.lax.dot_general(a[0], b[0], (((2,), (2,)), ((0,), (0,))))[None]

    return lowering.emit(KernelSpec.make("my_product", [left, right], result), squeezed)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        # 4,096 instructions for each matrix
        ((16384, 128, 16384, 1220), ""),
        (
            (16384, 128, 16384, 1221),
            "[NCC_EBVF030] The number of instructions generated exceeds the limit: products alone take 5001216, ",
        ),
        ((16384, 129, 16384, 611), "[NCC_EBVF030]"),  # 129 rows need one more part of 128
        # 16 GiB, and 8 KiB
        ((1 << 21, 4096, 1, 1), "[NCC_EOOM001]"),
    ],
)
def test_what_is_too_large_is_refused_by_the_compiler(
    install: Install, tmp_path: Path, shape: tuple[int, int, int, int], said: str
) -> None:
    large = product(*shape)
    if not said:
        compile_with(install(), large, tmp_path)
        return
    text = failure(install(), large, tmp_path)
    assert "status 70" in text
    assert said in text


def test_arguments_are_refused_by_the_compiler(install: Install, module: bytes, tmp_path: Path) -> None:
    config = CompileConfig.make("trn1", extra_flags=("--native-int46",))
    with pytest.raises(KernelgenError, match="ended with status 2") as caught:
        NeuronxCC.open(install()).compile(module, config, kernel=KERNEL, log_dir=tmp_path)
    assert "  | [ERROR] unrecognized arguments: --native-int46" in str(caught.value)


def test_dies_with_its_caller(install: Install, module: bytes, tmp_path: Path) -> None:
    """A build that is killed with SIGKILL leaves no compiler that fills the machine's memory."""
    record = tmp_path / "record"
    program = install(hang=True, record=str(record))
    (tmp_path / "hlo").write_bytes(module)
    code = (
        "from pathlib import Path; from kernelgen.compilers.neuronx_cc import *; from kernelgen.compilers.step import *; from kernelgen.compilers.settings import CompileConfig\n"
        f"compile_file({str(tmp_path / 'hlo')!r}, {str(tmp_path / 'out')!r}, CompileConfig.make('trn1'), "
        f"NeuronxCC(Path({str(program)!r}), '2.0'))"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert wait_for(lambda: record.exists() and record.read_text().endswith("\n"))
    caller.kill()
    caller.wait()
    (run,) = records(record)
    assert wait_for(lambda: not any(map(alive, run["pids"])))
    assert not (tmp_path / "out").exists()
