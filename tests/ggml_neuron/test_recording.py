"""Recording the ops that programs ask for in a manifest."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import Benched, Programs, Run, llama_bench

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library


def entries(path: Path) -> dict[str, int]:
    """Returns the kernels of a recorded manifest: each id, with how often a program asked for the kernel."""
    return {kernel: asked for kernel, (asked, _) in counts(path).items()}


def counts(path: Path) -> dict[str, tuple[int, int]]:
    """Returns for each kernel's id how often a program asked for it and executed it."""
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
    # Each of a process's 8 threads asks for the same 20 ops and for 20 ops of its own.
    assert sorted(entries(path).values()) == [4] * (8 * 20) + [4 * 8] * 20
    assert 'name: "several_processes"\n' in path.read_text()
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
    # The scenario asks once, and the planner asks when it first computes the op. It computes the op twice.
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


def test_parameters_that_are_infinite_are_recorded_where_a_manifest_takes_them(run: Run, tmp_path: Path) -> None:
    """llama.cpp makes masks with SCALE and a bias of minus infinity."""
    path = tmp_path / "infinite.yaml"
    assert run("infinite-parameters", GGML_NEURON_RECORD=path).status == 0
    lines = path.read_text().splitlines()
    assert {i.split("-")[0] for i in entries(path)} == {"clamp", "scale"}
    assert next(line for line in lines if "params: {s: 0.0, b: -.inf}" in line).startswith("  - ")
    left_out = [line for line in lines if line.startswith("  # - ")]
    assert sorted(re.findall(r'op: "(\w+)"', "".join(left_out))) == ["rms_norm", "scale"]


def test_samplers_are_recorded_for_any_temperature_and_the_vocabulary(run: Run, tmp_path: Path) -> None:
    """Before it samples on a device, llama.cpp asks for more candidates than there are. The answer needs a kernel for
    the existing number, for the few ops that are in no call.
    """
    path = tmp_path / "samplers.yaml"
    assert run("recorded-samplers", GGML_NEURON_RECORD=path).status == 0
    text = path.read_text()
    assert "131072" not in text and "1048576" not in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("  - ")]
    asked = "asked for 1 time, executed"
    assert lines == [
        f'- {{op: "get_rows", inputs: ["(1,5,1,1)/i32", "(5,1,1,1)/i32"], output: "(1,5,1,1)/i32"}}  # {asked} 1 time',
        f'- {{op: "pad", inputs: ["(500,1,1,1)/f32"], output: "(500,2,1,1)/f32", params: {{rp1: 1}}}}  # {asked} 0 times',
        '- {op: "scale", inputs: ["(5,1,1,1)/f32"], output: "(5,1,1,1)/f32", params: {s: 0.0, b: -.inf}}'
        f"  # {asked} 0 times",
        '- {op: "scale", inputs: ["(5,1,1,1)/f32"], output: "(5,1,1,1)/f32", params: {s: any, b: any}}'
        "  # asked for 2 times, executed 0 times",
        f'- {{op: "top_k", inputs: ["(500,1,1,1)/f32"], output: "(5,1,1,1)/i32"}}  # {asked} 0 times',
    ]
    assert {kernel.split("-")[0] for kernel in entries(path)} == {"get_rows", "pad", "scale", "top_k"}


def test_a_vocabulary_as_large_as_the_question_is_recorded(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    assert run("recorded-large-vocabulary", GGML_NEURON_RECORD=path).status == 0
    (line,) = (line for line in path.read_text().splitlines() if '"top_k"' in line)
    assert 'inputs: ["(131072,1,1,1)/f32"]' in line and "asked for 2 times" in line


@pytest.mark.parametrize("text", ["format: 1\nname: x\n", "no manifest at all"])
def test_a_file_that_is_not_a_list_of_kernels_is_left_alone(run: Run, tmp_path: Path, text: str) -> None:
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
    """The file is from before there was an emitter, so it has no names of parameters."""
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
    """Makes a glibc locale whose decimal point is a comma; returns the variables that choose it."""
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
    """Runs a scenario that records, with a link at the path of its temporary file."""
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
    """Three rounds of five graphs, each planned again in each round: without a kernel the CPU computes all fifteen."""
    path = tmp_path / "mine.yaml"
    run("reuse", "threads", GGML_NEURON_RECORD=path)
    found = counts(path)
    add = next(kernel for kernel in found if kernel.startswith("add-"))
    assert found[add][1] == 15
    assert {executed for kernel, (_, executed) in found.items() if kernel != add} == {0}
    text = path.read_text()
    # An op with a kernel is neither recorded nor counted.
    run("reuse", GGML_NEURON_RECORD=path, GGML_NEURON_KERNEL_DIR=kernels)
    assert path.read_text() == text


def test_a_count_of_executions_that_an_older_file_lacks_is_not_made_up(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    other = '  - {op: "relu", inputs: ["(8,1,1,1)/f32"], output: "(8,1,1,1)/f32"}  # asked for 3 times\n'
    path.write_text(f"format: 1\nname: mine\ntargets: [trn1]\nkernels:\n{other}")
    run("add", GGML_NEURON_RECORD=path)
    assert other in path.read_text()
    assert path.read_text().endswith("# asked for 2 times, executed 2 times\n")


def test_one_round_of_recording_is_enough(programs: Programs, benched: Benched, tmp_path: Path) -> None:
    """Flash attention is on in the first round; the second round records nothing new."""
    ops = {kernel.partition("-")[0] for kernel in counts(benched.recorded)}
    assert "flash_attn_ext" in ops and "soft_max" not in ops
    assert "  # - " not in benched.recorded.read_text()  # all can be built
    again = tmp_path / "mine.yaml"
    shutil.copy(benched.recorded, again)
    variables = {"GGML_NEURON_KERNEL_DIR": benched.kernels, "GGML_NEURON_LOG": "2"}
    log = llama_bench(programs, benched.model, GGML_NEURON_RECORD=again, **variables).stderr
    assert again.read_bytes() == benched.recorded.read_bytes()
    assert "no kernel for" not in log and "because no kernel computes them" not in log
    # Every executed kernel is loaded before the first launch. The other kernels belong to graphs for which memory is
    # reserved.
    executed = {kernel for kernel, (_, ran) in counts(benched.recorded).items() if ran}
    assert executed <= set(re.findall(r"core 0: loaded (\S+) of", log)) <= set(counts(benched.recorded))
    assert 0 < len(executed) < len(counts(benched.recorded))
    assert log.rindex("core 0: loaded ") < log.rindex(
        "core 0: the programs of a graph were loaded before its first launch"
    )
