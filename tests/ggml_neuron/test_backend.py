"""The ggml backend on a simulated NeuronCore: what it computes, where its memory is, and how many bytes it moves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, SCENARIOS, Programs, Run, built_pack, built_tree, ran_on

BUFFERS = ("device", pytest.param("host", marks=pytest.mark.long))


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


def test_weights_of_two_models_have_the_same_name(run: Run, tmp_path: Path) -> None:
    """The scenario passes while graphs are recorded: then the device takes every op."""
    variables = {"GGML_NEURON_RECORD": tmp_path / "mine.graphs", "GGML_NEURON_BUFFERS": "device"}
    result = run("same-names", **variables)
    assert result.said == {"same-names": "ok"}, result.log


def test_a_node_that_only_the_device_can_run_is_computed_without_a_kernel(run: Run, kernels: Path) -> None:
    result = run("stranded", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    assert result.said == {"stranded": "ok"}, result.log
    assert ran_on(result) == (0, 1)


def test_rows_written_on_the_cpu_are_all_that_is_moved(run: Run, kernels: Path) -> None:
    """The cache has 17.6 MiB. The node writes six rows of 1 KiB in two planes; the bytes between some of them move too."""
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
    ],  # rounds of a chain of six nodes and of one node
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
    result = run("add", "reuse", "skip", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="2")
    assert ran_on(result)[0] > 10
    assert result.log.count("loaded add-64x4-f32") == 1


def test_the_summary_has_no_line_for_each_load(run: Run, kernels: Path) -> None:
    """Level 1 is the summary; loads and queries are in level 2."""
    one, two = (run("add", "far-off", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG=level).log for level in "12")
    assert re.search(r"core 0: [1-9]\d* programs are loaded\n", one)
    events = r"^ggml-neuron: (core 0: loaded |no kernel for \{)"
    assert not re.search(events, one, re.MULTILINE)
    assert {"core 0: loaded ", "no kernel for {"} == set(re.findall(events, two, re.MULTILINE))


@pytest.mark.parametrize("form", ["a pack", "a folder with packs", "after another folder"])
def test_kernels_are_found_in(run: Run, kernels: Path, neuron_target: str, tmp_path: Path, form: str) -> None:
    pack, tree = built_pack(kernels), built_tree(kernels)
    names = {
        "a pack": str(pack),
        "a folder with packs": str(kernels),
        "after another folder": f"{tmp_path}:{kernels}",
    }
    result = run("chain", GGML_NEURON_KERNEL_DIR=names[form], GGML_NEURON_LOG="1")
    assert result.said == {"chain": "ok"}, result.log
    count = len(json.loads((tree / "index.json").read_text())["kernels"])
    assert f"{pack}: {count} kernels for {neuron_target}" in result.log


def test_a_tree_is_reported_as_a_folder_without_packs(run: Run, kernels: Path) -> None:
    tree = built_tree(kernels)
    result = run("add", GGML_NEURON_KERNEL_DIR=tree)
    assert result.said == {}, result.log
    said = f"{tree} holds no packs (*.kernels.gguf): name or build one; a tree (index.json) is not read\n"
    assert f"ggml-neuron: GGML_NEURON_KERNEL_DIR: {said}" in result.log


def test_buffers_are_in_host_memory_when_kernels_do_not_make_up_a_transformer(run: Run, kernels: Path) -> None:
    assert "tensors in host memory" in run("memory", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1").log


def test_the_benchmark_of_dispatch_measures_and_judges(programs: Programs, tmp_path: Path) -> None:
    """Tests may run at the same time, so this only checks that the exit status agrees with the benchmark's own limits."""
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "dispatch" / "dispatch.py", f"--json={tmp_path / 'figures.json'}"],
        env=programs.environment(
            GGML_NEURON_TEST_PROGRAMS=programs.find("dispatch").parent, LLAMA_CPP_PROGRAMS=programs.llama_cpp
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    limited = [figure for figure in figures if figure["limit"]]
    assert len(figures) == 8 and len(limited) == 3, result.stdout + result.stderr
    assert all(figure["value"] > 0 for figure in figures)
    kept = all(figure["value"] <= figure["limit"]["at_most"] for figure in limited)
    assert result.returncode == (0 if kept else 1), result.stdout + result.stderr
