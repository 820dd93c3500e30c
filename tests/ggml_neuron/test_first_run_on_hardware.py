"""docs/guides/first-run-on-hardware.md on a simulated machine with AWS's defaults: two cores, and no variables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import random_llama
from programs import ROOT, Programs

GUIDE = (ROOT / "docs" / "guides" / "first-run-on-hardware.md").read_text()
(ONE_CORE,) = re.findall(r"^    (export NEURON_RT_VISIBLE_CORES=.*)$", GUIDE, re.MULTILINE)
_COMMAND = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:kernelgen|test-backend-ops|llama-bench)\b[^`]*)`")

Step = Callable[..., str]


def commands(step: int) -> list[str]:
    """Returns the commands of a step of the guide, with the compiler that the simulator needs."""
    (cell,) = re.findall(rf"^\| {step} \| (.*?) \|", GUIDE, re.MULTILINE)
    return [match.replace("--compiler neuronx-cc", "--compiler simulator") for match in _COMMAND.findall(cell)]


@pytest.fixture
def run_step(programs: Programs, exporter: Path, tmp_path: Path) -> Step:
    """Returns a function that runs the commands of a step in a folder with MODEL.gguf, and returns their output."""
    size = random_llama.Size(n_embd=64, n_head=2, n_head_kv=1, n_ff=128, n_layer=1, n_ctx=512)
    random_llama.write(tmp_path / "MODEL.gguf", size=size)
    (tmp_path / "compiled").mkdir(mode=0o700)
    library = tmp_path / "neuron" / "lib" / "libnrt.so.1"  # as in /opt/aws
    library.parent.mkdir(parents=True)
    shutil.copy(programs.simulator, library)
    environment = programs.environment(
        GGML_BACKEND_PATH=programs.find("libggml-neuron.so"),
        GGML_NEURON_LIBNRT=library,
        NEURON_KERNELGEN_CACHE=tmp_path / "cache",
        NEURON_KERNELGEN_EXPORTER=exporter,
        NEURON_RT_NUM_CORES=None,
        NEURON_SIMULATOR_CACHE=tmp_path / "compiled",
    )
    environment["PATH"] = f"{programs.llama_cpp}:{environment['PATH']}"

    def run_step(step: int, before: str = "", instance: str = "trn1.2xlarge") -> str:
        output = ""
        environment["NEURON_SIMULATOR_INSTANCE"] = instance
        for command in commands(step):
            script = f'kernelgen() {{ {sys.executable} -m kernelgen "$@"; }}\n{before}\n{command}'
            completed = subprocess.run(
                ["bash", "-c", script],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            output += completed.stdout + completed.stderr
            assert completed.returncode == 0, f"$ {command}\n{output[-4000:]}"
        return output

    return run_step


def count_ops(log: str) -> tuple[int, int]:
    """Returns the numbers of ops that ran on NeuronCores and on the CPU instead."""
    device = re.findall(r"(\d+) ops ran on NeuronCores", log)
    on_cpu = re.findall(r"(\d+) ops ran on the CPU instead", log)
    return int(device[-1]), int(on_cpu[-1])


def test_the_steps_work_with_the_defaults_of_aws(run_step: Step) -> None:
    assert "can build kernels here" in run_step(1, ONE_CORE)
    run_step(3, ONE_CORE)
    log = run_step(4, ONE_CORE)
    device, on_cpu = count_ops(log)
    assert device == len(set(re.findall(r"^  ((?:SCALE|MEAN)\(.*\)): ", log, re.MULTILINE))) > 10 and on_cpu == 0
    log = run_step(5, ONE_CORE)
    assert count_ops(log)[0] > 100 and count_ops(log)[1] == 0
    assert "NeuronCores is used" not in log

    # without the variable, a process has both cores
    log = run_step(2)
    assert re.search(r"^ok +collectives: 2 cores", log, re.MULTILINE), log
    assert not re.search("^(FAILED|warning) ", log, re.MULTILINE), log
    log = run_step(5)
    assert count_ops(log)[0] > 100 and count_ops(log)[1] == 0
    assert "ggml-neuron: 1 of 2 NeuronCores is used: " in log


def test_the_lnc_of_the_file_of_aws_is_that_of_kernels(run_step: Step, tmp_path: Path) -> None:
    (tmp_path / "neuron" / "logical_nc_config").write_text("1\n")
    device, on_cpu = count_ops(run_step(4, ONE_CORE, "trn2.48xlarge"))
    assert device > 10 and on_cpu == 0
    assert "compiler: {lnc: 1}" in (tmp_path / "ops.yaml").read_text()
