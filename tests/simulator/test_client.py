"""A C client without a framework that follows libnrt's documentation, and the simulator's messages about its mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kernelgen.compilers.settings import CompileConfig
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

Run = Callable[..., subprocess.CompletedProcess[str]]
Make = Callable[..., Path]

T = TensorDesc.parse

NO_INSTANCE = {"NEURON_SIMULATOR_INSTANCE": None, "NEURON_RT_NUM_CORES": None}
"""For variables of cores or memory: the simulator has no named instance."""


def good(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def filled(n: int, count: int) -> np.ndarray:
    """Returns the values with which the program fills input n."""
    return ((np.arange(count) * 7 + n * 3) % 11).astype(np.float32)


def test_executes_a_kernel(client: Run, add: Path) -> None:
    lines = good(client("run", add)).splitlines()
    assert lines[:4] == [
        "runtime 2: neuron-kernelgen simulator",
        "input input0: type 10, 1024 bytes, shape 1 1 4 64",
        "input input1: type 10, 1024 bytes, shape 1 1 4 64",
        "output output0: type 10, 1024 bytes, shape 1 1 4 64",
    ]
    name, *values = lines[4].split()
    assert name == "output0:"
    assert np.array_equal(np.array(values, np.float32), filled(0, 256) + filled(1, 256))


def test_executes_a_kernel_in_place(client: Run, make_neff: Make) -> None:
    f32 = T("(64,4,1,1)/f32")
    lines = good(client("run", make_neff(KernelSpec.make("sub", [f32, f32], f32, alias=0)))).splitlines()
    assert lines[1] == "input input0.must_alias_input: type 10, 1024 bytes, shape 1 1 4 64"
    assert np.array_equal(np.array(lines[4].split()[1:], np.float32), filled(0, 256) - filled(1, 256))


def test_types_and_shapes_are_reported(client: Run, make_neff: Make) -> None:
    """An absent input, an i64 input that is passed as pairs of i32, and a quantized input that is passed as bytes."""

    def function(x, absent, rows, blocks, half):  # type: ignore[no-untyped-def]
        assert absent is None
        return (x + rows.sum().astype(x.dtype) + blocks.sum().astype(x.dtype) + half.sum().astype(x.dtype)).astype(
            "float32"
        )

    inputs = [T("(8,4,1,1)/bf16"), None, T("(4,1,1,1)/i64"), T("(64,2,1,1)/q8_0"), T("(2,1,1,1)/f16")]
    lines = good(
        client("run", make_neff(KernelSpec.make("my_types", inputs, T("(8,4,1,1)/f32")), function))
    ).splitlines()
    described = [line.split(",")[0] for line in lines[1:6]]
    assert described == [
        "input input0: type 6",
        "input input2: type 8",
        "input input3: type 3",
        "input input4: type 7",
        "output output0: type 10",
    ]


@pytest.mark.parametrize("strict", ["1", "0"])
def test_inputs_that_no_result_depends_on_are_left_out(client: Run, make_neff: Make, strict: str) -> None:
    def function(x, unused, y, also):  # type: ignore[no-untyped-def]
        del unused, also
        return x - y

    f32 = T("(8,4,1,1)/f32")
    lines = good(
        client("run", make_neff(KernelSpec.make("my_unused", [f32] * 4, f32), function), NEURON_SIMULATOR_STRICT=strict)
    ).splitlines()
    names = [line.split()[1].rstrip(":") for line in lines if line.startswith("input")]
    assert names == (["input0", "input2"] if strict == "1" else ["input0", "input1", "input2", "input3"])
    got = np.array(lines[-1].split()[1:], np.float32)
    assert np.array_equal(got, filled(0, 32) - filled(names.index("input2"), 32))


def test_slices_off_a_requested_alignment(client: Run, add: Path) -> None:
    result = client("strict", add, NEURON_SIMULATOR_MEMORY="16G", NEURON_SIMULATOR_SLICE_ALIGNMENT="1K", **NO_INSTANCE)
    assert result.returncode == 1
    assert "nrt_tensor_allocate_slice: offset 512 of 'out' is not a multiple of 1024" in result.stderr


@pytest.mark.parametrize("shape", ["(1,1,1,1)", "(3,1,1,1)", "(4096,300,1,1)"])
def test_sizes(client: Run, make_neff: Make, shape: str) -> None:
    f32 = T(f"{shape}/f32")
    good(client("threads", make_neff(KernelSpec.make("add", [f32, f32], f32)), 1, 2))


def test_threads_execute_at_once(client: Run, add: Path) -> None:
    good(client("threads", add, 8, 50))


def test_tensors(client: Run) -> None:
    result = client("tensors", NEURON_RT_NUM_CORES="2")
    good(result)
    assert "NRT simulator ERROR nrt_tensor_write: tensor 'inner': 4 bytes at 12 are not within its 15" in result.stderr
    assert "helper" not in result.stderr  # this needs no helper


def test_threads_use_one_set_of_tensors(client: Run) -> None:
    good(client("sets", NEURON_RT_NUM_CORES="2"))


def test_order_of_calls(client: Run, add: Path, tmp_path: Path) -> None:
    """The program expects a trn1.2xlarge, so the kernel is for trn1."""
    path = tmp_path / "add.neff"
    hlo = container.read_simulated(add.read_bytes()).hlo
    path.write_bytes(container.write_simulated(hlo, CompileConfig.make("trn1").flags(), "simulator 1"))
    instance = {"NEURON_SIMULATOR_INSTANCE": "trn1.2xlarge", "NEURON_RT_NUM_CORES": None}
    good(client("sequence", path, **instance))


def test_binding(client: Run, add: Path) -> None:
    result = client("binding", add, NEURON_RT_NUM_CORES="2", NEURON_SIMULATOR_STRICT="0")  # results over inputs
    good(result)
    for line in (
        "nrt_execute: the input set has no tensor 'input1'",
        "nrt_execute: input 'input1' has 1028 bytes, the model's 1024",
        "nrt_execute: input 'input1' was freed",
        "nrt_execute: input 'input1' is on core 1, the model on core 0",
        "nrt_load: cores 2 to 2 are wanted, 2 are visible",
    ):
        assert f"NRT simulator ERROR {line}\n" in result.stderr


def test_device_memory_ends(client: Run) -> None:
    result = client("memory", NEURON_SIMULATOR_MEMORY="1M", NEURON_SIMULATOR_RELEASE="2.28")
    good(result)
    assert "nrt_tensor_allocate: 1 bytes for 'more' on core 0: 1048576 of 1048576 are in use" in result.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "NRT_SUCCESS 1 1"),
        ({"NEURON_RT_NUM_CORES": "2"}, "NRT_SUCCESS 2 2"),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, "NRT_SUCCESS 4 4"),
        ({"NEURON_RT_VISIBLE_CORES": "3-4,5"}, "NRT_SUCCESS 6 3"),
        ({"NEURON_RT_VISIBLE_CORES": "1,4-5"}, "NRT_INVALID 0 0"),
        ({"NEURON_RT_VISIBLE_CORES": "1,4-5", "NEURON_SIMULATOR_STRICT": "0"}, "NRT_SUCCESS 6 3"),
        ({"NEURON_RT_VISIBLE_CORES": "3", "NEURON_RT_NUM_CORES": "2"}, "NRT_SUCCESS 4 1"),
        ({"NEURON_SIMULATOR_CORES": "8"}, "NRT_SUCCESS 8 8"),
        ({"NEURON_SIMULATOR_CORES": "8", "NEURON_RT_NUM_CORES": "2"}, "NRT_SUCCESS 8 2"),
        ({"NEURON_SIMULATOR_CORES": "2", "NEURON_RT_NUM_CORES": "3"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_CORES": "2", "NEURON_RT_VISIBLE_CORES": "2"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_CORES": "8", "NEURON_RT_NUM_CORES": "0"}, "NRT_SUCCESS 8 8"),
        ({"NEURON_RT_VISIBLE_CORES": "2-1"}, "NRT_INVALID 0 0"),
        ({"NEURON_RT_VISIBLE_CORES": "0,0"}, "NRT_INVALID 0 0"),
        ({"NEURON_RT_VISIBLE_CORES": "0-99999999999"}, "NRT_INVALID 0 0"),
        ({"NEURON_RT_VISIBLE_CORES": "1,"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_MEMORY": "1T"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_MEMORY": "99999999G"}, "NRT_INVALID 0 0"),
        ({"NEURON_RT_EXEC_TIMEOUT": "soon"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_INSTANCE": "trn1.2xlarge"}, "NRT_SUCCESS 2 2"),
        ({"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "NEURON_RT_NUM_CORES": "3"}, "NRT_SUCCESS 64 3"),
        ({"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "NEURON_LOGICAL_NC_CONFIG": "1"}, "NRT_SUCCESS 128 128"),
        ({"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, "NRT_SUCCESS 128 128"),
        ({"NEURON_SIMULATOR_INSTANCE": "inf2.48xlarge", "NEURON_RT_VISIBLE_CORES": "24"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_INSTANCE": "trn9.metal"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_STRICT": "yes"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_RELEASE": "2"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_LOCKS": "/dev/null/locks"}, "NRT_RESOURCE 0 0"),
        ({"NEURON_SIMULATOR_LAUNCH_US": "-1"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_GB_PER_S": "0"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_LAUNCH_US": "targets"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_LAUNCH_US": "target"}, "NRT_SUCCESS 1 1"),
        ({"NEURON_SIMULATOR_FAULT": "row,graph,race"}, "NRT_SUCCESS 1 1"),
        ({"NEURON_SIMULATOR_FAULT": "row@2"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_SLICE_ALIGNMENT": "1G"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_FAULT": "nothing"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_FAULT": "memory@0"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_FAULT": "memory/3,kill@x"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_FAULT": "memory/3,kill@2"}, "NRT_SUCCESS 1 1"),
        ({"NEURON_SIMULATOR_QUEUE": "0"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_QUEUE": "64"}, "NRT_INVALID 0 0"),
        ({"NEURON_SIMULATOR_FAULT": "execute@x"}, "NRT_INVALID 0 0"),
    ],
)
def test_cores(client: Run, variables: dict[str, str], expected: str) -> None:
    result = client("cores", **NO_INSTANCE | variables)
    assert good(result).strip() == expected
    if expected.startswith("NRT_INVALID"):
        assert any(f"NRT simulator ERROR nrt_init: {name}=" in result.stderr for name in variables)


def test_strict(client: Run, add: Path) -> None:
    variables = NO_INSTANCE | {"NEURON_SIMULATOR_MEMORY": "16G", "NEURON_SIMULATOR_RELEASE": "2.27"}
    good(client("strict", add, **variables))
    result = client("strict", add, NEURON_FAIL_ON_NAN="1", **variables)
    good(result)
    for line in (
        "nrt_execute: output 'output0' overlaps 'input0', which is not declared",
        "nrt_tensor_allocate: 4294967296 bytes for 'huge': before release 2.28 sizes of 4 GiB and more overflow",
        "nrt_load: no device memory for a program on core 0: ",
        "nrt_execute: output 'output0' begins at byte ",
    ):
        assert f"NRT simulator ERROR {line}" in result.stderr
    good(client("lenient", add, NEURON_SIMULATOR_MEMORY="16G", NEURON_SIMULATOR_STRICT="0", **NO_INSTANCE))


def test_a_later_release_has_large_tensors(client: Run, add: Path) -> None:
    result = client("strict", add, NEURON_SIMULATOR_MEMORY="16G", NEURON_SIMULATOR_RELEASE="2.28", **NO_INSTANCE)
    assert result.returncode == 1
    assert "nrt_tensor_allocate(NRT_TENSOR_PLACEMENT_DEVICE, 0, (size_t) 1 << 32" in result.stderr


def test_requests_in_flight(client: Run, add: Path) -> None:
    result = client("queue", add, NEURON_SIMULATOR_LAUNCH_US="200000", NEURON_SIMULATOR_QUEUE="2")
    good(result)
    for where in ("nrt_tensor_read", "nrt_tensor_write", "nrt_execute", "nrta_tensor_read", "nrta_tensor_copy"):
        assert f"NRT simulator ERROR {where}: a request in flight uses this memory" in result.stderr
    assert "NRT simulator ERROR nrt_tensor_free: a request in flight uses it; that request fails" in result.stderr


@pytest.mark.parametrize(("inputs", "requests"), [(2, 63), (20, 31), (70, 15)])
def test_a_queue_takes_fewer_large_programs(client: Run, make_neff: Make, inputs: int, requests: int) -> None:
    def function(*sources):  # type: ignore[no-untyped-def]
        return sum(sources)

    f32 = T("(8,4,1,1)/f32")
    # An op has at most 16 inputs in ggml; a group's kernel can have any number.
    many = make_neff(KernelSpec("my_many", (f32,) * inputs, f32, (), None), function)
    assert good(client("full", many, NEURON_SIMULATOR_LAUNCH_US="1000000")).strip() == str(requests)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("execute@2", "NRT_SUCCESS NRT_EXEC_COMPLETED_WITH_ERR NRT_SUCCESS NRT_SUCCESS"),
        (
            "lost@2",
            "NRT_SUCCESS NRT_EXEC_UNIT_UNRECOVERABLE NRT_EXEC_UNIT_UNRECOVERABLE NRT_EXEC_UNIT_UNRECOVERABLE",
        ),
    ],
)
def test_statuses_come_late(client: Run, add: Path, fault: str, expected: str) -> None:
    result = client("late", add, NEURON_SIMULATOR_LAUNCH_US="20000", NEURON_SIMULATOR_FAULT=fault)
    assert good(result).strip() == expected
    left = "nrt_close: 1 requests have eventfds that were not unregistered"
    assert left in result.stderr


def test_an_earlier_release_has_no_requests_in_flight(client: Run, add: Path) -> None:
    result = client("no-queue", add, NEURON_SIMULATOR_RELEASE="2.28")
    good(result)
    assert "nrta_execute_schedule: release 2.28 of the SDK does not have it" in result.stderr


EARLY = {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "2", "NEURON_SIMULATOR_LAUNCH_US": "500000"}


def test_executions_return_early_before_release_2_32(client: Run, add: Path) -> None:
    good(client("early", add, NEURON_SIMULATOR_RELEASE="2.31", **EARLY))


@pytest.mark.parametrize(("release", "count"), [("2.32", "2"), ("2.31", "0")])
def test_executions_are_done_when_they_return(client: Run, add: Path, release: str, count: str) -> None:
    variables = EARLY | {"NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": count, "NEURON_SIMULATOR_LAUNCH_US": "0"}
    result = client("early", add, NEURON_SIMULATOR_RELEASE=release, **variables)
    assert result.returncode == 1
    assert "execute(&j) is NRT_QUEUE_FULL: got NRT_SUCCESS" in result.stderr
    assert ("has no meaning" in result.stderr) == (count == "2")


def test_a_core_has_one_process(client: Run, built: Path, environment: dict[str, str], tmp_path: Path) -> None:
    locks = str(tmp_path / "locks")
    program = next(p for p in (built / "nrt_client", built / "tests" / "nrt_client") if p.exists())
    described = {k: v for k, v in environment.items() if k not in NO_INSTANCE}
    variables = described | {"NEURON_SIMULATOR_LOCKS": locks, "NEURON_RT_VISIBLE_CORES": "0-1"}

    def cores(**chosen: str) -> subprocess.CompletedProcess[str]:
        return client("cores", **NO_INSTANCE | {"NEURON_SIMULATOR_LOCKS": locks} | chosen)

    with subprocess.Popen([program, "hold"], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == b"NRT_SUCCESS\n"
        refused = cores(NEURON_RT_VISIBLE_CORES="1-2")
        assert good(refused).strip() == "NRT_RESOURCE 0 0"
        assert f"nrt_init: another process has core 1 ({locks}/core-1)" in refused.stderr
        other = cores(NEURON_RT_VISIBLE_CORES="2-3")
        assert good(other).strip() == "NRT_SUCCESS 4 2"
        # With a number of cores, the process gets free ones.
        free = cores(NEURON_RT_NUM_CORES="2", NEURON_SIMULATOR_CORES="4")
        assert good(free).strip() == "NRT_SUCCESS 4 2"
        many = cores(NEURON_RT_NUM_CORES="3", NEURON_SIMULATOR_CORES="4")
        assert good(many).strip() == "NRT_RESOURCE 0 0"
        holder.stdin.close()
    assert good(cores(NEURON_RT_NUM_CORES="2")).strip() == "NRT_SUCCESS 2 2"


def test_log_level(client: Run) -> None:
    variables = {"NEURON_RT_NUM_CORES": "none"}
    assert "simulated cores" in client("cores").stderr
    assert client("cores", NEURON_RT_LOG_LEVEL=None).stderr == ""
    assert "ERROR" in client("cores", NEURON_RT_LOG_LEVEL=None, **variables).stderr


def test_the_helper_is_killed(client: Run, add: Path, slow: Path) -> None:
    """Calls that wait for the helper fail; the next call works, and so does the first call after an idle helper dies."""
    result = client("kill", add, slow, NEURON_SIMULATOR_STRICT="0")
    good(result)
    error = (
        "NRT simulator ERROR nrt_execute: the helper was killed by signal 9 (Killed); the next call starts another\n"
    )
    assert result.stderr.count(error) == 3  # three threads waited


def test_fork(client: Run, add: Path) -> None:
    good(client("fork", add))


def test_an_execution_takes_too_long(client: Run, slow: Path) -> None:
    result = client("timeout", slow, NEURON_RT_EXEC_TIMEOUT="0.5", NEURON_SIMULATOR_STRICT="0")
    assert good(result).strip() == "NRT_TIMEOUT"
    assert "not done after 0.5 s (NEURON_RT_EXEC_TIMEOUT)" in result.stderr


def test_the_helper_ends_with_its_client(client: Run, slow: Path) -> None:
    """Even during an execution, and without a message from the client."""
    pid = int(good(client("abandon", slow, NEURON_SIMULATOR_STRICT="0")))
    try:
        for _ in range(100):
            os.kill(pid, 0)
            # A zombie that is not reaped has ended too.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.05)
    except (ProcessLookupError, FileNotFoundError):
        return
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the helper goes on")
