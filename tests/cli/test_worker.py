"""The persistent worker's protocol works for any use of file descriptors in a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto
from kernelgen.steps import lint as lint_step
from kernelgen.steps import worker

TENSOR = "(4,1,1,1)/f32"

NOISY = """
import os, sys, threading, time
from kernelgen.emitters import emitter

@emitter("noisy")
def noisy(x):
    os.write(1, b'{"exitCode": 7, "output": "forged", "requestId": 0}\\n')
    print("printed")
    sys.__stdout__.write("to the stream that was there first\\n")
    sys.__stdout__.flush()
    threading.Thread(target=lambda: (time.sleep(0.3), os.write(1, b"late\\n"))).start()
    assert os.read(0, 100) == b""
    return x + x

@emitter("quiet")
def quiet(x):
    return x * x
"""


@pytest.fixture
def emitters(tmp_path: Path) -> Path:
    path = tmp_path / "noisy.py"
    path.write_text(NOISY)
    return path


def request(emitters: Path, op: str, number: int) -> str:
    spec = json.dumps({"op": op, "inputs": [TENSOR], "output": TENSOR, "params": {}, "alias": None})
    output = emitters.with_name(f"{op}{number}.hlo.pb")
    words = ["emit", f"--spec={spec}", "--library=mine", f"--emitter={emitters}", f"--output={output}"]
    return json.dumps({"arguments": words, "requestId": number}) + "\n"


CAUTION = "[kernelgen/i64-parameter] input0 (parameter): a 64-bit integer parameter"


def wide(folder: Path, kind: str) -> Path:
    """Writes HLO that returns its one parameter, of an element type."""
    module = proto.parse(b"\x1a\x00")
    module.name = module.entry_computation_name = "k"
    (computation,) = module.computations
    instruction = computation.instructions.add(name="input0", opcode="parameter")
    instruction.shape.element_type = next(n for n, name in proto.ELEMENT_TYPES.items() if name == kind)
    instruction.shape.dimensions.append(4)
    computation.program_shape.parameters.append(instruction.shape)
    computation.program_shape.result.CopyFrom(instruction.shape)
    computation.program_shape.parameter_names.append("input0")
    module.host_program_shape.CopyFrom(computation.program_shape)
    path = folder / f"{kind}.hlo.pb"
    path.write_bytes(proto.serialize(module))
    return path


def test_the_check_of_hlo_prints_warnings_and_refuses_errors(tmp_path: Path) -> None:
    stamp = tmp_path / "stamp"
    flags = f"--flags={json.dumps(CompileConfig.make('trn1').flags())}"
    words = ["lint", f"--stamp={stamp}", f"--hlo={wide(tmp_path, 's64')}", flags]
    code, said = worker.run(words)
    assert (code, stamp.exists()) == (0, True)
    assert said.startswith(f"warning: kernel s64 for trn1: {CAUTION}") and said.count("\n") == 1
    stamp.unlink()
    code, said = worker.run([*words, f"--hlo={wide(tmp_path, 'f64')}", flags])
    assert (code, stamp.exists()) == (1, False)
    assert "error: kernel f64 for trn1: [NCC_ESPP004] input0 (parameter): the type f64" in said


def test_the_check_of_hlo_is_for_the_flags_of_each_kernel(tmp_path: Path) -> None:
    narrow = wide(tmp_path, "f8e4m3fn")
    stamp = tmp_path / "stamp"

    def check(*extra_flags: str) -> tuple[int, str]:
        flags = json.dumps(CompileConfig.make("trn1", extra_flags=extra_flags).flags())
        return worker.run(["lint", f"--stamp={stamp}", f"--hlo={narrow}", f"--flags={flags}"])

    code, said = check()
    assert code == 1 and "[NCC_EVRF051]" in said
    assert check("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3") == (0, "")
    code, said = worker.run(["lint", f"--stamp={stamp}", f"--hlo={narrow}"])
    assert code == 2 and "1 HLO, and the flags of 0" in said


def powers(folder: Path) -> Path:
    """Writes HLO that raises 64-bit integers to their own power, for NCC_EVRF062."""
    path = wide(folder, "s64")
    module = proto.parse(path.read_bytes())
    (computation,) = module.computations
    parameter = computation.instructions[0]
    parameter.id = 1
    power = computation.instructions.add(name="power", opcode="power", id=2, shape=parameter.shape)
    power.operand_ids.extend([1, 1])
    computation.root_id = 2
    path.write_bytes(proto.serialize(module))
    return path


@pytest.mark.parametrize("way", ["lint", "compile", "bundle"])  # Bazel's check of a bundle; a compile; CMake's bundle
def test_a_flag_waives_a_code_in_each_way_to_build(tmp_path: Path, way: str) -> None:
    hlo = powers(tmp_path)

    def check(*extra_flags: str) -> tuple[int, str]:
        config = CompileConfig.make("trn1", extra_flags=extra_flags)
        if way == "bundle":
            try:
                return 0, "".join(lint_step.refuse_unsupported_hlo([hlo], [config]))
            except KernelgenError as error:
                return error.exit_code, str(error)
        if way == "lint":
            return worker.run(
                ["lint", f"--hlo={hlo}", f"--flags={json.dumps(config.flags())}", f"--stamp={tmp_path}/stamp"]
            )
        flags = [f"--flag={flag}" for flag in config.flags()]
        words = ["compile", "--compiler=simulator", "--kernel=s64", f"--hlo={hlo}", f"--output={tmp_path}/k.neff"]
        return worker.run([*words, *flags])

    code, said = check()
    assert code == 1 and "[NCC_EVRF062]" in said
    for value in ("pow", "all"):
        code, said = check(f"--implicit-integer-downcast={value}")
        assert code == 0 and "[NCC_EVRF062]" in said, said
    code, said = check("--implicit-integer-downcast=dot")
    assert code == 1 and "[NCC_EVRF062]" in said


def test_a_compile_prints_warnings_and_goes_on(tmp_path: Path) -> None:
    hlo, output = wide(tmp_path, "s64"), tmp_path / "k.neff"
    words = ["compile", "--compiler=simulator", "--kernel=k", f"--hlo={hlo}", f"--output={output}"]
    code, said = worker.run([*words, *(f"--flag={flag}" for flag in CompileConfig.make("trn1").flags())])
    assert (code, output.exists()) == (0, True), said
    assert said.startswith(f"warning: kernel k for trn1: {CAUTION}")


def serve(requests: str) -> subprocess.CompletedProcess[str]:
    """Runs a persistent worker until it has answered."""
    tools = str(Path(worker.__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-P", "-m", "kernelgen.steps.worker", "--persistent_worker"],
        input=requests,
        env=os.environ | {"PYTHONPATH": tools},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_output_of_a_step_is_not_part_of_the_protocol(emitters: Path) -> None:
    requests = "".join(request(emitters, op, n) for n, op in enumerate(["noisy", "quiet", "noisy", "quiet"]))
    done = serve(requests)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(a["requestId"], a["exitCode"]) for a in answers] == [(n, 0) for n in range(4)], done.stderr
    assert [a["output"] for a in answers] == ["printed\n", "", "printed\n", ""]
    assert done.stderr.count("forged") == done.stderr.count("late") == 2
    assert all(emitters.with_name(f"{op}.hlo.pb").is_file() for op in ("noisy0", "quiet1", "noisy2", "quiet3"))
