"""The backend's messages about damaged kernels, ops that the CPU computed, variables, and machines without a device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT, Benched, Programs, Run, build, built_tree, damage_pack, edit_pack, llama_bench

BUFFERS = ("device", pytest.param("host", marks=pytest.mark.long))


@pytest.mark.parametrize("name", ["no/where.graphs", "other.graphs"])
def test_a_record_that_is_not_written_is_reported_when_the_logger_is_silenced(
    programs: Programs, benched: Benched, tmp_path: Path, name: str
) -> None:
    said = {
        "no/where.graphs": f"{tmp_path}/no/where.graphs can't be written: No such file or directory",
        "other.graphs": f"{tmp_path}/other.graphs exists and is not a recording of graphs",
    }
    (tmp_path / "other.graphs").write_text("no recording at all")
    log = llama_bench(programs, benched.model, GGML_NEURON_RECORD=tmp_path / name).stderr
    assert log.count(f"ggml-neuron: GGML_NEURON_RECORD: {said[name]}: recording is off\n") == 1


def test_damaged_kernels_are_reported_when_the_logger_is_silenced(
    programs: Programs, benched: Benched, tmp_path: Path
) -> None:
    neffs = built_tree(benched.kernels).rglob("mul_mat-*.neff")
    pack = damage_pack(benched.kernels, tmp_path / "damaged.kernels.gguf", neffs)
    log = llama_bench(programs, benched.model, GGML_NEURON_KERNEL_DIR=pack).stderr
    damaged = re.findall(r"^ggml-neuron: core 0: (mul_mat-\S+) of .*: its NEFF is damaged: ", log, re.MULTILINE)
    assert damaged and len(set(damaged)) == len(damaged)
    assert re.search(r" on the CPU because no kernel computes them.*mul_mat of .* \(its kernel can't be used\)", log)


SUMMARY = re.compile(
    r"^ggml-neuron: NEURON0: (\d+) of the (\d+) ops of a graph ran on the device, in (\d+) splits?, (\d+) on the CPU "
    r"because no kernel computes them(?:, (\d+) elsewhere)?; (\d+) of (\d+) graphs lacked kernels: (.*)$",
    re.MULTILINE,
)
"""Groups: ops on the device, all ops, splits, ops on the CPU, ops elsewhere, graphs without kernels, all graphs, reasons."""


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("scenario", ["shared-out", "shared-out-and-watched"])
def test_fallbacks_are_reported_as_the_scheduler_has_them(run: Run, kernels: Path, buffers: str, scenario: str) -> None:
    result = run(scenario, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS=buffers)
    # Of the four nodes on the device, the CPU computes one.
    assert result.said == {scenario: "4 of 6 nodes in 3 splits"}, result.log
    shape = "(64,4,1,1)/f32"
    reasons = f"sigmoid of {shape}; scale of {shape}"
    assert SUMMARY.findall(result.log) == [("3", "6", "3", "3", "", "1", "1", reasons)]


def test_nothing_is_reported_without_fallbacks(run: Run, kernels: Path) -> None:
    result = run("chain", "memory", GGML_NEURON_KERNEL_DIR=kernels)
    assert result.said == {"chain": "ok", "memory": "ok"}
    assert "ggml-neuron: " not in result.log


def test_a_program_without_any_kernel_is_reported(run: Run, kernels: Path) -> None:
    result = run("threads", GGML_NEURON_KERNEL_DIR=kernels)
    (line,) = re.findall("^ggml-neuron: .*", result.log, re.MULTILINE)
    said = r"ggml-neuron: no graph had an op with a kernel; what has none: sqr of (.*); sqr of (.*); sqr of (.*); and 177 others"
    assert re.fullmatch(said, line)


def test_what_fell_back_of_a_model_is_what_the_schedulers_own_log_has(
    programs: Programs, benched: Benched, tmp_path: Path
) -> None:
    def leave_out(index: dict[str, Any]) -> None:
        index["kernels"] = [k for k in index["kernels"] if k["spec"]["op"] not in ("rms_norm", "swiglu")]

    pack = edit_pack(benched.kernels, tmp_path / "fewer.kernels.gguf", leave_out)
    variables = {"GGML_NEURON_KERNEL_DIR": pack, "GGML_SCHED_DEBUG": "2", "GGML_NEURON_BUFFERS": "device"}
    variables |= {"GGML_NEURON_LOG": "1"}
    log = llama_bench(programs, benched.model, "-v", **variables).stderr
    graphs = set()
    for text in re.split(r"^## SPLIT #0: ", log, flags=re.MULTILINE)[1:]:
        nodes = re.findall(r"^node #\s*\d+ \(\s*(\S+)\):.*?\) \[\s*(\S+)\s", text, re.MULTILINE)
        on_device = sum(backend.startswith("NEURO") for _, backend in nodes)
        graphs.add((on_device, len(nodes), len(re.findall(r"^## SPLIT #\d+: NEURON0", text, re.MULTILINE))))
    found = SUMMARY.findall(log)
    assert len(found) == 2  # one context for the prompt, one for generation
    for device, ops, splits, lacking, elsewhere, *_, reasons in found:
        assert (int(device), int(ops), int(splits)) in graphs
        # The embedding's rows are gathered on the CPU, where llama.cpp keeps the embedding.
        assert (int(lacking), int(elsewhere)) == (int(ops) - int(device) - 1, 1)
        assert {op for op, _ in re.findall(r"(\w+) of \((\d+)", reasons)} == {"rms_norm", "swiglu"}
    # The totals count the same ops: each graph of a context lacks as many.
    (total,) = re.findall(
        r"(\d+) ops ran on the CPU instead of a NeuronCore: \d+ RMS_NORM, \d+ GLU$", log, re.MULTILINE
    )
    assert int(total) == sum(int(lacking) * int(graphs) for *_, lacking, _, graphs, _, _ in found)


@pytest.mark.parametrize(
    ("derived", "flash_attn", "with_or_without"),
    [("on", "off", "without"), pytest.param("off", "on", "with", marks=pytest.mark.long)],
)
def test_attention_of_the_other_kind_is_reported_with_what_to_type(
    programs: Programs, benched: Benched, tmp_path: Path, derived: str, flash_attn: str, with_or_without: str
) -> None:
    """One message of three lines replaces the messages about attention's nodes; a program with the right kind prints none."""
    kernels = benched.kernels
    if derived == "off":
        recorded, kernels = tmp_path / "mine.graphs", tmp_path / "kernels"
        llama_bench(programs, benched.model, flash_attn=derived, GGML_NEURON_RECORD=recorded)
        build(recorded, kernels)
    other, agreeing = (
        llama_bench(programs, benched.model, flash_attn=how, GGML_NEURON_KERNEL_DIR=kernels).stderr
        for how in (flash_attn, derived)
    )
    (at,) = re.finditer("^ggml-neuron: this context is .*attention.*", other, re.MULTILINE)
    said = other[at.start() :].splitlines()[:3]
    assert said[0].startswith(f"ggml-neuron: this context is {with_or_without} flash attention, kernels are")
    assert f"run the program with -fa {derived}," in said[2]
    assert all(len(line) <= 120 for line in said)
    assert "no kernel for flash_attn_ext" not in other and "no kernel for soft_max" not in other
    assert "this context is" not in agreeing


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


def test_control_characters_of_names_are_masked(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a\x1b[2J\x9bb\rc"
    folder.mkdir()
    (folder / "damaged.kernels.gguf").write_bytes(b"GGUF")
    result = run("add", GGML_NEURON_KERNEL_DIR=folder)
    assert "a?[2J?b?c" in result.log and "\x1b" not in result.log, result.log


def test_an_error_is_reported_once(run: Run, kernels: Path) -> None:
    result = run("add", "in-turn", GGML_NEURON_KERNEL_DIR=f"/nowhere:/nowhere:{kernels}")
    assert result.log.count("ggml-neuron: GGML_NEURON_KERNEL_DIR: /nowhere: ") == 1


def test_an_unknown_variable_is_reported(run: Run, kernels: Path) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_RECORDS="somewhere")
    assert result.said == {"add": "ok"}
    assert re.findall("^ggml-neuron: .*", result.log, re.MULTILINE) == [
        "ggml-neuron: the variable GGML_NEURON_RECORDS has no meaning: docs/reference/environment.md lists all"
    ]


def test_every_variable_is_known() -> None:
    """The backend has a list of all variables that it reads; docs/reference/environment.md lists them."""
    source = (ROOT / "backend" / "ggml-neuron" / "report" / "environment.cpp").read_text()
    known = set(re.findall(r'"(GGML_NEURON_\w+)"', source))
    read: set[str] = set()
    for path in (*(ROOT / "backend").rglob("*.cpp"), *(ROOT / "backend" / "ggml-neuron").rglob("*.h")):
        read |= set(re.findall(r'(?:getenv|neuron_variable)\("(GGML_NEURON_\w+)"\)', path.read_text()))
    assert len(read) > 5
    assert read <= known
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert set(re.findall(r"^\| `(GGML_NEURON_\w+)`", page, re.MULTILINE)) == known


def test_without_kernels_there_is_no_device(run: Run, tmp_path: Path) -> None:
    result = run("add")
    assert (result.status, result.said) == (3, {})
    assert re.findall("^ggml-neuron: .*", result.log, re.MULTILINE) == [
        "ggml-neuron: no devices: no kernels",
        "ggml-neuron:     GGML_NEURON_KERNEL_DIR names where they are",
        "ggml-neuron:     to record the graphs that a program computes: GGML_NEURON_RECORD=FILE",
    ]
    result = run("add", GGML_NEURON_KERNEL_DIR=tmp_path)
    assert (result.status, result.said) == (3, {})
    assert "ggml-neuron: no devices: GGML_NEURON_KERNEL_DIR has no kernels that can be used here\n" in result.log


def test_a_machine_without_libnrt_is_reported_only_if_a_variable_expects_one(run: Run, tmp_path: Path) -> None:
    if not Path("/opt/aws/neuron/lib/libnrt.so.1").exists():
        result = run("add", GGML_NEURON_LIBNRT=None)
        assert (result.status, result.said) == (3, {})
        assert "ggml-neuron: " not in result.log
        result = run("add", GGML_NEURON_LIBNRT=None, GGML_NEURON_KERNEL_DIR=tmp_path)
        assert "ggml-neuron: no devices: no libnrt: /opt/aws/neuron/lib/libnrt.so.1: " in result.log
    result = run("add", GGML_NEURON_LIBNRT="/nowhere", GGML_NEURON_RECORD=tmp_path / "mine.graphs")
    assert "ggml-neuron: no devices, and nothing is recorded: no libnrt: /nowhere" in result.log
    assert not (tmp_path / "mine.graphs").exists()
