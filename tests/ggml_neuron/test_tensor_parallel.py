"""Parts of each weight on several NeuronCores (-sm tensor): logits are those of one core, and failures print messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from programs import ROOT, Programs, build, edit_pack, kernelgen

sys.path.insert(0, str(ROOT / "tools" / "llama_cpp"))

import random_llama

LAYERS = 3
PROMPT = "A NeuronCore computes what its kernels say"  # 44 tokens: llama-results requires a multiple of four
LONGER = (PROMPT + " of ") * 6 + PROMPT[:10]
"""300 tokens."""

TOLERANCE = 1e-5
"""The largest normalized squared error of logits against those of the CPU."""

NOTHING_ON_THE_CPU = "ggml-neuron: 0 ops ran on the CPU instead of a NeuronCore"


@dataclass(frozen=True)
class Run:
    """The outcome of a run of llama-results; `logits` is None if it wrote none."""

    status: int
    logits: np.ndarray | None
    log: str

    @property
    def reductions(self) -> int:
        found = re.search(r"(\d+) reductions over NeuronCores went through the host's memory", self.log)
        return int(found[1]) if found else 0


def compute(
    programs: Programs, model: Path, cores: int, *arguments: str, prompt: str = PROMPT, **variables: str | Path | None
) -> Run:
    """Computes a prompt with llama-results; on the CPU if `cores` is 0."""
    output = model.parent / "results.gguf"
    output.unlink(missing_ok=True)
    command: list[str | Path] = [programs.llama_cpp / "llama-results", "-m", model, "-o", output, "-p", prompt]
    command += ["-c", "512", *arguments]
    chosen: dict[str, str | Path | None] = dict(variables)
    if cores:
        command += ["-ngl", "99", "-sm", "tensor"]
        chosen = {
            "GGML_BACKEND_PATH": programs.find("libggml-neuron.so"),
            "GGML_NEURON_BUFFERS": "device",
            "GGML_NEURON_LOG": "1",
            "NEURON_RT_NUM_CORES": str(cores),
            "GGML_NO_BACKTRACE": "1",
        } | chosen
    done = subprocess.run(
        command,
        env=programs.environment(**chosen),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    found = gguf.GGUFReader(output).tensors if output.exists() else []
    logits = [np.array(tensor.data, np.float64) for tensor in found if tensor.name == "logits"]
    return Run(done.returncode, logits[0] if logits else None, done.stdout + done.stderr)


def check(got: Run, right: Run) -> None:
    """Checks that the logits are right."""
    assert got.status == 0 and got.logits is not None, got.log[-4000:]
    assert right.status == 0 and right.logits is not None, right.log[-4000:]
    assert right.logits.std() > 0.1
    error = float(((got.logits - right.logits) ** 2).sum() / (right.logits**2).sum())
    assert error <= TOLERANCE, got.log[-4000:]


def record(programs: Programs, model: Path, cores: int) -> Path:
    """Records and builds the kernels of a run over some cores; returns their folder."""
    name = f"recorded-{cores}"
    recording = model.parent / f"{name}.graphs"
    recorded = compute(programs, model, cores, prompt=PROMPT, GGML_NEURON_RECORD=recording)
    assert recorded.status == 0, recorded.log[-4000:]
    build(recording, model.parent / name)
    return model.parent / name


def make_manifest(graphs: Path, fuse: str, manifest: Path) -> None:
    kernelgen("model", graphs, "--fuse", fuse, "-o", manifest)


def build_split(programs: Programs, exporter: Path, model: Path, fuse: str, devices: int = 2) -> Path:
    """Returns a folder with kernels for the split graph of the prompt's call, with its sums inside, and for its ops."""
    sizes = "n_tokens=44,n_outputs=44,n_seqs=1,n_kv=256"
    split: list[str | Path] = ["--split-mode", "tensor", "--devices", str(devices), "--ctx-size", "512"]
    exported = subprocess.run(
        [exporter, model, *split, "--graph", sizes],
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    folder = model.parent / f"{fuse}-{devices}"
    graphs, manifest = folder.with_suffix(".jsonl"), folder.with_suffix(".yaml")
    graphs.write_text(exported.stdout)
    make_manifest(graphs, fuse, manifest)
    build(manifest, folder)
    return folder


def leave_out(index: dict[str, Any], *ops: str) -> None:
    index["kernels"] = [k for k in index["kernels"] if k["spec"]["op"] not in ops]


def pack_for(programs: Programs, folder: Path) -> Path:
    """Returns the pack of a folder for the target of the tests."""
    (pack,) = folder.glob(f"*_{programs.target}.kernels.gguf")
    return pack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tensor") / "model.gguf"
    size = random_llama.Size(n_embd=128, n_head=4, n_head_kv=4, n_ff=256, n_layer=LAYERS)
    random_llama.write(path, size=size)
    return path


@pytest.fixture(scope="module")
def kernels(programs: Programs, model: Path) -> Path:
    """Returns the folder with the kernels for two cores; the recording is beside it in `recorded-2.graphs`."""
    return record(programs, model, 2)


@pytest.fixture(scope="module")
def right(programs: Programs, model: Path) -> Run:
    return compute(programs, model, 0)


def test_logits_are_those_of_one_core(programs: Programs, model: Path, kernels: Path, right: Run) -> None:
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=kernels)
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log
    assert "no kernel for" not in got.log
    assert got.reductions == 2 * 2 * LAYERS  # of the warm-up and the prompt
    # without AWS's variables, -sm tensor uses all cores of the machine
    machine = {"NEURON_RT_NUM_CORES": None, "NEURON_SIMULATOR_CORES": "2"}
    again = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=kernels, **machine)
    assert got.logits is not None and again.logits is not None
    assert again.reductions == got.reductions and "NeuronCores is used" not in again.log
    assert np.array_equal(again.logits, got.logits)


@pytest.mark.long
@pytest.mark.parametrize("cores", [3, 4, 8])
def test_more_cores(programs: Programs, model: Path, right: Run, cores: int) -> None:
    """Three and eight cores share four heads: some cores have a larger part, or none."""
    got = compute(programs, model, cores, GGML_NEURON_KERNEL_DIR=record(programs, model, cores))
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log


def test_a_core_without_a_part_adds_zeros(programs: Programs, tmp_path: Path) -> None:
    """The only head of keys is on one core: the other core computes no attention, and its memory is not added."""
    model = tmp_path / "model.gguf"
    random_llama.write(model, size=random_llama.Size(n_embd=128, n_head=2, n_head_kv=1, n_ff=256, n_layer=2))
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=record(programs, model, 2))
    check(got, compute(programs, model, 0))
    assert NOTHING_ON_THE_CPU in got.log


@pytest.mark.parametrize(
    "arguments", [pytest.param((), id="at once", marks=pytest.mark.long), pytest.param(("-ub", "64"), id="in batches")]
)
def test_prompts_of_other_lengths(programs: Programs, model: Path, kernels: Path, arguments: tuple[str, ...]) -> None:
    for prompt in ("Neu", LONGER):
        got = compute(programs, model, 2, *arguments, prompt=prompt, GGML_NEURON_KERNEL_DIR=kernels)
        check(got, compute(programs, model, 0, *arguments, prompt=prompt))


@pytest.mark.long
def test_kernels_for_whole_weights_are_no_reason_to_abort(programs: Programs, model: Path, right: Run) -> None:
    """The CPU computes the parts that have no kernels, and stderr names them."""
    recording = model.parent / "whole.graphs"
    recorded = compute(programs, model, 1, "-sm", "layer", GGML_NEURON_RECORD=recording)
    assert recorded.status == 0, recorded.log[-4000:]
    build(recording, model.parent / "whole")
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=model.parent / "whole")
    check(got, right)
    assert "no kernel for mul_mat of (128,64,1,1)/f16, " in got.log


def test_a_graph_names_the_parts_that_have_no_kernel(
    programs: Programs, model: Path, kernels: Path, right: Run, tmp_path: Path
) -> None:
    """A recording with some kernels in place has all ops, so the kernels that it gives leave nothing on the CPU."""
    pack = edit_pack(kernels, tmp_path / "some.kernels.gguf", lambda index: leave_out(index, "swiglu"))
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=pack)
    check(got, right)
    named = re.findall(
        r"^ggml-neuron: no kernel for (\w+) of .*: the CPU computes it, 1 node of", got.log, re.MULTILINE
    )
    assert set(named) == {"swiglu"}
    recording = tmp_path / "again.graphs"
    again = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=pack, GGML_NEURON_RECORD=recording)
    assert "no kernel for" not in again.log
    build(recording, tmp_path / "all")
    mended = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=tmp_path / "all")
    check(mended, right)
    assert "no kernel for" not in mended.log and NOTHING_ON_THE_CPU in mended.log


@pytest.mark.parametrize("fuse", [pytest.param("parts", marks=pytest.mark.long), "step"])
def test_graphs_that_are_recorded_have_reductions_between_parts(
    programs: Programs, model: Path, kernels: Path, right: Run, fuse: str
) -> None:
    folder = model.parent / f"recorded-{fuse}"
    manifest = folder.with_suffix(".yaml")
    make_manifest(model.parent / "recorded-2.graphs", fuse, manifest)
    build(manifest, folder)
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{folder}:{kernels}")
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log
    launches = [int(n) for n in re.findall(r"core \d+: (\d+) launches", got.log)]
    assert len(launches) == 2
    # of the warm-up and the prompt
    assert max(launches) <= 2 * (2 * LAYERS + 2 if fuse == "parts" else 1), got.log
    assert got.reductions == (2 * 2 * LAYERS if fuse == "parts" else 0)


@pytest.mark.parametrize(
    "fault", [pytest.param("execute@9", marks=pytest.mark.long), "execute@31", "lost@31", "load/5"]
)
def test_what_fails_on_one_core_is_an_error(
    programs: Programs, model: Path, kernels: Path, right: Run, fault: str
) -> None:
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=kernels, NEURON_SIMULATOR_FAULT=fault)
    if got.status == 0:  # it failed in the warm-up, or the CPU computed what did not load
        check(got, right)
    else:
        assert got.logits is None
        assert re.search(r"ggml-neuron: .*core \d: nrt\w+ failed", got.log), got.log[-4000:]


def test_a_reduction_that_fails_fails_one_graph(programs: Programs, model: Path, kernels: Path, right: Run) -> None:
    """The launch that computes the warm-up's first partial result fails; the prompt is still computed."""
    failed = []
    for count in range(20, 32):
        got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=kernels, NEURON_SIMULATOR_FAULT=f"execute@{count}")
        if re.search(r"the reduction of attn_out-0 over 2 cores failed", got.log):
            failed.append(count)
            check(got, right)
            if "KERNELGEN_LONG_TESTS" not in os.environ:
                break
    assert failed


@pytest.mark.parametrize("program", ["llama-bench", "llama-results"])
def test_loading_says_that_parts_are_in_device_memory(
    programs: Programs, model: Path, kernels: Path, tmp_path: Path, program: str
) -> None:
    """Also with llama-bench, which silences llama.cpp's own messages."""
    command: list[str | Path] = [programs.llama_cpp / program, "-m", model, "-ngl", "99", "-sm", "tensor"]
    command += ["-p", "44", "-n", "0"] if program == "llama-bench" else ["-o", tmp_path / "r", "-p", PROMPT]
    done = subprocess.run(
        command,
        env=programs.environment(
            GGML_BACKEND_PATH=programs.find("libggml-neuron.so"),
            GGML_NEURON_KERNEL_DIR=kernels,
            GGML_NEURON_BUFFERS="host",
            NEURON_RT_NUM_CORES="2",
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert "set GGML_NEURON_BUFFERS=device" in done.stderr
    assert done.returncode == 1, done.stderr  # not a signal


@pytest.mark.parametrize(
    "architecture",
    [
        "^llama$",
        "^gemma3$",
        "^bloom$",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("^qwen3$", "^mellum$", "^gpt-oss$", "^gpt2$")),
    ],
)
def test_architectures(programs: Programs, kernels: Path, architecture: str) -> None:
    """test-llama-archs compares each core alone and both with the CPU. Of these architectures only BLOOM has ALiBi."""
    preload = os.environ.get("LLAMA_LOAD_BACKENDS", ROOT / "tools" / "llama_cpp" / "libload_backends.so")
    done = subprocess.run(
        [programs.llama_cpp / "test-llama-archs", "-s", "1", "-a", architecture],
        env=programs.environment(
            GGML_BACKEND_PATH=programs.find("libggml-neuron.so"),
            GGML_NEURON_KERNEL_DIR=kernels,
            GGML_NEURON_BUFFERS="device",
            NEURON_RT_NUM_CORES="2",
            LD_PRELOAD=Path(preload).absolute(),
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Meta" in done.stdout
    assert re.search(r"Summary: all \d+ test\(s\) passed", done.stdout), done.stdout
    assert done.stderr.count("has ALiBi, which llama.cpp computes wrongly") == (architecture == "^bloom$"), done.stderr


@pytest.fixture(scope="module")
def steps(programs: Programs, exporter: Path, model: Path) -> Path:
    """Returns the folder with a kernel of a whole step with its sums inside, and with kernels of its ops."""
    return build_split(programs, exporter, model, "step")


def test_a_step_is_one_launch_on_each_core(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run
) -> None:
    """The kernel for 44 tokens also computes the warm-up of two."""
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}")
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log
    assert got.reductions == 0
    grouped = re.search(r"(\d+) ops ran in groups, in (\d+) launches", got.log)
    assert grouped and int(grouped[2]) == 4, got.log[-4000:]  # on both cores


@pytest.mark.parametrize(
    ("fuse", "launches"), [("parts+sums", 2 * LAYERS + 2), pytest.param("layer", LAYERS + 2, marks=pytest.mark.long)]
)
def test_a_launch_has_its_parts_and_the_sums_between(
    programs: Programs, exporter: Path, model: Path, kernels: Path, right: Run, fuse: str, launches: int
) -> None:
    parts = build_split(programs, exporter, model, fuse)
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{parts}:{kernels}")
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log
    assert "no kernel for" not in got.log
    # the kernels for 44 tokens compute the warm-up of two: a sum in place gets copies of these rows
    assert got.reductions == 0
    grouped = re.search(r"(\d+) ops ran in groups, in (\d+) launches", got.log)
    assert grouped and int(grouped[2]) <= 2 * 2 * launches, got.log[-4000:]  # on both cores
    if fuse == "parts+sums":
        check_that_sums_over_the_host_are_named(programs, model, f"{parts}:{kernels}")


def check_that_sums_over_the_host_are_named(programs: Programs, model: Path, kernels: str) -> None:
    """No kernel is for this many tokens or more, and a sum in place can't be computed in pieces."""
    got = compute(programs, model, 2, prompt=LONGER, GGML_NEURON_KERNEL_DIR=kernels)
    check(got, compute(programs, model, 0, prompt=LONGER))
    assert got.reductions == 2 * LAYERS  # none of the warm-up
    (said,) = re.findall("sums over 2 cores go through the host's memory, (.*)", got.log)
    assert re.fullmatch(
        rf"{2 * LAYERS} in a call of \d{{3}} tokens: their group has no kernel for this many tokens and cells, nor for more "
        r"\(attn_out-0\)",
        said,
    ), said


def test_a_runtime_without_queues_has_a_thread_for_each_core(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run
) -> None:
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}", GGML_NEURON_QUEUE_DEPTH="1")
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log
    assert got.reductions == 0


@pytest.mark.long
def test_several_launches_without_queues(
    programs: Programs, exporter: Path, model: Path, kernels: Path, right: Run
) -> None:
    parts = build_split(programs, exporter, model, "parts+sums")
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{parts}:{kernels}", GGML_NEURON_QUEUE_DEPTH="1")
    check(got, right)
    assert got.reductions == 0


@pytest.mark.parametrize(
    "fault", ["rank@1", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("absent@1", "wedged"))]
)
def test_a_rank_that_fails_is_an_error(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run, fault: str
) -> None:
    """If programs with reductions don't load, programs without reductions compute the parts."""
    got = compute(
        programs,
        model,
        2,
        GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}",
        NEURON_SIMULATOR_FAULT=fault,
        NEURON_RT_EXEC_TIMEOUT="3",
    )
    if fault == "wedged":
        check(got, right)
        assert "nrt_load_collectives failed" in got.log
    else:
        assert got.status != 0 and got.logits is None
        assert re.search(r"core \d: nrta_execute_schedule failed", got.log), got.log[-4000:]


def test_a_rank_that_does_not_load_does_not_hold_up_the_others(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run
) -> None:
    """The other rank waits in nrt_load_collectives forever, also at the end of the process."""
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}", NEURON_SIMULATOR_FAULT="load@2")
    check(got, right)
    assert got.reductions == 2 * 2 * LAYERS
    (failed,) = re.findall(r"core (\d): nrt_load_collectives failed: NRT_FAILURE", got.log)
    assert f"core {1 - int(failed)}: nrt_load_collectives has not returned" in got.log
    assert "did not load on all of 2 cores" in got.log


def test_a_program_that_does_not_fit_is_loaded_on_no_core(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run
) -> None:
    """Programs without reductions fit without a page of the scratchpad, which libnrt takes for the first program."""
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}", NEURON_SIMULATOR_MEMORY="128M")
    check(got, right)
    assert got.reductions == 2 * 2 * LAYERS
    assert re.search(r"core 1: graph-\S+ of .* does not fit beside the tensors", got.log), got.log[-4000:]
    assert "nrt_load_collectives" not in got.log


def test_cores_that_can_not_compute_one_program_sum_in_host_memory(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run
) -> None:
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}", NEURON_RT_VISIBLE_CORES="1-2")
    check(got, right)
    assert got.reductions == 2 * 2 * LAYERS
    assert (
        "sums over 2 cores go through the host's memory: a program of 2 cores begins at a core that is a multiple of 2, not "
        "at core 1" in got.log
    )


@pytest.mark.parametrize(
    "fault", ["lost@4", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("rank@1", "absent@1", "execute@3"))]
)
def test_a_core_that_fails_without_queues_ends_the_others(
    programs: Programs, model: Path, kernels: Path, steps: Path, fault: str
) -> None:
    """A thread waits in nrt_execute for each core; for a core that failed earlier it waits as long as the runtime allows."""
    got = compute(
        programs,
        model,
        2,
        GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}",
        NEURON_SIMULATOR_RELEASE="2.28",
        NEURON_SIMULATOR_FAULT=fault,
        NEURON_RT_EXEC_TIMEOUT="3",
    )
    assert "nrta_" not in got.log
    assert got.status != 0 and got.logits is None, got.log[-4000:]
    assert set(re.findall(r"core (\d): nrt_execute failed: NRT_", got.log)) == {"0", "1"}, got.log[-4000:]
    assert fault == "rank@1" or re.search(r"rank \d of 2 waited for rank \d for 3 s", got.log), got.log[-4000:]


@pytest.mark.parametrize("fault", ["execute@150", pytest.param("execute@160", marks=pytest.mark.long)])
def test_what_fails_when_a_result_is_requested_fails_the_next_graph(
    programs: Programs, model: Path, kernels: Path, steps: Path, fault: str
) -> None:
    """The CPU computes a layer's feed-forward network: reading its inputs runs the deferred work of the cores."""
    on_cpu = ("-ot", r"blk\.1\.ffn_.*=CPU")
    got = compute(
        programs, model, 2, *on_cpu, GGML_NEURON_KERNEL_DIR=f"{steps}:{kernels}", NEURON_SIMULATOR_FAULT=fault
    )
    assert got.status != 0 and got.logits is None, got.log[-4000:]
    assert "parts of a graph failed when a result was read: the next graph fails" in got.log
    assert "a launch of an earlier graph failed after ggml had that graph back: this graph is not computed" in got.log


def test_a_damaged_program_with_reductions_is_loaded_on_no_core(
    programs: Programs, model: Path, kernels: Path, steps: Path, right: Run, tmp_path: Path
) -> None:
    pack = tmp_path / "damaged.kernels.gguf"
    data = pack_for(programs, steps).read_bytes()
    for neff in steps.rglob("graph-*.neff"):
        at = data.find(neff.read_bytes()) + 500  # in the header's padding, which nrt does not read
        if at >= 500:
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    pack.write_bytes(data)
    got = compute(programs, model, 2, GGML_NEURON_KERNEL_DIR=f"{pack}:{kernels}")
    check(got, right)
    assert re.search(r"core 1: graph-.* its NEFF is damaged", got.log), got.log[-4000:]
    assert "nrt_load_collectives" not in got.log
    assert got.reductions == 2 * 2 * LAYERS


@pytest.mark.long
@pytest.mark.parametrize("cores", [3, 4, 8])
def test_cores_that_differ_compute_part_by_part(
    programs: Programs, exporter: Path, model: Path, right: Run, cores: int
) -> None:
    """llama.cpp gives these cores unequal parts of the weights."""
    step = build_split(programs, exporter, model, "step", cores)
    got = compute(programs, model, cores, GGML_NEURON_KERNEL_DIR=f"{step}:{record(programs, model, cores)}")
    check(got, right)
    assert NOTHING_ON_THE_CPU in got.log
    assert got.reductions == 2 * 2 * LAYERS


def test_sums_are_in_kernels_where_slices_differ(programs: Programs, exporter: Path, tmp_path: Path) -> None:
    """Of a feed-forward network's 384 columns one core has 256; both cores have equal parts of attention."""
    model = tmp_path / "model.gguf"
    random_llama.write(model, size=random_llama.Size(n_embd=128, n_head=2, n_head_kv=2, n_ff=384, n_layer=2))
    kernels = f"{build_split(programs, exporter, model, 'step')}:{record(programs, model, 2)}"
    right = compute(programs, model, 0)
    for depth in ("1", "4"):
        got = compute(
            programs,
            model,
            2,
            GGML_NEURON_KERNEL_DIR=kernels,
            GGML_NEURON_QUEUE_DEPTH=depth,
        )
        check(got, right)
        assert NOTHING_ON_THE_CPU in got.log
        assert got.reductions == 0
        grouped = re.search(r"(\d+) ops ran in groups, in (\d+) launches", got.log)
        assert grouped and int(grouped[2]) == 2 * 2 * (2 * 2 + 1), got.log[-4000:]  # two calls on both cores
