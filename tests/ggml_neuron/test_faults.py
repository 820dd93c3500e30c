"""What the backend does when libnrt, kernels, NEFFs, memory or executions fail."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import (
    ROOT,
    Benched,
    Programs,
    Result,
    Run,
    built_pack,
    built_tree,
    damage_pack,
    edit_pack,
    llama_bench,
    microcode,
    ran_on,
)

from kernelgen.targets import TARGETS

BUFFERS = ("device", pytest.param("host", marks=pytest.mark.long))


@pytest.mark.parametrize("libnrt", ["/nowhere/libnrt.so.1", "/dev/null", sys.executable])
def test_without_libnrt_there_are_no_devices(run: Run, libnrt: str) -> None:
    result = run("add", GGML_NEURON_LIBNRT=libnrt)
    assert (result.status, result.said) == (3, {})
    assert result.log.count("ggml-neuron: ") == 1
    assert f"ggml-neuron: no devices: no libnrt: {libnrt}" in result.log


@pytest.fixture
def other_ggml(programs: Programs) -> Callable[[str], dict[str, str | Path]]:
    """Returns a function that gives the variables with which ggml reports a version; "+1.2" adds to the plugin's own."""
    source = (ROOT / "backend" / "exporter" / "CMakeLists.txt").read_text()
    built_for = re.search(r"set\(EXPORTER_SUPPORTS_GGML (\d+)\.(\d+)\)", source)
    assert built_for

    def variables(change: str) -> dict[str, str | Path]:
        major, minor = (int(n) + int(d) for n, d in zip(built_for.groups(), change.split("."), strict=True))
        return {"LD_PRELOAD": programs.find("libother-ggml.so"), "OTHER_GGML_VERSION": f"{major}.{minor}.99-dev"}

    return variables


@pytest.mark.parametrize(("change", "ops"), [("0.-1", None), ("1.0", None), ("0.1", "1")])
def test_a_ggml_with_another_interface_is_refused(
    run: Run, other_ggml: Callable[[str], dict[str, str | Path]], kernels: Path, change: str, ops: str | None
) -> None:
    """An older ggml, one of another major version, and a later one that numbers its ops differently."""
    variables = other_ggml(change)
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, OTHER_GGML_OPS=ops, **variables)
    assert (result.status, result.said) == (3, {})
    message = (
        rf"ggml-neuron: no devices: the plugin was built for ggml 0\.\d+\.\d+, and ggml "
        rf"{variables['OTHER_GGML_VERSION']} loads it\nggml-neuron:     build it again"
    )
    assert re.search(message, result.log), result.log


@pytest.mark.parametrize(("change", "noted"), [("0.0", False), ("0.1", True)])
def test_a_later_ggml_loads_the_plugin(
    run: Run, other_ggml: Callable[[str], dict[str, str | Path]], kernels: Path, change: str, noted: bool
) -> None:
    variables = other_ggml(change)
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1", **variables)
    assert result.said == {"add": "ok"}, result.log
    assert (f"and ggml {variables['OTHER_GGML_VERSION']} loads it\n" in result.log) == noted


def test_a_failing_nrt_init_refuses_the_device(run: Run, noop: dict[str, str], kernels: Path) -> None:
    result = run("add", NOOP_NRT_FAIL="nrt_init=2", GGML_NEURON_KERNEL_DIR=kernels, **noop)
    assert result.said != {"add": "ok"}
    assert "nrt_init failed: NRT_INVALID (2)" in result.log


# Loads the plugin, prints the number of devices and the first one's name; with `memory` its memory in use, with `use`
# opens it.
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


@pytest.mark.parametrize(("described", "fault"), [(False, None), (True, None), (True, "early")])
def test_cores_are_claimed_by_their_first_use(
    programs: Programs, kernels: Path, tmp_path: Path, described: bool, fault: str | None
) -> None:
    """Programs that load every backend and compute nothing, such as llama-quantize, take no core from others. With the
    fault `early` libnrt reports nothing before it is initialized.
    """
    environment = programs.environment(
        GGML_NEURON_KERNEL_DIR=kernels,
        NEURON_SIMULATOR_FAULT=fault,
        **({} if described else {"NEURON_SIMULATOR_INSTANCE": None}),
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
    # The reported free memory leaves room for the kernels' programs and for a page of their scratchpad.
    said, log = use("memory")
    neffs = {hashlib.sha256(neff.read_bytes()).digest() for neff in kernels.rglob("*.neff")}
    taken = microcode(programs.target if described else "trn1")
    assert said == ["1 NEURON0", str(taken + (64 << 20) + len(neffs) * (250 << 10))]
    with (tmp_path / "core-0").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said, log = use("use")
    assert said == ["1 NEURON0", "refused"]
    assert (
        "ggml-neuron: core 0: " in log and "nrt_init failed: NRT_RESOURCE (4): no NeuronCore for this process?" in log
    )


@pytest.mark.parametrize(
    ("variables", "devices"),
    [({}, "2"), ({"NEURON_RT_NUM_CORES": "0"}, "2"), ({"NEURON_SIMULATOR_FAULT": "early"}, "0")],
)
def test_devices_are_counted_without_claiming_cores(
    programs: Programs, kernels: Path, tmp_path: Path, variables: dict[str, str], devices: str
) -> None:
    """NEURON_RT_NUM_CORES=0 means all, as AWS documents. If libnrt does not tell the count, a variable has to."""
    machine = {"NEURON_SIMULATOR_CORES": "2", "NEURON_RT_NUM_CORES": None}
    environment = programs.environment(
        **machine | variables,
        GGML_NEURON_KERNEL_DIR=kernels,
        NEURON_SIMULATOR_LOCKS=tmp_path,
        NEURON_RT_LOG_LEVEL="INFO",
    )
    count = "\n".join([*USE.splitlines()[:6], "print(ggml.ggml_backend_dev_count())"])
    command = [sys.executable, "-c", count, programs.find("libggml-neuron.so")]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert (completed.stdout.strip(), "simulated cores" in completed.stderr, list(tmp_path.iterdir())) == (
        devices,
        False,
        [],
    )
    message = "nrt_get_total_vnc_count failed: NRT_UNINITIALIZED (13): no NeuronCore? NEURON_RT_VISIBLE_CORES names those to use"
    assert (message in completed.stderr) == (devices == "0")


def test_every_function_that_a_libnrt_must_have_is_called() -> None:
    """The libnrt that does nothing has only the required functions, so another required function fails every test that
    uses it.
    """
    backend = ROOT / "backend"
    required, _ = (
        (backend / "nrt" / "nrt_api.h").read_text().split("#define NRT_FUNCTIONS_REQUIRED(X)")[1].split("#define")
    )
    sources = [*(backend / "ggml-neuron").glob("*/*.cpp"), *(backend / "nrt").glob("*.cpp")]
    text = "".join(path.read_text() for path in sources)
    names = re.findall(r"X\((\w+)\)", required)
    assert len(names) > 10
    assert [name for name in names if not re.search(rf"\b{name}\(", text)] == []


@pytest.mark.parametrize(
    "keep", [pytest.param(0, marks=pytest.mark.long), 100, pytest.param(5000, marks=pytest.mark.long), -1]
)
def test_a_corrupt_pack_is_left_out_and_others_are_used(run: Run, kernels: Path, tmp_path: Path, keep: int) -> None:
    pack = built_pack(kernels).read_bytes()
    bad = tmp_path / "bad.kernels.gguf"
    bad.write_bytes(pack[:keep] if keep >= 0 else pack[:900] + bytes(200) + pack[1100:])
    result = run("chain", GGML_NEURON_KERNEL_DIR=f"{bad}:{kernels}")
    assert result.said == {"chain": "ok"}, result.log
    assert f"kernels left out: {bad}: " in result.log


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_neff_that_disagrees_with_the_index_is_not_used(
    run: Run, kernels: Path, tmp_path: Path, buffers: str
) -> None:
    def exchange_neff(index: dict[str, Any]) -> None:
        by_op = {k["spec"]["op"]: k for k in index["kernels"]}
        add = next(k for k in index["kernels"] if k["spec"]["op"] == "add" and "(64,1,1,1)/f32" in k["spec"]["inputs"])
        add |= {name: by_op["mul_mat"][name] for name in ("neff", "neff_sha256", "neff_size", "neff_memory")}

    pack = edit_pack(kernels, tmp_path / "mixed.kernels.gguf", exchange_neff)
    # The CPU computes the first graph; after that the backend refuses the op.
    result = run("add", "skip", GGML_NEURON_KERNEL_DIR=pack, GGML_NEURON_BUFFERS=buffers, GGML_NEURON_LOG="1")
    assert result.said == {"add": "ok", "skip": "no kernel for ADD"}, result.log
    assert ran_on(result) == (0, 2)
    assert re.search(
        r"add-64x4-f32-\w+ of .*: its NEFF disagrees with the bundle's index: input0 has \d+ bytes", result.log
    )


def test_a_damaged_neff_is_not_used(run: Run, kernels: Path, tmp_path: Path) -> None:
    damaged = damage_pack(kernels, tmp_path / "damaged.kernels.gguf", built_tree(kernels).rglob("add-*.neff"))
    result = run("add", "skip", "in-turn", GGML_NEURON_KERNEL_DIR=damaged, GGML_NEURON_LOG="2")
    assert result.said == {"add": "ok", "skip": "no kernel for ADD", "in-turn": "ok"}, result.log
    found = re.findall(
        r"(add-64x4-f32-\w+) of (.*): its NEFF is damaged: the SHA-256 of its \d+ bytes is \w{64}, and", result.log
    )
    assert {path for _, path in found} == {str(damaged)}
    assert "loaded add-" not in result.log
    assert "loaded sub-" in result.log  # other kernels are used


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("rewritten", r"the SHA-256 of its \d+ bytes is"),
        ("cut", r"the pack had \d+ bytes when it was opened, and has no"),
    ],
)
def test_a_pack_that_changes_while_it_is_open_is_not_used_any_more(
    run: Run, kernels: Path, neuron_target: str, tmp_path: Path, scenario: str, said: str
) -> None:
    pack = tmp_path / "changed.kernels.gguf"
    shutil.copyfile(built_pack(kernels), pack)
    result = run(
        scenario,
        GGML_NEURON_KERNEL_DIR=pack,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_MEMORY=str(microcode(neuron_target) + (250 << 10) + (64 << 10)),  # room for one program
    )
    assert result.said == {scenario: "ok"}, result.log
    assert len(re.findall(rf"core 0: sub-64x4-f32-\w+ of {pack}: its NEFF is damaged: {said}", result.log)) == 1, (
        result.log
    )


def test_a_folder_that_cannot_be_read_is_reported(run: Run, kernels: Path, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    paths = [loop, tmp_path / "missing"]
    if os.geteuid() != 0:  # root can read every folder
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
    assert (
        "no NeuronCore can load them\nggml-neuron:     build the manifest with the Neuron SDK's compiler" in result.log
    )
    assert "nrt_load" not in result.log


@pytest.mark.parametrize("machine", ["trn1", "inf2", "trn2"])
def test_kernels_for_another_target_are_left_out(run: Run, kernels: Path, neuron_target: str, machine: str) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_TARGET=machine)
    expect_used_or_left_out(result, neuron_target, machine)


def expect_used_or_left_out(result: Result, target: str, machine: str) -> None:
    used = target in (machine, *TARGETS[machine].runs)
    assert result.said == ({"add": "ok"} if used else {}), result.log
    assert (f": left out: it is compiled for {target}, and this is {machine}\n" in result.log) == (not used)


@pytest.mark.parametrize(("instance", "cores"), [("trn1.2xlarge", 2), ("inf2.48xlarge", 8), ("trn2.48xlarge", 8)])
def test_an_instance_is_known_by_its_family(
    run: Run, kernels: Path, neuron_target: str, instance: str, cores: int
) -> None:
    """Kernels compiled for trn1 also run on inf2. The backend claims as many cores as one program computes."""
    variables = {"NEURON_SIMULATOR_INSTANCE": instance, "NEURON_RT_NUM_CORES": None, "GGML_NEURON_LOG": "1"}
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, **variables)
    expect_used_or_left_out(result, neuron_target, instance.partition(".")[0])
    assert f", {cores} cores\n" in result.log


@pytest.mark.parametrize(
    ("configured", "instance", "cores"),
    [
        ("1", "", 1),
        (None, "", None),  # the number of physical cores is unknown
        ("2", "", 2),
        ("2", "trn1.2xlarge", 2),
        ("some", "", 0),
        (None, "trn1.2xlarge", 1),
        (None, "trn2.48xlarge", 2),
    ],
)
def test_kernels_for_other_logical_cores_are_left_out(
    run: Run,
    kernels: Path,
    neuron_target: str,
    tmp_path: Path,
    configured: str | None,
    instance: str,
    cores: int | None,
) -> None:
    """The kernels use the default number of physical cores of their target; the index names the instance's target."""
    target = instance.partition(".")[0] or neuron_target
    pack = edit_pack(kernels, tmp_path / f"{target}.kernels.gguf", lambda index: index.update(target=target))
    variables = {"NEURON_LOGICAL_NC_CONFIG": configured, "NEURON_SIMULATOR_INSTANCE": instance}
    result = run("add", GGML_NEURON_KERNEL_DIR=pack, **variables)
    lnc = TARGETS[neuron_target].lnc
    used = cores in (None, lnc)
    assert result.said == ({"add": "ok"} if used else {}), result.log
    assert (f"compiled for --lnc {lnc}, and the NeuronCores have {cores} (" in result.log) == (not used), result.log


def test_logical_cores_of_an_older_libnrt_are_in_a_file(
    run: Run, kernels: Path, noop: dict[str, str | Path], tmp_path: Path
) -> None:
    """libnrt-noop.so lacks nec_get_virtual_core_size. The file is in the folder above the library's."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnrt.so.1").symlink_to(noop["GGML_NEURON_LIBNRT"])
    (tmp_path / "logical_nc_config").write_text("2\n")
    result = run(
        "add", GGML_NEURON_KERNEL_DIR=kernels, **noop | {"GGML_NEURON_LIBNRT": tmp_path / "lib" / "libnrt.so.1"}
    )
    assert result.said == {}
    assert f"compiled for --lnc 1, and the NeuronCores have 2 ({tmp_path}/logical_nc_config)" in result.log


def test_more_cores_than_ggml_takes(run: Run, kernels: Path) -> None:
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, NEURON_RT_NUM_CORES="17")
    assert result.said == {"add": "ok"}, result.log
    assert "8 of 17 NeuronCores are used: ggml's scheduler takes 15 devices beside the CPU" in result.log


def test_the_helper_is_killed_with_an_execution(run: Run, kernels: Path) -> None:
    """The execution fails, or the next helper runs it. The fault `kill` kills a helper during an execution."""
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
def test_a_core_that_goes_on_reporting_a_nan_does_not_count_as_failed(run: Run, kernels: Path, buffers: str) -> None:
    """The simulator keeps reporting the NaN, as a device does: each later execution returns a status other than success."""
    scenarios = ("chain", "not-a-number", "chain", "add")
    variables = {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_BUFFERS": buffers, "NEURON_RT_LOG_LEVEL": "INFO"}
    result = run(*scenarios, NEURON_RT_NUMERICAL_ERRORS_VERBOSITY="critical", **variables)
    assert result.said == dict.fromkeys(scenarios, "ok"), result.log
    assert "output 'output0' has an element that is not a number; core 0 reports that from now on" in result.log
    assert result.log.count("or a program before it: the results contain infinities or NaN") == 1


def test_a_child_of_the_process_leaves_libnrt_alone(run: Run, kernels: Path) -> None:
    result = run("forked", GGML_NEURON_KERNEL_DIR=kernels)
    assert result.said == {"forked": "ok"}, result.log
    assert "nrt_" not in result.log


def test_an_input_that_the_compiler_left_out_is_not_bound(run: Run, kernels: Path) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_LOG": "1"}
    for strict in ("1", "0"):
        result = run("unused", NEURON_SIMULATOR_STRICT=strict, **variables)
        assert result.said == {"unused": "ok"}, result.log
        assert ran_on(result) == (1, 0)


@pytest.mark.parametrize(
    ("tensors", "wrong"),
    [
        ("input0=1024,output0=1024", ""),  # a compiler may remove any input
        ("output0=1024", ""),
        ("input0=1024,input1=256", "it lacks output0"),
        ("input0=1024,input1=256,input2=4,output0=1024", "input2 has 4 bytes and the index says 0"),
        ("input0=1024,input1=256,output0=1024,output1=4", "output1 has 4 bytes and the index says 0"),
        ("input0=1024,input1=260,output0=1024", "input1 has 260 bytes and the index says 256"),
        ("input0=1024,bias=256,output0=1024", "its NEFF has an input 'bias', which no kernel of kernelgen has"),
    ],
)
def test_the_tensors_of_a_neff_are_those_of_the_index(
    run: Run, kernels: Path, noop: dict[str, str | Path], tensors: str, wrong: str
) -> None:
    variables = noop | {"NOOP_NRT_TENSORS": tensors, "GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_LOG": "2"}
    result = run("skip", **variables)
    assert ran_on(result) == ((0, 1) if wrong else (1, 0)), result.log
    assert wrong in result.log and ("add-64x4-f32-" in result.log)


@pytest.mark.parametrize("buffers", BUFFERS)
def test_programs_with_outputs_of_their_compiler_run(run: Run, kernels: Path, buffers: str) -> None:
    names = ("add", "chain", "cache")
    variables = {"GGML_NEURON_BUFFERS": buffers, "GGML_NEURON_LOG": "1", "NEURON_SIMULATOR_FAULT": "subgraphs"}
    result = run(*names, GGML_NEURON_KERNEL_DIR=kernels, **variables)
    assert result.said == dict.fromkeys(names, "ok"), result.log
    device, on_cpu = ran_on(result)
    assert device > len(names) and on_cpu == 0
    assert "has outputs of its compiler's own: they get 4096 bytes that nothing reads" in result.log


def test_the_backends_own_tensors_are_aligned(run: Run, kernels: Path) -> None:
    """Scratch memory and the tensors of buffers, from which slices are made, start at multiples of 512 bytes."""
    names = ("add", "chain", "cache", "inplace", "same-twice", "optimizer", "scheduled")
    for buffers in ("device", "host"):
        result = run(
            *names,
            GGML_NEURON_KERNEL_DIR=kernels,
            GGML_NEURON_BUFFERS=buffers,
            GGML_NEURON_LOG="1",
            NEURON_SIMULATOR_SLICE_ALIGNMENT="512",
        )
        assert result.said == dict.fromkeys(names, "ok"), result.log
        assert "SLICE_ALIGNMENT" not in result.log
        assert ran_on(result)[0] > len(names)


def test_results_that_are_no_numbers_are_passed_on(run: Run, kernels: Path, noop: dict[str, str]) -> None:
    result = run("fails-once", GGML_NEURON_KERNEL_DIR=kernels, NOOP_NRT_FAIL="nrt_execute=1003", **noop)
    assert result.said == {"fails-once": "the second execution: GGML status: success"}, result.log
    assert result.log.count("the results contain infinities or NaN") == 1


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
    assert result.status in (0, 1), result.log  # no signal ended the program
    assert f"{function} failed: NRT_RESOURCE (4)" in result.log


@pytest.mark.parametrize("function", ["nrt_tensor_allocate_slice", "nrt_allocate_tensor_set"])
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
        ("device", 1024, "no memory"),
        ("host", 1024, "graph_compute: GGML status: error (failed to allocate memory)"),
        # Room for the program, and for fewer copies than usual.
        ("host", None, "ok"),
    ],
)
def test_a_device_without_enough_memory(
    run: Run, kernels: Path, neuron_target: str, buffers: str, memory: int | None, said: str
) -> None:
    size = memory or microcode(neuron_target) + (250 << 10) + (64 << 10)
    variables = {"GGML_NEURON_BUFFERS": buffers, "NEURON_SIMULATOR_MEMORY": str(size)}
    result = run("add", "memory", GGML_NEURON_KERNEL_DIR=kernels, **variables)
    assert result.said == {"add": said, "memory": "ok"}, result.log
    assert ("nrt_tensor_allocate failed: NRT_RESOURCE (4)" in result.log) == (said != "ok")


def test_a_program_that_does_not_fit_is_not_tried_again_before_memory_is_freed(
    run: Run, kernels: Path, noop: dict[str, str]
) -> None:
    # The second nrt_load would succeed.
    variables = {"NOOP_NRT_TENSORS": "input0=1024,input1=1024,output0=1024", "NOOP_NRT_FAIL": "nrt_load=4@1"}
    result = run(
        "given-back",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="1",
        **noop | variables,
    )
    assert result.said == {"given-back": "ok"}, result.log
    assert result.log.count(" does not fit beside the tensors, though no other program is loaded") == 1, result.log
    assert result.log.count("memory is missing; computing ADD on the CPU\n") == 1  # the plan is kept
    # Five rounds: in the first four the CPU computes one op; the other kernel runs each time.
    assert ran_on(result) == (6, 4)


def test_a_full_core_is_reported_once(programs: Programs, benched: Benched) -> None:
    """No program fits beside the model. A second context of the model reports the same."""
    variables = {"GGML_NEURON_KERNEL_DIR": benched.kernels, "GGML_NEURON_BUFFERS": "device"}
    size = microcode(programs.target) >> 20
    log = llama_bench(programs, benched.model, NEURON_SIMULATOR_MEMORY=f"{4 + size}M", **variables).stderr
    said = [line for line in log.splitlines() if line.startswith("ggml-neuron: ")]
    assert len(said) == 8, log  # two contexts, one after the other
    full = (
        r"ggml-neuron: core 0: nrt_load failed: NRT_RESOURCE \(4\): \S+ of \S+ does not fit beside the tensors, though no other "
        r"program is loaded; the CPU computes its ops until tensors are freed",
        rf"ggml-neuron:     of the core's {4 + size} MiB, tensors hold \d MiB, programs and others 0 MiB, and \d+ MiB are free: "
        r"at least \d MiB are missing",
        r"ggml-neuron:     put fewer layers .* smaller",
        r"ggml-neuron: .*\(its kernel can't be used\).*",
    )
    assert all(re.fullmatch(*both) for both in zip(full * 2, said, strict=True)), log


def test_a_model_that_does_not_fit_says_why(programs: Programs, benched: Benched) -> None:
    variables = {"GGML_NEURON_KERNEL_DIR": benched.kernels, "GGML_NEURON_BUFFERS": "device"}
    with pytest.raises(subprocess.CalledProcessError) as failed:
        llama_bench(programs, benched.model, NEURON_SIMULATOR_MEMORY="1M", **variables)
    log = failed.value.stderr
    assert (failed.value.returncode, "llama_bench: error: failed to load model" in log) == (1, True), log
    assert re.search(
        r"NRT_RESOURCE \(4\): \d+ bytes\nggml-neuron:     of the core's 1 MiB, .* and 1 MiB are free: 3 MiB are missing",
        log,
    )


def test_a_program_that_fails_to_load_without_a_cause_is_loaded_once_more(
    run: Run, kernels: Path, noop: dict[str, str]
) -> None:
    variables = {"NOOP_NRT_TENSORS": "input0=1024,input1=1024,output0=1024", "NOOP_NRT_FAIL": "nrt_load=1@1"}
    result = run("in-turn", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1", **noop | variables)
    assert result.said == {"in-turn": "ok"}, result.log
    assert result.log.count("; loading it once more") == 1
    assert ran_on(result) == (4, 0)


def test_what_can_never_fit_unloads_no_program(run: Run, kernels: Path) -> None:
    result = run(
        "no-room",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        GGML_NEURON_LOG="2",
        NEURON_SIMULATOR_MEMORY="512M",
    )
    assert result.said == {"no-room": "ok"}, result.log
    assert "to make room" not in result.log
    assert re.search(
        r"nrt_tensor_allocate failed: NRT_RESOURCE \(4\): 1073741824 bytes\nggml-neuron:     of the core's 512 MiB, tensors hold \d+ MiB, "
        r"programs and others \d+ MiB, and \d+ MiB are free: \d+ MiB are missing\n.* put fewer layers",
        result.log,
    ), result.log


def test_no_buffer_and_no_weight_is_larger_than_the_runtime_takes(run: Run, kernels: Path) -> None:
    result = run("too-large", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_BUFFERS="device")
    assert result.said == {"too-large": "ok"}, result.log
    assert "NEURON0: no buffer of 2147483649 bytes: the runtime takes at most 2147483648 as one" in result.log
    assert "the weight does-not-fit has 2147483776 bytes, and the runtime takes at most 2147483648" in result.log


@pytest.mark.parametrize("memory", ["1K", "64M"])
def test_a_full_core_says_that_some_memory_is_free(run: Run, kernels: Path, memory: str) -> None:
    """llama.cpp ends a program in which no device reports free memory."""
    result = run("free-memory", GGML_NEURON_KERNEL_DIR=kernels, NEURON_SIMULATOR_MEMORY=memory)
    assert re.fullmatch(r"1048576 of \d+ bytes", result.said["free-memory"]), result.said


@pytest.mark.parametrize("value", ["zz", "-1", " 1", "1 ", "0x1", "1e1", "99999999999999999999"])
def test_a_value_that_a_variable_does_not_have_is_reported(run: Run, kernels: Path, value: str) -> None:
    """GGML_NEURON_EXACT=zz turns nothing on. GGML_NEURON_LOG=zz prints only the message about its value."""
    known = {
        "GGML_NEURON_EXACT": ("0 or 1", 0),
        "GGML_NEURON_FALLBACK_MEMORY": ("a number of MiB", 1024),
        "GGML_NEURON_FUSION": ("0 or 1", 1),
        "GGML_NEURON_LOG": ("0, 1 or 2", 0),
        "GGML_NEURON_QUEUE_DEPTH": ("a number from 1 to N", 3),
        "GGML_NEURON_REPACK": ("0 or 1", 1),
        "GGML_NEURON_REPACK_THREADS": ("a number from 1 to N", len(os.sched_getaffinity(0))),
    }
    result = run("add", GGML_NEURON_KERNEL_DIR=kernels, **dict.fromkeys(known, value))
    assert result.said == {"add": "ok"}
    said = [line.partition("ggml-neuron: ")[2] for line in result.log.splitlines() if "ggml-neuron: " in line]
    said = [re.sub("from 1 to [0-9]+", "from 1 to N", line) for line in said]
    expected = [f"{name} is {what}, not '{value}'; using {taken}" for name, (what, taken) in known.items()]
    assert sorted(said) == expected


def test_models_are_unloaded_when_the_device_is_full(run: Run, kernels: Path, noop: dict[str, str]) -> None:
    # The second load fails until the first model is unloaded.
    sizes = {"NOOP_NRT_TENSORS": "input0=1024,input1=1024,output0=1024"}
    result = run(
        "in-turn", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="2", NOOP_NRT_FAIL="nrt_load=4@2", **noop | sizes
    )
    assert result.said == {"in-turn": "ok"}, result.log
    assert len(re.findall("core 0: unloading add-64x4-f32-.* to make room", result.log)) == 1
    assert len(re.findall("core 0: loaded add-64x4-f32-", result.log)) == 2
    assert ran_on(result) == (4, 0)


def test_programs_that_take_turns_are_reported_once(run: Run, kernels: Path, neuron_target: str) -> None:
    result = run(
        "in-turn-often",
        GGML_NEURON_KERNEL_DIR=kernels,
        GGML_NEURON_BUFFERS="device",
        NEURON_SIMULATOR_MEMORY=str(microcode(neuron_target) + (250 << 10) + (64 << 10)),  # room for one program
    )
    assert result.said == {"in-turn-often": "ok"}, result.log
    assert result.log.count("core 0: programs are loaded again and again (32 times so far)") == 1
    assert "again and again" not in run("in-turn-often", GGML_NEURON_KERNEL_DIR=kernels).log
