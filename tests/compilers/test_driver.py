"""The driver of neuronx-cc as the program that Bazel runs, with a system's Python and no packages, and with kernelgen's
cache.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.compilers import neuronx_cc_driver as driver
from kernelgen.compilers import simulate
from kernelgen.compilers.settings import CompileConfig
from kernelgen.hlo import proto
from kernelgen.neff import container

Install = Callable[..., Path]

DRIVER = Path(driver.__file__)
IDENTITY = "neuronx-cc 2.24.5133.0+58f8de22"
KERNEL = "sqr-64x4-f32-0123456789ab"

# The files that the rules copy without comment lines: the driver, and the modules of the simulator's step
# (tools/kernelgen/BUILD.bazel).
COPIED = [
    *("errors.py", "fileio.py", "spec/__init__.py", "spec/canonical.py"),
    *("compilers/__init__.py", "compilers/neuronx_cc_driver.py", "compilers/simulate.py"),
    *("hlo/__init__.py", "hlo/cpu.py", "hlo/custom_calls.py", "hlo/proto.py"),
    *("neff/__init__.py", "neff/container.py", "neff/identity.py"),
    *("steps/__init__.py", "steps/protocol.py", "steps/simulate.py"),
]


def run(
    program: Path, folder: Path, module: bytes, *more: str, identity: str = IDENTITY
) -> subprocess.CompletedProcess[str]:
    hlo = folder / f"{KERNEL}.hlo.pb"
    hlo.write_bytes(module)
    words = [f"--compiler={program}", f"--identity={identity}", f"--hlo={hlo}", f"--output={output(folder)}", *more]
    # Bazel calls it like this: isolated, in an environment with only PATH.
    return subprocess.run(
        [sys.executable, "-I", "-S", DRIVER, *words, "--", *CompileConfig.make("trn1").flags()],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def output(folder: Path) -> Path:
    return folder / f"{KERNEL}.trn1.neff"


def test_compiles_with_the_flags_as_given(install: Install, module: bytes, tmp_path: Path) -> None:
    done = run(install(record=str(tmp_path / "record")), tmp_path, module)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert output(tmp_path).read_bytes()[:8] == (2).to_bytes(8, "little")
    _, compiled = (json.loads(line) for line in (tmp_path / "record").read_text().splitlines())
    assert compiled["arguments"][:2] == ["compile", "hlo_module.pb"]
    assert compiled["arguments"][2:-4] == CompileConfig.make("trn1").flags()


def test_a_failure_names_the_neff_and_keeps_the_log(install: Install, module: bytes, tmp_path: Path) -> None:
    done = run(install(exit=70, output="none", print="[F134] out of registers"), tmp_path, module)
    assert done.returncode == 1 and not output(tmp_path).exists()
    assert done.stderr.startswith(f"error: {KERNEL}.trn1: neuronx-cc ended with status 70\n    the log's last lines:\n")
    assert f"the whole log: {tmp_path}/{KERNEL}.trn1.failed/log.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_log_is_in_the_file_that_is_named_and_names_no_place(
    install: Install, module: bytes, tmp_path: Path
) -> None:
    program = install(print="in {cwd}")
    log = tmp_path / "kept.log"
    assert run(program, tmp_path, module, f"--log={log}").returncode == 0
    first, *rest = log.read_text().splitlines()
    assert first.startswith("$ neuronx-cc compile hlo_module.pb --framework XLA --target trn1 ")
    assert rest == ["Compiler status PASS", "in ."]
    assert str(tmp_path) not in log.read_text()


def test_another_version_of_the_compiler_is_refused(install: Install, module: bytes, tmp_path: Path) -> None:
    done = run(install(), tmp_path, module, identity="neuronx-cc 9")
    assert done.returncode == 1
    assert f"the build is for neuronx-cc 9, and this machine has {IDENTITY}" in done.stderr
    done = run(tmp_path / "missing", tmp_path, module)
    assert done.returncode == 1 and "is not a program that can be run" in done.stderr


def cache(program: Path, tmp_path: Path, **variables: str) -> None:
    """Puts the program that reads kernelgen's cache beside the compiler, as the rules do if a cache is configured."""
    tools = DRIVER.parents[2]
    text = "".join(f"export {name}='{value}'\n" for name, value in variables.items())
    script = program.with_name("neff-cache")
    script.write_text(
        f'#!/bin/sh\n{text}PYTHONPATH={tools} exec {sys.executable} -P -m kernelgen.compilers.cached "$@"\n'
    )
    script.chmod(0o755)


def runs(tmp_path: Path) -> int:
    lines = (tmp_path / "record").read_text().splitlines()
    return sum(json.loads(line)["arguments"][0] == "compile" for line in lines)


def test_what_is_in_the_cache_is_not_compiled(install: Install, module: bytes, tmp_path: Path) -> None:
    program = install(record=str(tmp_path / "record"))
    cache(program, tmp_path, NEURON_KERNELGEN_NEFF_CACHE=str(tmp_path / "cache"))
    assert run(program, tmp_path, module).returncode == 0
    made = output(tmp_path).read_bytes()
    output(tmp_path).unlink()
    done = run(program, tmp_path, module)
    assert (done.returncode, done.stderr, runs(tmp_path)) == (0, "", 1)
    assert output(tmp_path).read_bytes() == made
    # Another build's launcher may be a link to the same compiler; the cache belongs to the launcher.
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "neuronx-cc").symlink_to(program)
    assert run(other / "neuronx-cc", tmp_path, module).returncode == 0
    assert runs(tmp_path) == 1


def test_a_failed_compile_is_not_cached(install: Install, module: bytes, tmp_path: Path) -> None:
    program = install(exit=70, output="none")
    cache(program, tmp_path, NEURON_KERNELGEN_NEFF_CACHE=str(tmp_path / "cache"))
    done = run(program, tmp_path, module)
    assert done.returncode == 1 and "ended with status 70" in done.stderr
    assert not list((tmp_path / "cache").glob("*.neff"))


@pytest.mark.parametrize("mode", ["read-only", "nonsense"])
def test_a_cache_that_cannot_be_used_does_not_stop_a_compile(
    install: Install, module: bytes, tmp_path: Path, mode: str
) -> None:
    program = install()
    shared = {"NEURON_KERNELGEN_SHARED_CACHE": "/proc/nowhere", "NEURON_KERNELGEN_SHARED_CACHE_MODE": mode}
    cache(program, tmp_path, NEURON_KERNELGEN_NEFF_CACHE="/proc/nowhere", **shared)
    done = run(program, tmp_path, module)
    assert done.returncode == 0 and output(tmp_path).exists()
    assert done.stderr.startswith("warning: ")


def without_comments(source: str) -> str:
    """Returns the rules' copy (tools/bazel/kernelgen_tool.bzl)."""
    command = ["sed", "-e", "/^[[:space:]]*#/d", "-e", "/^[[:space:]]*$/d"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def meaning(source: str) -> str:
    """Returns a module's syntax without its docstrings: the copy drops their empty lines."""
    tree = ast.parse(source, feature_version=(3, 8))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""
    return ast.dump(tree)


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_without_comments_means_the_same(name: str) -> None:
    source = (DRIVER.parents[1] / name).read_text()
    assert meaning(without_comments(source)) == meaning(source)


def test_a_simulated_neff_has_the_bytes_that_its_version_stands_for() -> None:
    # The caches identify a simulated NEFF by the simulator's version: raise it together with this digest.
    assert simulate.VERSION == "4"
    made = container.write_simulated(copy_module(), CompileConfig.make("trn1").flags(), "simulator 4 (jaxlib 0)")
    assert hashlib.sha256(made).hexdigest() == "f5a297f6506353213fd27fc58e71fde6bffbcf5f35e6a74c4762a4b4c7df1af0"


def copy_module() -> bytes:
    """Returns HLO that does not depend on JAX's version: its one parameter, f32[4], is its result."""
    message = proto.parse(b"\x1a\x00")
    message.name = message.entry_computation_name = "k"
    (computation,) = message.computations
    instruction = computation.instructions.add(name="input0", opcode="parameter")
    instruction.shape.element_type = 11
    instruction.shape.dimensions.append(4)
    return proto.serialize(message)
