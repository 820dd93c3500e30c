"""The GGML backend on a simulated NeuronCore: what it computes, where memory is, and what happens when something is wrong."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from programs import ROOT, SCENARIOS, Programs, Result, Run, build

sys.path.insert(0, str(ROOT / "tests" / "llama"))

import random_llama

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library

BUFFERS = ("device", pytest.param("host", marks=pytest.mark.long))


def ran_on(result: Result) -> tuple[int, int]:
    """Returns how many nodes ran on the device, and on the CPU instead, from the log."""
    device = re.search(r"(\d+) ops ran on NeuronCores", result.log)
    cpu = re.search(r"(\d+) ops ran on the CPU instead of a NeuronCore", result.log)
    assert device and cpu, result.log
    return int(device[1]), int(cpu[1])


@pytest.mark.parametrize("buffers", ["device", "host"])
def test_what_was_recorded_is_found_and_computes_what_the_cpu_does(run: Run, kernels: Path, buffers: str) -> None:
    result = run(
        *SCENARIOS,
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS=buffers,
        GGML_NEURON_LOG="1",
        GGML_NEURON_RECORD="",
    )
    assert result.said == dict.fromkeys(SCENARIOS, "ok"), result.log
    device, cpu = ran_on(result)
    assert device > len(SCENARIOS) and cpu == 0
    assert "no kernel for" not in result.log


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("scenario", ["memory", "probes", "empty", "scheduled", "parallel", "too-much"])
def test_what_needs_no_kernel_of_its_own(run: Run, kernels: Path, buffers: str, scenario: str) -> None:
    result = run(scenario, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers)
    assert result.said == {scenario: "ok"}, result.log


def test_a_node_that_only_the_device_can_run_is_computed_without_a_kernel(run: Run, kernels: Path) -> None:
    result = run("stranded", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    assert result.said == {"stranded": "ok"}, result.log
    assert ran_on(result) == (0, 1)


def test_rows_written_on_the_cpu_are_all_that_is_moved(run: Run, kernels: Path) -> None:
    """Of a cache of 17.6 MiB two planes' six rows of 1 KiB: what lies between some of them comes along."""
    result = run("stranded-rows", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    assert result.said == {"stranded-rows": "ok"}, result.log
    assert ran_on(result) == (0, 1)
    moved = re.search(
        r"nodes on the CPU moved (\S+) MiB to the host or back, at most \1 MiB, for SET_ROWS ", result.log
    )
    assert moved and float(moved[1]) <= 0.1, result.log


def test_without_a_kernel_an_optimizers_step_changes_its_momenta_too(run: Run, kernels: Path) -> None:
    result = run(
        "stranded-optimizer", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1"
    )
    assert result.said == {"stranded-optimizer": "ok"}, result.log
    assert ran_on(result) == (0, 1)


@pytest.mark.parametrize(
    ("scenario", "ran"),
    [
        ("two-cores", (2 * 5 * 6, 2 * 5)),
        ("two-cores-and-the-cpu", (0, 2 * 5)),
    ],  # rounds of a chain of six nodes and one
)
def test_two_cores_compute_at_once(run: Run, kernels: Path, scenario: str, ran: tuple[int, int]) -> None:
    result = run(
        scenario,
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        NEURON_RT_NUM_CORES="2",
    )
    assert result.said == {scenario: "ok"}, result.log
    assert ran_on(result) == ran


def test_a_kernel_is_loaded_once_however_often_it_runs(run: Run, kernels: Path) -> None:
    result = run("add", "reuse", "skip", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1")
    assert ran_on(result)[0] > 10
    assert result.log.count("loaded add-64x4-f32") == 1


@pytest.mark.parametrize("form", ["a pack", "a folder with packs", "a tree", "after another folder"])
def test_kernels_are_found_in(run: Run, kernels: Path, tmp_path: Path, form: str) -> None:
    pack, tree = kernels / "scenarios_trn1.kernels.gguf", kernels / "scenarios_trn1"
    names = {
        "a pack": str(pack),
        "a folder with packs": str(kernels),
        "a tree": str(tree),
        "after another folder": f"{tmp_path}:{kernels}",
    }
    result = run("chain", GGML_NEURON_KERNEL_DIR=names[form], GGML_NEURON_LOG="1")
    assert result.said == {"chain": "ok"}, result.log
    count = len(json.loads((tree / "index.json").read_text())["kernels"])
    assert f"{tree if form == 'a tree' else pack}: {count} kernels for trn1" in result.log


def test_buffers_are_in_host_memory_when_kernels_do_not_make_up_a_transformer(run: Run, kernels: Path) -> None:
    assert "tensors in host memory" in run("memory", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1").log


# --- recording -------------------------------------------------------------------------------------------------------------


def entries(path: Path) -> dict[str, int]:
    """Returns a recorded manifest's kernels, by id, with how often each was asked for."""
    return {kernel: asked for kernel, (asked, _) in counts(path).items()}


def counts(path: Path) -> dict[str, tuple[int, int]]:
    """Returns the same, with how often each was executed."""
    (request,) = manifest.load([path], Catalog([builtin_library()]))
    comment = r"^  - .*  # asked for (\d+) times?, executed (\d+) times?$"
    found = [(int(a), int(e)) for a, e in re.findall(comment, path.read_text(), re.MULTILINE)]
    assert len(found) == len(request.kernels)
    return dict(zip((k.spec.id for k in request.kernels), found, strict=True))


def test_threads_and_processes_record_into_one_manifest(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "Several processes.yaml"
    processes = [
        subprocess.Popen(
            [programs.find("scenarios"), programs.find("libggml-neuron.so"), programs.llama_cpp, "threads"],
            env=programs.environment(GGML_NEURON_RECORD=path),
            stdout=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    assert [p.wait(timeout=120) for p in processes] == [0] * 4
    # A process has 8 threads, which all ask for the same 20 ops and for 20 others each.
    assert sorted(entries(path).values()) == [4] * (8 * 20) + [4 * 8] * 20
    assert "name: several_processes\n" in path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # neither locks nor temporary files


def test_recording_goes_on_in_a_manifest_that_was_edited(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "# mine\nformat: 1\nname: mine\ntargets: [inf2]\nkernels:\n  - op: relu\n    inputs: ['(8,1,1,1)/f32']\n    output: (8,1,1,1)/f32\n"
    )
    run("add", GGML_NEURON_RECORD=path)
    run("add", GGML_NEURON_RECORD=path)
    text = path.read_text()
    assert text.startswith("# mine\nformat: 1\nname: mine\ntargets: [inf2]\nkernels:\n  - op: relu\n")
    (request,) = manifest.load([path], Catalog([builtin_library()]))
    assert [k.spec.op for k in request.kernels] == ["relu", "add"]
    # By the scenario and, when it is first computed, by the planner. It is computed twice.
    assert text.endswith("# asked for 4 times, executed 4 times\n")


def test_ops_that_no_emitter_computes_are_comments(programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    subprocess.run(
        [programs.llama_cpp / "test-backend-ops", "support", "-b", "NEURON0", "-o", "ADD,GET_ROWS_BACK"],
        env=programs.environment(GGML_NEURON_RECORD=path, GGML_BACKEND_PATH=programs.find("libggml-neuron.so")),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    lines = [line for line in path.read_text().splitlines() if '"get_rows_back"' in line]
    left_out = [line for line in lines if line.startswith("  # - ")]
    assert left_out and all(re.search(r"/(i32|i?q\w+|tq\w+|\w+fp4)\", \"\(", line) for line in left_out)
    assert not any(re.search(r"/(f32|f16|bf16)\", \"\(", line) for line in left_out)
    assert len(lines) > len(left_out)
    assert {i.split("-")[0] for i in entries(path)} == {"add", "get_rows_back"}


@pytest.mark.parametrize("text", ["format: 1\nname: x\n", "no manifest at all"])
def test_a_file_that_is_no_list_of_kernels_is_left_alone(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    result = run("add", GGML_NEURON_RECORD=path)
    assert path.read_text() == text
    assert (
        f"GGML_NEURON_RECORD: {path} exists and is not a manifest with a list of kernels: recording is off"
        in result.log
    )


def test_a_folder_that_is_not_there_ends_recording_and_nothing_else(run: Run, kernels: Path, tmp_path: Path) -> None:
    result = run("add", "memory", GGML_NEURON_RECORD=tmp_path / "no" / "where.yaml")
    assert result.said["memory"] == "ok"
    assert f"GGML_NEURON_RECORD: {tmp_path}/no: No such file or directory: recording is off" in result.log


def test_a_comment_becomes_an_entry_when_there_is_an_emitter(run: Run, tmp_path: Path) -> None:
    """As an earlier version wrote it, which knew no emitter and so no names of parameters either."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "format: 1\nname: mine\ntargets: [trn1]\nkernels:\n"
        '  # - {op: "add", inputs: ["(64,4,1,1)/f32", "(64,4,1,1)/f32"], output: "(64,4,1,1)/f32"}  # asked for 3 times\n'
        '  # - {op: "rms_norm", inputs: ["(64,4,1,1)/f32"], output: "(64,4,1,1)/f32", params: {word0: 925353388}}'
        "  # asked for 1 time\n"
        '  # - {op: "nothing", inputs: [], output: "(64,4,1,1)/f32"}  # asked for 1 time\n'
    )
    run("chain", GGML_NEURON_RECORD=path)
    found = {i.split("-")[0]: count for i, count in entries(path).items()}
    assert found == {"add": 5, "mul": 2, "rms_norm": 3, "scale": 2, "silu": 2, "sub": 2}
    assert {ran for _, ran in counts(path).values()} == {1}
    assert re.findall(r"^  # .*", path.read_text(), re.MULTILINE) == [
        '  # - {op: "nothing", inputs: [], output: "(64,4,1,1)/f32"}  # asked for 1 time'
    ]


def decimal_comma(folder: Path) -> dict[str, str | Path]:
    """Makes a locale whose decimal point is a comma; returns the variables that choose it, of glibc."""
    strings = [b",\0", b"\0", b"\0", struct.pack("=I", ord(",")), struct.pack("=I", 0), b"UTF-8\0"]
    offsets, at = [], 8 + 4 * len(strings)
    for string in strings:
        at += -at % 4
        offsets.append(at)
        at += len(string)
    data = struct.pack(f"=II{len(strings)}I", 0x20031115 ^ 1, len(strings), *offsets)
    for offset, string in zip(offsets, strings, strict=True):
        data += bytes(offset - len(data)) + string
    (folder / "comma").mkdir()
    (folder / "comma" / "LC_NUMERIC").write_bytes(data)
    return {"LOCPATH": folder, "LC_NUMERIC": "comma"}


def test_numbers_are_recorded_with_a_decimal_point_in_any_locale(run: Run, tmp_path: Path) -> None:
    texts = {}
    for name, locale in {"point": {}, "comma": decimal_comma(tmp_path)}.items():
        path = tmp_path / f"{name}.yaml"
        result = run("locale", "chain", "inplace", GGML_NEURON_RECORD=path, **locale)
        assert result.said["locale"] == f"a half is {'0.5' if name == 'point' else '0,5'}", result.log
        texts[name] = path.read_text().replace(name, "")
    assert "params: {s: 0.5}" in texts["point"] and "params: {eps: 1.0e-05}" in texts["point"]
    assert texts["comma"] == texts["point"]


def run_with_link(programs: Programs, path: Path, link_to: Path) -> subprocess.CompletedProcess[str]:
    """Runs a scenario that records, with a link where it will put its temporary file."""
    script = 'ln -s "$1" "$2.$$.tmp" && shift 2 && exec "$@"'
    command = [programs.find("scenarios"), programs.find("libggml-neuron.so"), programs.llama_cpp, "add"]
    return subprocess.run(
        ["sh", "-c", script, "sh", link_to, path, *command],
        env=programs.environment(GGML_NEURON_RECORD=path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_recording_writes_through_no_link(programs: Programs, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "mine.yaml"
    result = run_with_link(programs, path, victim)
    assert victim.read_text() == "precious"
    assert {i.split("-")[0] for i in entries(path)} == {"add"}, result.stderr
    assert not path.is_symlink() and sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml", "victim"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_what_is_not_a_file_is_not_recorded_into(run: Run, tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "other.yaml"
    make(path)
    result = run("add", GGML_NEURON_RECORD=path)
    assert f"GGML_NEURON_RECORD: {path} is not a regular file: recording is off" in result.log
    assert not path.is_file()


def test_a_lock_that_another_process_keeps_does_not_stop_a_computation(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    result = run("add", "memory", GGML_NEURON_RECORD=path)
    assert result.said == {"add": "ok", "memory": "ok"}
    said = f"GGML_NEURON_RECORD: another process keeps the folder of {path} locked, so the last ops that were asked for are not in it: recording is off"
    assert result.log.count(said) == 1 and not path.exists()
    os.close(folder)
    run("add", GGML_NEURON_RECORD=path)
    assert len(entries(path)) == 1


def test_what_is_executed_is_counted(run: Run, kernels: Path, tmp_path: Path) -> None:
    """Five graphs in three rounds are planned anew for each round; without a kernel the CPU computes each of the fifteen."""
    path = tmp_path / "mine.yaml"
    run("reuse", "threads", GGML_NEURON_RECORD=path)
    found = counts(path)
    add = next(kernel for kernel in found if kernel.startswith("add-"))
    assert found[add][1] == 15
    assert {executed for kernel, (_, executed) in found.items() if kernel != add} == {0}
    text = path.read_text()
    # What has a kernel is not recorded, and not counted either.
    run("reuse", GGML_NEURON_RECORD=path, GGML_NEURON_KERNEL_DIR=kernels)
    assert path.read_text() == text


def test_a_count_of_executions_that_an_older_file_lacks_is_not_made_up(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    other = '  - {op: "relu", inputs: ["(8,1,1,1)/f32"], output: "(8,1,1,1)/f32"}  # asked for 3 times\n'
    path.write_text(f"format: 1\nname: mine\ntargets: [trn1]\nkernels:\n{other}")
    run("add", GGML_NEURON_RECORD=path)
    assert other in path.read_text()
    assert path.read_text().endswith("# asked for 2 times, executed 2 times\n")


@dataclass(frozen=True)
class Benched:
    """A model, what `llama_bench` asks for when it is recorded, and a folder with the kernels for that."""

    model: Path
    recorded: Path
    kernels: Path


@pytest.fixture(scope="module")
def benched(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Benched:
    folder = tmp_path_factory.mktemp("benched")
    found = Benched(folder / "model.gguf", folder / "mine.yaml", folder / "kernels")
    random_llama.write(found.model)
    llama_bench(programs, found.model, GGML_NEURON_RECORD=found.recorded)
    build(found.recorded, found.kernels)
    return found


def test_one_round_of_recording_is_enough(programs: Programs, benched: Benched, tmp_path: Path) -> None:
    """Flash attention is on in the first round, and the second asks for nothing else."""
    ops = {kernel.partition("-")[0] for kernel in counts(benched.recorded)}
    assert "flash_attn_ext" in ops and "soft_max" not in ops
    assert "  # - " not in benched.recorded.read_text()  # all can be built
    again = tmp_path / "mine.yaml"
    shutil.copy(benched.recorded, again)
    variables = {"GGML_NEURON_KERNEL_DIR": benched.kernels, "GGML_NEURON_LOG": "1"}
    log = llama_bench(programs, benched.model, GGML_NEURON_RECORD=again, **variables).stderr
    assert again.read_bytes() == benched.recorded.read_bytes()
    assert "no kernel for" not in log and "because no kernel computes them" not in log
    # Every kernel that was executed is loaded, before the first one is; others are of graphs that memory is reserved for.
    executed = {kernel for kernel, (_, ran) in counts(benched.recorded).items() if ran}
    assert executed <= set(re.findall(r"core 0: loaded (\S+) of", log)) <= set(counts(benched.recorded))
    assert 0 < len(executed) < len(counts(benched.recorded))
    assert log.rindex("core 0: loaded ") < log.rindex("core 0: programs of a graph were loaded before it is computed")


# --- what is said ----------------------------------------------------------------------------------------------------------


def llama_bench(
    programs: Programs, model: Path, *more: str, **variables: str | Path
) -> subprocess.CompletedProcess[str]:
    """Runs a prompt of 16 tokens and generates 4 by a program that silences ggml's logger, with flash attention where there is some."""
    arguments = ["-p", "16", "-n", "4", "-r", "1", "-ngl", "99", "-fa", "auto"]
    return subprocess.run(
        [programs.llama_cpp / "llama-bench", "-m", model, *arguments, *more],
        env=programs.environment(GGML_BACKEND_PATH=programs.find("libggml-neuron.so"), **variables),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )


@pytest.mark.parametrize("name", ["no/where.yaml", "other.yaml"])
def test_a_record_that_is_not_written_is_said_when_the_logger_is_silenced(
    programs: Programs, benched: Benched, tmp_path: Path, name: str
) -> None:
    said = {
        "no/where.yaml": f"{tmp_path}/no: No such file or directory",
        "other.yaml": f"{tmp_path}/other.yaml exists and is not a manifest with a list of kernels",
    }
    (tmp_path / "other.yaml").write_text("no manifest at all")
    log = llama_bench(programs, benched.model, GGML_NEURON_RECORD=tmp_path / name).stderr
    assert log.count(f"ggml-neuron: GGML_NEURON_RECORD: {said[name]}: recording is off\n") == 1


def test_damaged_kernels_are_said_when_the_logger_is_silenced(
    programs: Programs, benched: Benched, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(benched.kernels / "mine_trn1", tree)
    for neff in tree.rglob("mul_mat-*.neff"):
        data = neff.read_bytes()
        neff.unlink()  # it may be a hard link
        neff.write_bytes(data[:3000] + bytes(100) + data[3100:])
    log = llama_bench(programs, benched.model, GGML_NEURON_KERNEL_DIR=tree).stderr
    damaged = re.findall(r"^ggml-neuron: core 0: (mul_mat-\S+) of .*: its NEFF is damaged: ", log, re.MULTILINE)
    assert damaged and len(set(damaged)) == len(damaged)
    assert re.search(r" on the CPU because no kernel computes them.*mul_mat of .* \(its kernel can't be used\)", log)


SUMMARY = re.compile(
    r"^ggml-neuron: NEURON0: (\d+) of the (\d+) ops of a graph ran on the device, in (\d+) splits?, (\d+) on the CPU "
    r"because no kernel computes them(?:, (\d+) elsewhere)?; (\d+) of (\d+) graphs lacked kernels: (.*)$",
    re.MULTILINE,
)
"""Ops on the device, of all, splits, on the CPU, elsewhere, graphs, of all, reasons."""


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("scenario", ["shared-out", "shared-out-and-watched"])
def test_what_fell_back_is_said_as_the_scheduler_has_it(run: Run, kernels: Path, buffers: str, scenario: str) -> None:
    result = run(scenario, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers)
    # One of the four is the device's, and the CPU computes it.
    assert result.said == {scenario: "4 of 6 nodes in 3 splits"}, result.log
    shape = "(64,4,1,1)/f32"
    reasons = f"sigmoid of {shape}; scale of {shape}"
    assert SUMMARY.findall(result.log) == [("3", "6", "3", "3", "", "1", "1", reasons)]


def test_nothing_is_said_when_nothing_fell_back(run: Run, kernels: Path) -> None:
    result = run("chain", "memory", GGML_NEURON_KERNEL_DIR=kernels)
    assert result.said == {"chain": "ok", "memory": "ok"}
    assert "ggml-neuron: " not in result.log


def test_a_program_of_which_nothing_has_a_kernel_is_told(run: Run, kernels: Path) -> None:
    result = run("threads", GGML_NEURON_KERNEL_DIR=kernels)
    (line,) = re.findall("^ggml-neuron: .*", result.log, re.MULTILINE)
    said = r"ggml-neuron: no graph had an op with a kernel; what has none: sqr of (.*); sqr of (.*); sqr of (.*); and 177 others"
    assert re.fullmatch(said, line)


def test_what_fell_back_of_a_model_is_what_the_schedulers_own_log_has(
    programs: Programs, benched: Benched, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(benched.kernels / "mine_trn1", tree)
    index = json.loads((tree / "index.json").read_text())
    index["kernels"] = [k for k in index["kernels"] if k["spec"]["op"] not in ("rms_norm", "swiglu")]
    (tree / "index.json").write_text(json.dumps(index))
    variables = {"GGML_NEURON_KERNEL_DIR": tree, "GGML_SCHED_DEBUG": "2", "GGML_NEURON_BUFFERS": "device"}
    log = llama_bench(programs, benched.model, "-v", **variables).stderr
    graphs = set()
    for text in re.split(r"^## SPLIT #0: ", log, flags=re.MULTILINE)[1:]:
        nodes = re.findall(r"^node #\s*\d+ \(\s*(\S+)\):.*?\) \[\s*(\S+)\s", text, re.MULTILINE)
        on_device = sum(backend.startswith("NEURO") for _, backend in nodes)
        graphs.add((on_device, len(nodes), len(re.findall(r"^## SPLIT #\d+: NEURON0", text, re.MULTILINE))))
    found = SUMMARY.findall(log)
    assert len(found) == 2  # a context for the prompt, and one for what is generated
    for device, ops, splits, lacking, elsewhere, *_, reasons in found:
        assert (int(device), int(ops), int(splits)) in graphs
        # The embedding's rows are gathered where llama.cpp keeps it.
        assert (int(lacking), int(elsewhere)) == (int(ops) - int(device) - 1, 1)
        assert {op for op, _ in re.findall(r"(\w+) of \((\d+)", reasons)} == {"rms_norm", "swiglu"}


@pytest.mark.parametrize(("level", "expected"), [("0", 10), ("2", 25)])
def test_lines_that_differ_in_names_only_are_not_repeated_without_end(
    run: Run, kernels: Path, tmp_path: Path, level: str, expected: int
) -> None:
    for n in range(25):
        (tmp_path / f"bad{n}.kernels.gguf").write_bytes(b"bad")
    result = run("add", GGML_NEURON_KERNEL_DIR=f"{tmp_path}:{kernels}", GGML_NEURON_LOG=level)
    assert result.said == {"add": "ok"}
    assert result.log.count("ggml-neuron: kernels left out: ") == expected
    assert result.log.count("more lines like the last one are left out") == (expected == 10)


def test_an_error_is_said_once(run: Run, kernels: Path) -> None:
    result = run("add", "in-turn", GGML_NEURON_KERNEL_DIR=f"/nowhere:/nowhere:{kernels}")
    assert result.log.count("ggml-neuron: GGML_NEURON_KERNEL_DIR: /nowhere: ") == 1


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("GGML_NEURON_KERNELS_DIR", "GGML_NEURON_KERNEL_DIR"),
        ("GGML_NEURON_RECORDS", "GGML_NEURON_RECORD"),
        ("GGML_NEURON_LIB_NRT", "GGML_NEURON_LIBNRT"),
        ("NEURON_KERNELGEN_NEF_CACHE", "NEURON_KERNELGEN_NEFF_CACHE"),
    ],
)
def test_a_mistyped_variable_is_answered_by_the_nearest(run: Run, kernels: Path, wrong: str, meant: str) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, NEURON_RT_LOG_LEVEL="ERROR", **{wrong: "somewhere"})
    assert result.said == {"add": "ok"}
    assert re.findall("^ggml-neuron: .*", result.log, re.MULTILINE) == [
        f"ggml-neuron: the variable {wrong} has no meaning: is {meant} meant?"
    ]


def test_every_variable_is_known() -> None:
    """Those that the backend and kernelgen read, and the table of docs/llama-cpp.md."""
    source = (ROOT / "backend" / "ggml-neuron" / "variables.cpp").read_text()
    known = set(re.findall(r'"((?:GGML_NEURON|NEURON_KERNELGEN)_\w+)"', source))
    read: set[str] = set()
    for path in (*(ROOT / "backend").rglob("*.cpp"), *(ROOT / "backend" / "ggml-neuron").glob("*.h")):
        read |= set(re.findall(r'(?:getenv|neuron_variable)\("(GGML_NEURON_\w+)"\)', path.read_text()))
    for path in (ROOT / "tools" / "kernelgen").rglob("*.py"):
        read |= set(re.findall(r'"(NEURON_KERNELGEN_\w+)"', path.read_text()))
    assert len(read) > 10
    assert read <= known
    page = (ROOT / "docs" / "llama-cpp.md").read_text()
    assert set(re.findall(r"^\| `(GGML_NEURON_\w+)`", page, re.MULTILINE)) == {
        name for name in known if name.startswith("GGML_NEURON_")
    }


def test_without_kernels_there_is_no_device(run: Run, tmp_path: Path) -> None:
    result = run("add")
    assert (result.status, result.said) == (3, {})
    assert result.log.count("ggml-neuron: ") == 1
    assert "ggml-neuron: no devices: no kernels: GGML_NEURON_KERNEL_DIR names where they are, and" in result.log
    result = run("add", GGML_NEURON_KERNEL_DIR=tmp_path)
    assert (result.status, result.said) == (3, {})
    assert "ggml-neuron: no devices: GGML_NEURON_KERNEL_DIR has no kernels that can be used here\n" in result.log


def test_a_machine_without_libnrt_is_told_only_when_somebody_expects_one(run: Run, tmp_path: Path) -> None:
    if not Path("/opt/aws/neuron/lib/libnrt.so.1").exists():
        result = run("add", GGML_NEURON_LIBNRT=None)
        assert (result.status, result.said) == (3, {})
        assert "ggml-neuron: " not in result.log
        result = run("add", GGML_NEURON_LIBNRT=None, GGML_NEURON_KERNEL_DIR=tmp_path)
        assert "ggml-neuron: no devices: no libnrt: /opt/aws/neuron/lib/libnrt.so.1: " in result.log
    result = run("add", GGML_NEURON_LIBNRT="/nowhere", GGML_NEURON_RECORD=tmp_path / "mine.yaml")
    assert "ggml-neuron: no devices, and nothing is recorded: no libnrt: /nowhere" in result.log
    assert not (tmp_path / "mine.yaml").exists()


# --- faults ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("libnrt", ["/nowhere/libnrt.so.1", "/dev/null", sys.executable])
def test_without_libnrt_there_are_no_devices(run: Run, libnrt: str) -> None:
    result = run("add", GGML_NEURON_LIBNRT=libnrt)
    assert (result.status, result.said) == (3, {})
    assert result.log.count("ggml-neuron: ") == 1
    assert f"ggml-neuron: no devices: no libnrt: {libnrt}" in result.log


@pytest.mark.parametrize("version", ["0.24.0", "0.26.1", "1.25.3", "0.2"])
def test_another_ggml_than_the_plugin_was_built_for_is_refused(
    run: Run, programs: Programs, kernels: Path, version: str
) -> None:
    other = {"LD_PRELOAD": programs.find("libother-ggml.so"), "OTHER_GGML_VERSION": version}
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, **other)
    assert (result.status, result.said) == (3, {})
    said = rf"ggml-neuron: no devices: the plugin was built for ggml 0\.\d+\.\d+, and ggml {version} loads it: build it again"
    assert re.search(said, result.log), result.log


def test_another_patch_of_ggml_is_taken(run: Run, programs: Programs, kernels: Path) -> None:
    source = (ROOT / "backend" / "exporter" / "CMakeLists.txt").read_text()
    built_for = re.search(r"set\(EXPORTER_SUPPORTS_GGML (\S+)\)", source)
    assert built_for
    other = {"LD_PRELOAD": programs.find("libother-ggml.so"), "OTHER_GGML_VERSION": f"{built_for[1]}.99-dev"}
    assert run("add", GGML_NEURON_KERNEL_DIR=kernels, **other).said == {"add": "ok"}


def test_a_libnrt_that_does_not_initialize_gives_no_devices(run: Run, noop: dict[str, str]) -> None:
    result = run("add", NOOP_NRT_FAIL="nrt_init=2", **noop)
    assert result.status == 3
    assert "nrt_init failed: NRT_INVALID (2)" in result.log


# Loads the plugin, says how many devices there are, and uses the first one when it is told to.
USE = """
import ctypes, sys
ggml = ctypes.CDLL("libggml.so")
ggml.ggml_backend_load.restype = ggml.ggml_backend_dev_get.restype = ggml.ggml_backend_dev_init.restype = ctypes.c_void_p
ggml.ggml_backend_dev_name.restype = ctypes.c_char_p
assert ggml.ggml_backend_load(sys.argv[1].encode())
device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(0)))
print(ggml.ggml_backend_dev_count(), ggml.ggml_backend_dev_name(device).decode())
if "memory" in sys.argv:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    print(total.value - free.value)
if "use" in sys.argv:
    print("used" if ggml.ggml_backend_dev_init(device, None) else "refused")
"""


@pytest.mark.parametrize("instance", ["", "trn1.2xlarge"])
def test_cores_are_claimed_by_their_first_use(programs: Programs, kernels: Path, tmp_path: Path, instance: str) -> None:
    """Programs that load every backend and compute nothing, such as llama-quantize, take no core from others."""
    environment = programs.environment(
        GGML_NEURON_KERNEL_DIR=kernels,
        NEURON_SIMULATOR_INSTANCE=instance,
        NEURON_SIMULATOR_LOCKS=tmp_path,
        NEURON_RT_NUM_CORES=None,
        NEURON_RT_VISIBLE_CORES="0",
        NEURON_RT_LOG_LEVEL="INFO",
    )

    def use(*words: str) -> tuple[list[str], str]:
        command = [sys.executable, "-c", USE, programs.find("libggml-neuron.so"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines(), done.stderr

    said, log = use()
    assert (said, "simulated cores" in log, list(tmp_path.iterdir())) == (["1 NEURON0"], False, [])
    said, log = use("use")
    assert (said, log.count("1 simulated cores")) == (["1 NEURON0", "used"], 1)
    # What is reported as free leaves room for the kernels' programs, and a page of their scratchpad.
    said, log = use("memory")
    neffs = {hashlib.sha256(neff.read_bytes()).digest() for neff in kernels.rglob("*.neff")}
    assert said == ["1 NEURON0", str((96 << 20) + (64 << 20) + len(neffs) * (250 << 10))]
    with (tmp_path / "core-0").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said, log = use("use")
    assert said == ["1 NEURON0", "refused"]
    assert (
        "ggml-neuron: core 0: " in log and "nrt_init failed: NRT_RESOURCE (4): no NeuronCore for this process?" in log
    )


def test_every_function_that_a_libnrt_must_have_is_called() -> None:
    """The libnrt that does nothing has these functions and no others, so what is required besides fails every test with it."""
    backend = ROOT / "backend"
    required, _ = (
        (backend / "nrt" / "nrt_api.h").read_text().split("#define NRT_FUNCTIONS_REQUIRED(X)")[1].split("#define")
    )
    sources = [*(backend / "ggml-neuron").glob("*.*"), *(backend / "nrt").glob("*.cpp")]
    text = "".join(path.read_text() for path in sources)
    names = re.findall(r"X\((\w+)\)", required)
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\(", text)] == []


@pytest.mark.parametrize(
    "keep", [pytest.param(0, marks=pytest.mark.long), 100, pytest.param(5000, marks=pytest.mark.long), -1]
)
def test_a_corrupt_pack_is_left_out_and_others_are_used(run: Run, kernels: Path, tmp_path: Path, keep: int) -> None:
    pack = (kernels / "scenarios_trn1.kernels.gguf").read_bytes()
    bad = tmp_path / "bad.kernels.gguf"
    bad.write_bytes(pack[:keep] if keep >= 0 else pack[:900] + bytes(200) + pack[1100:])
    result = run("chain", GGML_NEURON_KERNEL_DIR=f"{bad}:{kernels}")
    assert result.said == {"chain": "ok"}, result.log
    assert f"kernels left out: {bad}: " in result.log


@pytest.mark.parametrize(
    "text",
    [
        *("", '{"format": 2}', "[" * 1000),
        *(pytest.param(text, marks=pytest.mark.long) for text in ("{", "[]", '{"format": 1}', '{"format": 1e400}')),
    ],
)
def test_a_corrupt_tree_is_left_out(run: Run, kernels: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    result = run("chain", GGML_NEURON_KERNEL_DIR=f"{tmp_path}:{kernels}")
    assert result.said == {"chain": "ok"}, result.log
    assert f"kernels left out: {tmp_path}/index.json: " in result.log


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_neff_that_disagrees_with_the_index_is_not_used(
    run: Run, kernels: Path, tmp_path: Path, buffers: str
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(kernels / "scenarios_trn1", tree)
    index = json.loads((tree / "index.json").read_text())
    by_op = {k["spec"]["op"]: k for k in index["kernels"]}
    add = next(k for k in index["kernels"] if k["spec"]["op"] == "add" and "(64,1,1,1)/f32" in k["spec"]["inputs"])
    add |= {name: by_op["mul_mat"][name] for name in ("neff", "neff_sha256", "neff_size")}
    (tree / "index.json").write_text(json.dumps(index))

    # The first graph is computed nevertheless, by the CPU; after that the op is refused.
    result = run("add", "skip", GGML_NEURON_KERNEL_DIR=tree, GGML_NEURON_BUFFERS=buffers, GGML_NEURON_LOG="1")
    assert result.said == {"add": "ok", "skip": "no kernel for ADD"}, result.log
    assert ran_on(result) == (0, 2)
    assert re.search(
        r"add-64x4-f32-\w+ of .*: its NEFF disagrees with the bundle's index: input0 has \d+ bytes", result.log
    )


def damage_tree(kernels: Path, folder: Path) -> Path:
    """Copies a tree and changes bytes of the NEFFs of `add`."""
    tree = folder / "tree"
    shutil.copytree(kernels / "scenarios_trn1", tree)
    for neff in tree.rglob("add-*.neff"):
        data = neff.read_bytes()
        neff.unlink()  # it may be a hard link
        neff.write_bytes(data[:3000] + bytes(100) + data[3100:])
    return tree


def damage_pack(kernels: Path, folder: Path) -> Path:
    """Copies a pack and changes a byte of the NEFFs of `add`."""
    pack = folder / "damaged.kernels.gguf"
    data = (kernels / "scenarios_trn1.kernels.gguf").read_bytes()
    for neff in (kernels / "scenarios_trn1").rglob("add-*.neff"):
        at = data.index(neff.read_bytes()) + 500  # in the header's padding, which nrt_load does not look at
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    pack.write_bytes(data)
    return pack


@pytest.mark.parametrize("damage", [damage_tree, damage_pack])
def test_a_damaged_neff_is_not_used(
    run: Run, kernels: Path, tmp_path: Path, damage: Callable[[Path, Path], Path]
) -> None:
    damaged = damage(kernels, tmp_path)
    result = run("add", "skip", "in-turn", GGML_NEURON_KERNEL_DIR=damaged, GGML_NEURON_LOG="1")
    assert result.said == {"add": "ok", "skip": "no kernel for ADD", "in-turn": "ok"}, result.log
    found = re.findall(
        r"(add-64x4-f32-\w+) of (.*): its NEFF is damaged: the SHA-256 of its \d+ bytes is \w{64}, and", result.log
    )
    assert {path for _, path in found} == {str(damaged)}
    assert "loaded add-" not in result.log
    assert "loaded sub-" in result.log  # others are used


def test_a_folder_that_cannot_be_read_is_said(run: Run, kernels: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    paths = [loop, tmp_path / "missing"]
    if os.geteuid() != 0:  # who reads everything
        paths.append(closed)
    result = run("add", GGML_NEURON_KERNEL_DIR=":".join(map(str, [*paths, kernels])))
    closed.chmod(0o700)
    assert result.said == {"add": "ok"}, result.log
    for path in paths:
        assert re.search(rf"GGML_NEURON_KERNEL_DIR: {path}(:| can't be read:) \w+", result.log), result.log


def test_kernels_of_the_simulator_are_not_loaded_by_a_real_libnrt(
    run: Run, kernels: Path, noop: dict[str, str]
) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, NOOP_NRT_REAL="1", NOOP_NRT_FAIL="nrt_load=1", **noop)
    assert (result.status, result.said) == (3, {})
    assert "never run on a NeuronCore: left out. Build the manifest with the Neuron SDK's compiler" in result.log
    assert "nrt_load" not in result.log


@pytest.mark.parametrize(("target", "said"), [("trn1", {"add": "ok"}), ("trn2", {})])
def test_kernels_for_another_target_are_left_out(run: Run, kernels: Path, target: str, said: dict[str, str]) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_TARGET=target)
    assert result.said == said
    assert ("compiled for trn1, and this is trn2: left out" in result.log) == (target == "trn2")


@pytest.mark.parametrize(
    ("instance", "cores", "said"),
    [("trn1.2xlarge", 2, {"add": "ok"}), ("inf2.48xlarge", 15, {"add": "ok"}), ("trn2.48xlarge", 15, {})],
)
def test_an_instance_is_known_by_its_family(
    run: Run, kernels: Path, instance: str, cores: int, said: dict[str, str]
) -> None:
    """What is compiled for trn1 runs on inf2, too. Of many cores as many are claimed as ggml's scheduler takes."""
    variables = {"NEURON_SIMULATOR_INSTANCE": instance, "NEURON_RT_NUM_CORES": None, "GGML_NEURON_LOG": "1"}
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, **variables)
    assert result.said == said, result.log
    assert ("compiled for trn1, and this is trn2: left out" in result.log) == (not said)
    assert f", {cores} cores\n" in result.log


@pytest.mark.parametrize(
    ("lnc", "instance", "said"),
    [
        ("1", "", {"add": "ok"}),
        (None, "", {"add": "ok"}),
        ("2", "", {}),
        ("2", "trn1.2xlarge", {}),
        ("some", "", {}),
        (None, "trn1.2xlarge", {"add": "ok"}),
        (None, "trn2.48xlarge", {}),  # whose default is 2
    ],
)
def test_kernels_for_other_logical_cores_are_left_out(
    run: Run, kernels: Path, tmp_path: Path, lnc: str | None, instance: str, said: dict[str, str]
) -> None:
    """The kernels are for --lnc 1; where the instance is one of trn2, they say that they are for trn2."""
    tree = tmp_path / "tree"
    shutil.copytree(kernels / "scenarios_trn1", tree)
    if instance.startswith("trn2"):
        index = json.loads((tree / "index.json").read_text())
        (tree / "index.json").write_text(json.dumps(index).replace('"target": "trn1"', '"target": "trn2"'))
    variables = {"NEURON_LOGICAL_NC_CONFIG": lnc, "NEURON_SIMULATOR_INSTANCE": instance}
    result = run("add", GGML_NEURON_KERNEL_DIR=tree, **variables)
    assert result.said == said, result.log
    assert bool(re.search(r"compiled for --lnc 1, and the NeuronCores have [02] \(", result.log)) == (not said), (
        result.log
    )


def test_more_cores_than_ggml_takes(run: Run, kernels: Path) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, NEURON_RT_NUM_CORES="17")
    assert result.said == {"add": "ok"}, result.log
    assert "15 of 17 NeuronCores are used: ggml's scheduler takes 15 devices beside the CPU" in result.log


def test_the_helper_is_killed_with_an_execution(run: Run, kernels: Path) -> None:
    """Which fails, or is done by the next helper; `kill` among the faults kills one that executes."""
    result = run("killed", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_QUEUE_DEPTH="1")
    assert result.said == {"killed": "ok"}, result.log
    said = re.search(r"nrt_execute failed: NRT_\w+ \(\d+\): add-64x4-f32-\w+ of .*, for node", result.log)
    assert ("nrt_execute failed" in result.log) == (said is not None)


def test_an_execution_that_fails_is_a_status_and_the_next_one_works(
    run: Run, kernels: Path, noop: dict[str, str]
) -> None:
    result = run("fails-once", GGML_NEURON_KERNEL_DIR=kernels, NOOP_NRT_FAIL="nrt_execute=6@2", **noop)
    assert result.said == {"fails-once": "ok"}, result.log
    assert "nrt_execute failed: NRT_HW_ERROR (6)" in result.log


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_core_that_goes_on_reporting_a_nan_is_not_taken_for_a_failure(run: Run, kernels: Path, buffers: str) -> None:
    """The simulator keeps the report, as a device does, so that each execution after it comes with a status that is not success."""
    scenarios = ("chain", "not-a-number", "chain", "add")
    result = run(*scenarios, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers, NEURON_RT_LOG_LEVEL="INFO")
    assert result.said == dict.fromkeys(scenarios, "ok"), result.log
    assert "output 'output0' has an element that is not a number; core 0 reports that from now on" in result.log
    assert result.log.count("or a program before it: results that are not numbers are passed on; said once") == 1


def test_an_input_that_the_compiler_left_out_is_not_bound(run: Run, kernels: Path) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_LOG": "1"}
    for strict in ("1", "0"):
        result = run("unused", NEURON_SIMULATOR_STRICT=strict, **variables)
        assert result.said == {"unused": "ok"}, result.log
        assert ran_on(result) == (1, 0)


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        ("input0=1024,output0=1024", ""),  # a compiler may leave any input out
        ("output0=1024", ""),
        ("input0=1024,input1=256", "it lacks output0"),
        ("input0=1024,input1=256,input2=4,output0=1024", "input2 has 4 bytes and the index says 0"),
        ("input0=1024,input1=256,output0=1024,output1=4", "output1 has 4 bytes and the index says 0"),
        ("input0=1024,input1=260,output0=1024", "input1 has 260 bytes and the index says 256"),
        ("input0=1024,bias=256,output0=1024", "its NEFF has a tensor 'bias', which no kernel of kernelgen has"),
    ],
)
def test_the_tensors_of_a_neff_are_those_of_the_index(
    run: Run, kernels: Path, noop: dict[str, str | Path], tensors: str, wrong: str
) -> None:
    variables = noop | {"NOOP_NRT_TENSORS": tensors, "GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_LOG": "1"}
    result = run("skip", **variables)
    assert ran_on(result) == ((0, 1) if wrong else (1, 0)), result.log
    assert wrong in result.log and ("add-64x4-f32-" in result.log)


def test_what_the_backend_places_itself_is_aligned(run: Run, kernels: Path) -> None:
    """Scratch memory and the tensors of buffers, which slices are made of, lie at multiples of 128 bytes."""
    names = ("add", "chain", "cache", "inplace", "same-twice", "optimizer", "scheduled")
    for buffers in ("device", "host"):
        result = run(
            *names,
            GGML_NEURON_KERNEL_DIR=kernels,
            GGML_NEURON_BUFFERS=buffers,
            GGML_NEURON_LOG="1",
            NEURON_SIMULATOR_SLICE_ALIGNMENT="128",
        )
        assert result.said == dict.fromkeys(names, "ok"), result.log
        assert "SLICE_ALIGNMENT" not in result.log
        assert ran_on(result)[0] > len(names)


def test_results_that_are_no_numbers_are_passed_on(run: Run, kernels: Path, noop: dict[str, str]) -> None:
    result = run("fails-once", GGML_NEURON_KERNEL_DIR=kernels, NOOP_NRT_FAIL="nrt_execute=1003", **noop)
    assert result.said == {"fails-once": "the second execution: GGML status: success"}, result.log
    assert result.log.count("results that are not numbers are passed on") == 1


@pytest.mark.parametrize(
    "function",
    ["nrt_tensor_allocate", "nrt_tensor_allocate_slice", "nrt_allocate_tensor_set", "nrt_add_tensor_to_tensor_set"],
)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_every_failure_is_reported_with_its_function(
    run: Run, kernels: Path, noop: dict[str, str], function: str, buffers: str
) -> None:
    result = run(
        "skip", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers, NOOP_NRT_FAIL=f"{function}=4", **noop
    )
    assert result.status in (0, 1), result.log  # no signal ended it
    assert f"{function} failed: NRT_RESOURCE (4)" in result.log


@pytest.mark.parametrize("function", ["nrt_tensor_allocate_slice", "nrt_allocate_tensor_set", "nrt_load"])
def test_what_fails_once_is_tried_again_when_the_graph_is_computed_again(
    run: Run, kernels: Path, noop: dict[str, str], function: str
) -> None:
    sizes = {"NOOP_NRT_TENSORS": "input0=1024,input1=1024,output0=1024"}
    result = run(
        "in-turn", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1", NOOP_NRT_FAIL=f"{function}=4@1", **noop | sizes
    )
    assert result.said == {"in-turn": "ok"}, result.log
    assert result.log.count(f"{function} failed: NRT_RESOURCE (4)") >= 1
    assert result.log.count("; computing ADD on the CPU this time\n") == 1
    assert ran_on(result) == (3, 1)


@pytest.mark.parametrize(
    ("failure", "doing"),
    [
        ("nrt_tensor_write=6@1", "clearing a buffer"),
        ("nrt_tensor_write=6@2", "writing tensor 'a'"),
        ("nrt_tensor_write=6@5", "setting tensor 'c'"),
        ("nrt_tensor_read=6@1", "reading tensor 'a'"),
    ],
)
def test_data_that_does_not_arrive_ends_the_program(
    run: Run, kernels: Path, noop: dict[str, str | Path], failure: str, doing: str
) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_BUFFERS": "device", "GGML_NO_BACKTRACE": "1"}
    result = run("memory", NOOP_NRT_FAIL=failure, **variables, **noop)
    assert (result.status, result.said) == (-signal.SIGABRT, {})
    function = failure.split("=")[0]
    what = rf"ggml-neuron: {doing}: core 0: {function} failed: NRT_HW_ERROR \(6\): \d+ bytes at offset \d+ of \d+\n"
    assert re.search(what, result.log), result.log


@pytest.mark.parametrize(
    ("buffers", "memory", "said"),
    [
        ("device", "1K", "no memory"),
        ("host", "1K", "graph_compute: GGML status: error (failed to allocate memory)"),
        # The program, and less than what is taken for copies when there is plenty.
        ("host", str((96 << 20) + (250 << 10) + (64 << 10)), "ok"),
    ],
)
def test_a_device_without_enough_memory(run: Run, kernels: Path, buffers: str, memory: str, said: str) -> None:
    result = run(
        "add", "memory", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers, NEURON_SIMULATOR_MEMORY=memory
    )
    assert result.said == {"add": said, "memory": "ok"}, result.log
    assert ("nrt_tensor_allocate failed: NRT_RESOURCE (4)" in result.log) == (said != "ok")


def test_models_are_unloaded_when_the_device_is_full(run: Run, kernels: Path, noop: dict[str, str]) -> None:
    # The second load finds no room until the first model is gone.
    sizes = {"NOOP_NRT_TENSORS": "input0=1024,input1=1024,output0=1024"}
    result = run(
        "in-turn", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1", NOOP_NRT_FAIL="nrt_load=4@2", **noop | sizes
    )
    assert result.said == {"in-turn": "ok"}, result.log
    assert len(re.findall("core 0: unloading add-64x4-f32-.* to make room", result.log)) == 1
    assert len(re.findall("core 0: loaded add-64x4-f32-", result.log)) == 2
    assert ran_on(result) == (4, 0)


def test_programs_that_take_turns_are_said_once(run: Run, kernels: Path) -> None:
    result = run(
        "in-turn-often",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_MEMORY=str((96 << 20) + (250 << 10) + (64 << 10)),  # for one
    )
    assert result.said == {"in-turn-often": "ok"}, result.log
    assert result.log.count("core 0: programs are loaded again and again (32 times so far)") == 1
    assert "again and again" not in run("in-turn-often", GGML_NEURON_KERNEL_DIR=kernels).log


# --- cost ------------------------------------------------------------------------------------------------------------------


def test_the_benchmark_of_dispatch_measures_and_judges(programs: Programs, tmp_path: Path) -> None:
    """Times are the benchmark's own to judge: here other tests run at the same time."""
    result = subprocess.run(
        [
            *(programs.find("dispatch"), programs.find("libggml-neuron.so"), programs.find("libnrt-noop.so")),
            f"--json={tmp_path / 'figures.json'}",
        ],
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    limited = [figure for figure in figures if "limit" in figure]
    assert len(figures) == 8 and len(limited) == 3, result.stdout + result.stderr
    assert all(figure["value"] > 0 for figure in figures)
    kept = all(figure["value"] <= figure["limit"]["at_most"] for figure in limited)
    assert result.returncode == (0 if kept else 1), result.stdout + result.stderr
