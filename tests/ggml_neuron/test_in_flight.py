"""Launches in flight on the simulator: their order, what waits for them, and what a launch that fails late causes.

Each launch takes some extra milliseconds, so launches are in flight when the next call comes. The simulator refuses a
call that shares memory with a request in flight, so a missing wait ends the program.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from programs import Programs, Result, Run, build, ran_on

DEPTHS = ("1", pytest.param("2", marks=pytest.mark.long), "3", pytest.param("63", marks=pytest.mark.long))


def overlapping(log: str) -> tuple[int, int]:
    """Returns the number of launches on all cores, and how many of them began while another one was in flight."""
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


def test_exit_does_not_wait_for_long_launches(run: Run, kernels: Path) -> None:
    result = run(
        "exits-in-flight",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_QUEUE_DEPTH="63",
        NEURON_SIMULATOR_LAUNCH_US="10000000",
    )
    assert (result.status, result.said) == (0, {"exits-in-flight": "ok"}), result.log
    assert "the NeuronCores are busy: the process ends without waiting for them" in result.log


_TENSOR = "(64,4,1,1)/f32"
_ANY = f'op: scale, output: "{_TENSOR}", params: {{s: any, b: any}}'
NUMBERS = f"""
format: 1
name: numbers
targets: [TARGET]
kernels:
  - {{{_ANY}, inputs: ["{_TENSOR}"]}}
  - {{op: relu, inputs: ["{_TENSOR}"], output: "{_TENSOR}"}}
"""
GROUP = f"""
graphs:
  - inputs: {{x: "{_TENSOR}"}}
    nodes:
      - {{name: scaled, {_ANY}, inputs: [x]}}
      - {{name: positive, op: relu, inputs: [scaled], output: "{_TENSOR}"}}
      - {{name: y, {_ANY}, inputs: [positive]}}
    outputs: [y]
"""


@pytest.mark.parametrize("group", ["", GROUP], ids=["alone", "group"])
def test_each_launch_has_its_own_numbers(run: Run, neuron_target: str, tmp_path: Path, group: str) -> None:
    """Kernels for any numbers run graphs that differ only in numbers."""
    (tmp_path / "numbers.yaml").write_text((NUMBERS + group).replace("TARGET", neuron_target))
    build(tmp_path / "numbers.yaml", tmp_path / "kernels")
    result = run(
        "in-flight-numbers",
        GGML_NEURON_KERNEL_DIR=tmp_path / "kernels",
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        NEURON_SIMULATOR_LAUNCH_US="3000",
    )
    assert result.said == {"in-flight-numbers": "ok"}, result.log
    assert ran_on(result) == (30, 0)
    launches, later = overlapping(result.log)
    assert launches == (10 if group else 30)
    assert later >= 6


def test_a_queue_of_the_runtime_that_is_shorter(run: Run, kernels: Path) -> None:
    result = run(
        "in-flight",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_QUEUE_DEPTH="8",
        GGML_NEURON_LOG="1",
        NEURON_SIMULATOR_QUEUE="2",
        NEURON_SIMULATOR_LAUNCH_US="1000",
    )
    assert result.said == {"in-flight": "ok"}, result.log
    unlimited = run("in-flight", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", GGML_NEURON_LOG="1")
    assert overlapping(result.log)[0] == overlapping(unlimited.log)[0]


def test_a_queue_that_was_full_once_takes_more_again(run: Run, kernels: Path) -> None:
    result = run(
        *["in-flight"] * 3,
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        NEURON_SIMULATOR_FAULT="full@2",
        NEURON_SIMULATOR_LAUNCH_US="1000",
    )
    assert result.said == {"in-flight": "ok"}, result.log
    launches, later = overlapping(result.log)
    assert later > launches / 3


def test_an_answer_that_is_not_documented_means_not_yet(run: Run, kernels: Path) -> None:
    result = run(
        "in-flight",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_FAULT="busy",
        NEURON_SIMULATOR_LAUNCH_US="1000",
    )
    assert result.said == {"in-flight": "ok"}, result.log
    said = "core 0: nrta_is_completed failed: NRT_EXEC_NC_BUSY (1005): the launch counts as not done"
    assert result.log.count(said) == 1


def test_eventfds_are_unregistered(run: Run, kernels: Path) -> None:
    result = run(
        "in-flight",
        "in-flight-in-threads",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_LAUNCH_US="2000",
        NEURON_RT_LOG_LEVEL="INFO",
    )
    assert set(result.said.values()) == {"ok"}, result.log
    assert "not unregistered" not in result.log


@pytest.mark.parametrize(("limit", "depth"), [("1", 1), ("2", 2), ("9", 3)])
def test_no_more_requests_than_the_user_allows(run: Run, kernels: Path, limit: str, depth: int) -> None:
    result = run(
        "in-flight",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS=limit,
        NEURON_SIMULATOR_LAUNCH_US="1000",
    )
    assert result.said == {"in-flight": "ok"}, result.log
    said = f"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS allows {limit} launches in flight, not 3"
    assert (said in result.log) == (depth < 3)
    assert (overlapping(result.log)[1] == 0) == (depth == 1)


@pytest.mark.parametrize("release", ["2.28", "2.31"])  # without queues, and with queues
def test_an_older_runtime_that_would_return_early(run: Run, kernels: Path, release: str) -> None:
    result = run(
        "chain",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_RELEASE=release,
        NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS="4",
    )
    assert result.said == {"chain": "ok"}, result.log
    assert "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS is set to 0, not 4" in result.log


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


def test_memory_goes_that_a_launch_does_not_read(run: Run, kernels: Path) -> None:
    result = run(
        "freed-unused",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_LAUNCH_US="50000",
    )
    assert result.said == {"freed-unused": "ok"}, result.log


def run_on_two_cores(run: Run, kernels: Path, *scenarios: str, launch_us: int, **variables: str) -> Result:
    return run(
        *scenarios,
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        NEURON_RT_NUM_CORES="2",
        NEURON_SIMULATOR_LAUNCH_US=str(launch_us),
        GGML_NO_BACKTRACE="1",
        **variables,
    )


def test_a_core_waits_for_another(run: Run, kernels: Path) -> None:
    result = run_on_two_cores(run, kernels, "two-cores-in-flight", launch_us=20_000)
    assert result.said == {"two-cores-in-flight": "ok"}, result.log


def test_cores_that_wait_for_each_other(run: Run, kernels: Path) -> None:
    result = run_on_two_cores(run, kernels, "two-cores-crossing", launch_us=0)
    assert result.said == {"two-cores-crossing": "ok"}, result.log


def test_an_event_of_another_core(run: Run, kernels: Path) -> None:
    fault = {"NEURON_SIMULATOR_FAULT": "execute@1"}
    result = run_on_two_cores(run, kernels, "two-cores-waiting", launch_us=300_000, **fault)
    assert result.said == {"two-cores-waiting": "ok"}, result.log


def test_an_event_of_another_kind_of_device(run: Run, kernels: Path) -> None:
    result = run("another-device", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device")
    assert result.said == {"another-device": "ok"}, result.log


def test_what_a_copy_waits_for_fails_late(run: Run, kernels: Path) -> None:
    fault = {"NEURON_SIMULATOR_FAULT": "execute@1"}
    result = run_on_two_cores(run, kernels, "two-cores-late", launch_us=300_000, **fault)
    assert result.said == {"two-cores-late": "ok"}, result.log
    assert re.search(r"core 0: 1024 bytes at offset \d+ were not computed: a launch failed", result.log), result.log


def test_reductions(run: Run, kernels: Path) -> None:
    names = ("two-cores-reduced", "two-cores-not-reduced")
    for depth in ("3", "1"):
        result = run_on_two_cores(run, kernels, *names, launch_us=2_000, GGML_NEURON_QUEUE_DEPTH=depth)
        assert result.said == dict.fromkeys(names, "ok"), result.log
        assert "21 reductions over NeuronCores went through the host's memory, 0.082 MiB" in result.log


def test_kept_parts_outlive_their_graphs(run: Run, kernels: Path, tmp_path: Path) -> None:
    record = str(tmp_path / "kept.graphs")
    result = run_on_two_cores(run, kernels, "two-cores-kept", launch_us=0, GGML_NEURON_RECORD=record)
    assert result.said == {"two-cores-kept": "ok"}, result.log


def test_a_reduction_of_what_a_launch_did_not_compute(run: Run, kernels: Path) -> None:
    fault = {"NEURON_SIMULATOR_FAULT": "execute@1"}
    result = run_on_two_cores(run, kernels, "two-cores-unreduced", launch_us=300_000, **fault)
    assert result.said == {"two-cores-unreduced": "ok"}, result.log
    assert re.search(r"the reduction of .* over 2 cores failed: ", result.log), result.log


LAUNCH_FAILED = re.compile(
    r"nrta_execute_schedule failed: NRT_EXEC_COMPLETED_WITH_ERR \(1004\): \w+-[\w-]+ of [^\n]*, for node"
)


def run_with_fault(run: Run, kernels: Path, scenario: str, fault: str, cores: int = 1) -> Result:
    return run(
        scenario,
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_RT_NUM_CORES=str(cores),
        NEURON_SIMULATOR_LAUNCH_US="50000",
        NEURON_SIMULATOR_FAULT=fault,
        GGML_NO_BACKTRACE="1",
    )


def test_a_launch_that_fails_late_fails_its_graph_when_that_has_an_output(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "fails-late", "execute@2")
    assert result.said == {"fails-late": "ok"}, result.log
    assert LAUNCH_FAILED.search(result.log), result.log
    assert "after that was given back" not in result.log


def test_a_launch_that_the_runtime_does_not_know_any_more_failed(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "fails-late", "unknown@2")
    assert result.said == {"fails-late": "ok"}, result.log
    said = r"nrta_is_completed failed: NRT_INVALID \(2\): add-64x4-f32-\w+ of [^\n]*, for node"
    assert len(re.findall(said, result.log)) == 1, result.log


def test_a_launch_that_fails_late_fails_the_next_graph(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "fails-later", "execute@2")
    assert result.said == {"fails-later": "ok"}, result.log
    assert LAUNCH_FAILED.search(result.log), result.log
    assert "a launch of an earlier graph failed after ggml had that graph back" in result.log


def test_to_read_what_was_not_computed_ends_the_program(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "fails-later-and-read", "execute@2")
    assert result.status == -signal.SIGABRT, result.log
    assert result.said == {}
    assert re.search(
        r"ggml-neuron: reading tensor '.*': core 0: 1024 bytes at offset \d+ were not computed: a launch failed",
        result.log,
    ), result.log


def test_a_lost_cache_stays_lost_until_it_is_set(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "poisons-a-cache", "execute@1")
    assert result.said == {"poisons-a-cache": "ok"}, result.log
    assert "reads a result of an earlier graph whose launch failed" in result.log


def test_what_one_core_lost_fails_the_graph_of_another(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "poisons-for-another-core", "execute@3", cores=2)
    assert result.said == {"poisons-for-another-core": "ok"}, result.log


def test_a_lost_core_stays_lost(run: Run, kernels: Path) -> None:
    result = run_with_fault(run, kernels, "fails-late", "lost@2")
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
def test_what_programs_receive(run: Run, kernels: Path, scenario: str, variables: dict[str, str]) -> None:
    result = run(scenario, "chain", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device", **variables)
    assert result.said == {scenario: "ok", "chain": "ok"}, result.log


def test_queues_of_another_symbol_version_are_not_used(
    run: Run, programs: Programs, kernels: Path, tmp_path: Path
) -> None:
    """Functions of an earlier symbol version take an error tracker, whatever release the library reports."""
    older = tmp_path / "libnrt.so.1"
    older.write_bytes(programs.simulator.read_bytes().replace(b"\0NRT_3.0.0\0", b"\0NRT_2.9.0\0"))
    result = run(
        "synchronous", "chain", GGML_NEURON_LIBNRT=older, GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device"
    )
    assert result.said == {"synchronous": "ok", "chain": "ok"}, result.log
    assert result.log.count("has no asynchronous functions of version NRT_3.0.0") == 1


@pytest.mark.parametrize("depth", ["0", "64", "two"])
def test_an_invalid_depth(run: Run, kernels: Path, depth: str) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_QUEUE_DEPTH=depth)
    assert result.said == {"add": "ok"}, result.log
    assert f"GGML_NEURON_QUEUE_DEPTH is a number from 1 to 63, not '{depth}'" in result.log
