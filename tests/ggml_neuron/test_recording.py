"""Recording the graphs that programs compute, and the manifests that `kernelgen model` makes of them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Benched, Programs, Run, llama_bench, manifest_of

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.spec.kernel import KernelSpec


def specs(recording: Path) -> list[KernelSpec]:
    """Returns the kernels of a recording's manifest, in its order."""
    (request,) = manifest.load([manifest_of(recording)], Catalog([builtin_library()]))
    return [kernel.spec for kernel in request.kernels if isinstance(kernel.spec, KernelSpec)]


def test_processes_record_into_one_file(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "several.graphs"
    processes = [
        subprocess.Popen(
            [programs.find("scenarios"), programs.find("libggml-neuron.so"), programs.llama_cpp, "parallel", "chain"],
            env=programs.environment(GGML_NEURON_RECORD=path),
            stdout=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    assert [p.wait(timeout=120) for p in processes] == [0] * 4
    head, *lines = path.read_text().splitlines()
    assert head.startswith('{"format":"neuron-kernelgen graphs"')
    assert lines and all(lines.count(line) == 4 for line in lines)  # each process writes a graph once


def test_nodes_that_a_program_computes_one_by_one_are_recorded(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "all.graphs"
    subprocess.run(
        [programs.llama_cpp / "test-backend-ops", "test", "-b", "NEURON0", "-o", "GET_ROWS_BACK"],
        env=programs.environment(GGML_NEURON_RECORD=path, GGML_BACKEND_PATH=programs.find("libggml-neuron.so")),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    assert {spec.op for spec in specs(path)} == {"get_rows_back"}


def test_samplers_are_recorded_for_any_temperature_and_the_vocabulary(run: Run, tmp_path: Path) -> None:
    """Before it samples on a device, llama.cpp calls supports_op for more candidates than there are. The answer needs a
    kernel for an existing number, also for the few ops that are in no call.
    """
    path = tmp_path / "samplers.graphs"
    assert run("recorded-samplers", GGML_NEURON_RECORD=path).said == {"recorded-samplers": "ok"}
    found = {(spec.op, str(spec.inputs[0]), str(dict(spec.params).get("s", ""))) for spec in specs(path)}
    assert found == {
        ("get_rows", "(1,5,1,1)/i32", ""),
        ("get_rows", "(1,500,1,1)/f32", ""),
        ("pad", "(500,1,1,1)/f32", ""),
        ("scale", "(1,5,1,1)/f32", "any"),
        ("scale", "(5,1,1,1)/f32", "any"),
        ("top_k", "(5,1,1,1)/f32", ""),
        ("top_k", "(500,1,1,1)/f32", ""),
    }


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_not_a_file_is_not_recorded_into(run: Run, tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "other.graphs"
    make(path)
    result = run("add", GGML_NEURON_RECORD=path)
    assert re.search(
        rf"GGML_NEURON_RECORD: {path} (is not a regular file|can't be written: .*): recording is off", result.log
    )
    assert result.said == {"add": "ok"} and not path.is_file()


def test_recording_writes_through_no_link(run: Run, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    path = tmp_path / "mine.graphs"
    path.symlink_to(victim)
    assert "recording is off" in run("add", GGML_NEURON_RECORD=path).log
    assert victim.read_text() == ""


def test_a_lock_that_another_process_keeps_does_not_stop_a_computation(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.graphs"
    path.touch()
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = run("add", "memory", GGML_NEURON_RECORD=path)
    assert result.said == {"add": "ok", "memory": "ok"}
    said = f"another process keeps {path} locked, so the last graphs are not in it: recording is off"
    assert result.log.count(said) == 1 and path.read_text() == ""
    run("add", GGML_NEURON_RECORD=path)
    assert [spec.op for spec in specs(path)] == ["add"]


def test_one_round_of_recording_is_enough(programs: Programs, benched: Benched, tmp_path: Path) -> None:
    """Flash attention is on in the first round; the second round computes everything with the kernels."""
    built = specs(benched.recorded)
    ops = {spec.op for spec in built}
    assert "flash_attn_ext" in ops and "soft_max" not in ops
    assert "No kernel can be built" not in benched.recorded.with_suffix(".yaml").read_text()
    again = tmp_path / "again.graphs"
    shutil.copy(benched.recorded, again)
    variables = {"GGML_NEURON_KERNEL_DIR": benched.kernels, "GGML_NEURON_LOG": "2"}
    log = llama_bench(programs, benched.model, **variables).stderr
    assert "no kernel for" not in log and "because no kernel computes them" not in log
    assert " 0 ops ran on the CPU instead" in log
    # Every kernel that was recorded is loaded before the first launch of its graph.
    assert set(re.findall(r"core 0: loaded (\S+) of", log)) == {spec.id for spec in built}
    assert log.rindex("core 0: loaded ") < log.rindex(
        "core 0: the programs of a graph were loaded before its first launch"
    )
    llama_bench(programs, benched.model, GGML_NEURON_RECORD=again, **variables)
    assert specs(again) == built
