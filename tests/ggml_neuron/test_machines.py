"""Kernels for another machine than trn1, on one that is as strict as its documentation: recorded there, built for it, and computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import Run, build

MIB = 1 << 20

PROGRAM = 250 << 10

SCRATCHPAD = 64 * MIB


@pytest.mark.parametrize(
    ("variables", "memory", "physical"),
    [({}, 24 << 30, 2), ({"NEURON_LOGICAL_NC_CONFIG": "1"}, 12 << 30, 1)],
)
def test_a_trn2_with_logical_cores_of_either_size(
    run: Run, tmp_path: Path, variables: dict[str, str], memory: int, physical: int
) -> None:
    """What is reported as free leaves room for what libnrt takes for a program."""
    variables = {"NEURON_SIMULATOR_INSTANCE": "trn2.48xlarge", "GGML_NEURON_BUFFERS": "device"} | variables
    manifest = tmp_path / "trn2.yaml"
    assert run("add", GGML_NEURON_RECORD=manifest, **variables).said == {"add": "ok"}
    text = manifest.read_text()
    assert "targets: [trn2]" in text
    if physical == 1:
        manifest.write_text(text.replace("targets: [trn2]", "targets: [trn2]\ncompiler: {lnc: 1}"))
    build(manifest, tmp_path / "kernels")
    done = run("add", GGML_NEURON_KERNEL_DIR=tmp_path / "kernels", GGML_NEURON_LOG="1", **variables)
    assert done.said == {"add": "ok"}, done.log
    assert "core 0: loaded add-" in done.log and "0 ops ran on the CPU instead" in done.log
    said = run("free-memory", GGML_NEURON_KERNEL_DIR=tmp_path / "kernels", **variables).said["free-memory"]
    programs = text.count("{op:")
    taken = physical * 96 * MIB + SCRATCHPAD + programs * PROGRAM
    assert said == f"{memory - taken} of {memory} bytes"
