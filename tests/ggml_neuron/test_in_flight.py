"""Launches in flight: their order, what waits for them, and what comes of those that fail late, on the simulator.

A launch takes some milliseconds besides, so that launches are in flight when the next thing happens. The simulator refuses what
shares memory with a request in flight and does not wait for it, so a wait that is missing ends the program.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Run

DEPTHS = ("1", "2", "3", pytest.param("64", marks=pytest.mark.long))


def overlapping(log: str) -> tuple[int, int]:
    """Returns how many launches there were on all cores, and how many of them while another one was in flight."""
    found = re.findall(r"(\d+) launches, (\d+) of them while another one was in flight", log)
    return sum(int(n) for n, _ in found), sum(int(n) for _, n in found)


@pytest.mark.parametrize("depth", DEPTHS)
def test_results_are_the_same_at_any_depth(run: Run, kernels: Path, depth: str) -> None:
    result = run(
        "in-flight",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_QUEUE_DEPTH=depth,
        GGML_NEURON_LOG="1",
        NEURON_SIMULATOR_LAUNCH_US="3000",
    )
    assert result.said == {"in-flight": "ok"}, result.log
    launches, later = overlapping(result.log)
    if depth == "1":
        assert launches == 0
    else:
        assert launches > 50 and later > launches / 2


@pytest.mark.parametrize("buffers", ["device", "host"])
def test_threads_share_a_core(run: Run, kernels: Path, buffers: str) -> None:
    result = run(
        "in-flight-in-threads",
        "parallel",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS=buffers,
        NEURON_SIMULATOR_LAUNCH_US="1000",
        NEURON_SIMULATOR_QUEUE="2",
    )
    assert set(result.said.values()) == {"ok"}, result.log


def test_a_core_waits_for_another(run: Run, kernels: Path) -> None:
    result = run(
        "two-cores-in-flight",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_RT_NUM_CORES="2",
        NEURON_SIMULATOR_LAUNCH_US="5000",
    )
    assert result.said == {"two-cores-in-flight": "ok"}, result.log


def test_a_launch_that_fails_late_is_a_status_and_no_result(run: Run, kernels: Path) -> None:
    result = run(
        "fails-late",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_LAUNCH_US="50000",
        NEURON_SIMULATOR_FAULT="execute@2",
    )
    assert result.said == {"fails-late": "ok"}, result.log
    assert re.search(
        r"nrta_execute_schedule failed: NRT_EXEC_COMPLETED_WITH_ERR \(1004\): add-64x4-f32-\w+ of", result.log
    )
    assert "a launch of the last graph failed" in result.log


def test_a_core_that_is_lost_stays_so(run: Run, kernels: Path) -> None:
    result = run(
        "fails-late",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_LAUNCH_US="50000",
        NEURON_SIMULATOR_FAULT="lost@2",
    )
    assert result.said == {"fails-late": "graph_compute: GGML status: error (operation failed)"}, result.log
    assert "NRT_EXEC_UNIT_UNRECOVERABLE (101)" in result.log


@pytest.mark.parametrize(
    ("scenario", "variables"),
    [
        ("asynchronous", {}),
        ("synchronous", {"GGML_NEURON_QUEUE_DEPTH": "1"}),
        ("synchronous", {"NEURON_SIMULATOR_RELEASE": "2.28"}),
        ("asynchronous", {"NEURON_SIMULATOR_RELEASE": "2.29"}),
        ("asynchronous", {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3"}),
    ],
)
def test_what_programs_are_told(run: Run, kernels: Path, scenario: str, variables: dict[str, str]) -> None:
    result = run(scenario, "chain", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", **variables)
    assert result.said == {scenario: "ok", "chain": "ok"}, result.log


def test_executions_that_return_early_are_refused(run: Run, kernels: Path) -> None:
    """Before SDK 2.32, where a variable asks for it."""
    variables = {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3", "NEURON_SIMULATOR_RELEASE": "2.31"}
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, **variables)
    assert (
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=3 lets nrt_execute return before its results are there"
        in result.log
    )


@pytest.mark.parametrize("depth", ["0", "65", "two"])
def test_a_depth_that_is_none(run: Run, kernels: Path, depth: str) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_QUEUE_DEPTH=depth)
    assert result.said == {"add": "ok"}, result.log
    assert f"GGML_NEURON_QUEUE_DEPTH is a number from 1 to 64, not '{depth}'" in result.log
