"""The backend on several machines that the simulator imitates as strictly as AWS documents them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import Programs, Run, build, built_tree, edit_pack, manifest_of

from kernelgen.compilers.settings import CompileConfig
from kernelgen.neff import container
from kernelgen.targets import TARGETS

MIB = 1 << 20

PROGRAM = 250 << 10

SCRATCHPAD = 64 * MIB


def test_kernels_run_on_a_core_of_the_target_that_tests_have(
    run: Run, recorded: Path, kernels: Path, neuron_target: str
) -> None:
    """The recorded manifest, the NEFFs and the core's memory are the target's."""
    target = TARGETS[neuron_target]
    assert f"targets: [{neuron_target}]\n" in recorded.read_text()
    neff = next(built_tree(kernels).rglob("*.neff"))
    assert container.read_simulated(neff.read_bytes()).info["flags"] == CompileConfig.make(neuron_target).flags()
    said = run("free-memory", GGML_NEURON_KERNEL_DIR=kernels).said["free-memory"]
    assert said.endswith(f" of {(target.memory_gib * target.lnc) << 30} bytes")


@pytest.mark.parametrize(
    ("variables", "memory", "physical"),
    [
        ({}, 24 << 30, 2),
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 12 << 30, 1),
        ({"GGML_NEURON_LIBNRT": "in a folder with logical_nc_config"}, 12 << 30, 1),
    ],
)
def test_a_trn2_with_logical_cores_of_either_size(
    run: Run, programs: Programs, tmp_path: Path, variables: dict[str, str | Path], memory: int, physical: int
) -> None:
    """The recorded manifest names the number of physical cores per logical core where it is not the default. The
    reported free memory leaves room for what libnrt takes for a program.
    """
    if "GGML_NEURON_LIBNRT" in variables:
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libnrt.so.1").symlink_to(programs.simulator)
        (tmp_path / "logical_nc_config").write_text("1\n")
        variables = {"GGML_NEURON_LIBNRT": tmp_path / "lib" / "libnrt.so.1"}
    variables = {"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "GGML_NEURON_BUFFERS": "device"} | variables
    recording = tmp_path / "trn2.graphs"
    assert run("add", GGML_NEURON_RECORD=recording, **variables).said == {"add": "ok"}
    manifest = manifest_of(recording)
    text = manifest.read_text()
    assert "targets: [trn2]\n" in text
    assert ("compiler: {lnc: 1}\n" in text) == (physical == 1)
    build(manifest, tmp_path / "kernels")
    done = run("add", GGML_NEURON_KERNEL_DIR=tmp_path / "kernels", GGML_NEURON_LOG="2", **variables)
    assert done.said == {"add": "ok"}, done.log
    assert "core 0: loaded add-" in done.log and " 0 ops ran on the CPU instead" in done.log
    said = run("free-memory", GGML_NEURON_KERNEL_DIR=tmp_path / "kernels", **variables).said["free-memory"]
    programs = text.count("  - op:")
    taken = physical * 96 * MIB + SCRATCHPAD + programs * PROGRAM
    assert said == f"{memory - taken} of {memory} bytes"


def test_room_is_kept_for_a_page_of_the_scratchpad(run: Run, kernels: Path) -> None:
    def free(**variables: str) -> int:
        done = run("free-memory", GGML_NEURON_KERNEL_DIR=kernels, **variables)
        return int(done.said["free-memory"].partition(" ")[0])

    without = free() + SCRATCHPAD
    assert free(NEURON_SCRATCHPAD_PAGE_SIZE="16") == without - 16 * MIB
    assert free(NEURON_SIMULATOR_RELEASE="2.30") == without - 512 * MIB


def test_the_memory_of_programs_is_estimated_from_those_that_were_loaded(run: Run, kernels: Path) -> None:
    """After one load, the reported free memory leaves as much for each other program as the loaded one took: here 64
    times what its bundle says.
    """

    def free(**variables: str) -> int:
        done = run("add", "free-memory", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_LOG="1", **variables)
        return int(done.said["free-memory"].partition(" ")[0])

    neffs = {neff.read_bytes() for neff in kernels.rglob("*.neff")}
    assert free() - free(NEURON_SIMULATOR_FAULT="bloat") == len(neffs) * 63 * PROGRAM


def test_the_memory_of_programs_is_estimated_by_their_bundle(run: Run, kernels: Path, tmp_path: Path) -> None:
    """The bundle's index counts before a load, libnrt's answer after it. All programs here take a small program's memory."""

    def free(pack: Path, *scenarios: str, said: str = "") -> int:
        done = run(*scenarios, "free-memory", GGML_NEURON_KERNEL_DIR=pack, GGML_NEURON_LOG="2")
        assert said in done.log, done.log
        return int(done.said["free-memory"].partition(" ")[0])

    def enlarge(index: dict[str, Any]) -> None:
        for kernel in index["kernels"]:
            if kernel["neff_sha256"] in large:
                kernel["neff_memory"] = {"code": 8 * MIB, "rings": 2 * MIB, "scratchpad": SCRATCHPAD + 1}

    def leave_out(index: dict[str, Any]) -> None:
        for kernel in index["kernels"]:
            del kernel["neff_memory"]

    stored = json.loads((built_tree(kernels) / "index.json").read_text())["kernels"]
    large = {k["neff_sha256"] for k in stored if k["id"].startswith("add-64x4-f32-")}
    before, after = free(kernels), free(kernels, "add", said="takes 250 KiB; its bundle estimates 250 KiB")
    edited = edit_pack(kernels, tmp_path / "large.kernels.gguf", enlarge)
    assert before - free(edited) == len(large) * (10 * MIB - PROGRAM) + SCRATCHPAD
    assert free(edit_pack(kernels, tmp_path / "unknown.kernels.gguf", leave_out)) == before
    # The loaded program's entry no longer counts: its scratchpad pages exist as its bundle estimates, and other programs
    # are small.
    loaded = free(edited, "add", said="takes 250 KiB; its bundle estimates 10240 KiB")
    assert after - loaded == (len(large) - 1) * (10 * MIB - PROGRAM)


def test_large_buffers_are_of_several_tensors(run: Run, kernels: Path) -> None:
    """Before release 2.28, no tensor may have 4 GiB or more."""
    variables = {"NEURON_SIMULATOR_RELEASE": "2.27", "GGML_NEURON_BUFFERS": "device"}
    done = run("large-buffers", GGML_NEURON_KERNEL_DIR=kernels, **variables)
    assert done.said == {"large-buffers": "ok"}, done.log
