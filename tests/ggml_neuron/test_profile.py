"""GGML_NEURON_PROFILE: a trace of all launches with their times, which Perfetto opens and `kernelgen report --measured`
reads.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from programs import Benched, Programs, Run, llama_bench

from kernelgen.bundle import reader
from kernelgen.report import measured


def launches(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


@pytest.mark.parametrize("depth", [pytest.param("1", marks=pytest.mark.long), "3"])
def test_each_launch_of_a_model_is_in_the_profile(
    programs: Programs, benched: Benched, tmp_path: Path, depth: str
) -> None:
    path = tmp_path / "trace.json"
    variables: dict[str, str | Path] = {"GGML_NEURON_PROFILE": path, "GGML_NEURON_LOG": "1"}
    log = llama_bench(
        programs, benched.model, GGML_NEURON_KERNEL_DIR=benched.kernels, GGML_NEURON_QUEUE_DEPTH=depth, **variables
    ).stderr
    found = launches(path)
    assert f"ggml-neuron: GGML_NEURON_PROFILE: {path} has {len(found)} launches\n" in log and found
    ids = {kernel.id for stored in reader.read(benched.kernels) for kernel in stored.kernels}
    assert {event["name"] for event in found} <= ids
    for event, after in itertools.pairwise(found):
        assert event["dur"] > 0 and event["ts"] + event["dur"] <= after["ts"] + 0.002  # both have three decimals
    assert all(event["args"]["bytes_written"] > 0 and not event["args"]["failed"] for event in found)
    assert set(measured.read(path, [])) == {event["name"] for event in found}


def test_a_launch_that_fails_is_marked(run: Run, kernels: Path, noop: dict[str, str | Path], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    variables = noop | {"GGML_NEURON_KERNEL_DIR": kernels, "GGML_NEURON_BUFFERS": "device"}
    run("fails-once", GGML_NEURON_PROFILE=path, NOOP_NRT_FAIL="nrt_execute=6@2", **variables)
    failed = [event["args"]["failed"] for event in launches(path)]
    assert failed.count(True) == 1 and not failed[0]


@pytest.mark.parametrize("name", ["no/trace.json", "fifo"])
def test_a_profile_that_cannot_be_written_is_reported(run: Run, kernels: Path, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    said = {"no/trace.json": "No such file or directory", "fifo": "No such device or address"}
    result = run("chain", GGML_NEURON_KERNEL_DIR=kernels, GGML_NEURON_PROFILE=tmp_path / name)
    assert result.said == {"chain": "ok"}
    (line,) = re.findall("^ggml-neuron: GGML_NEURON_PROFILE: .*", result.log, re.MULTILINE)
    assert line == f"ggml-neuron: GGML_NEURON_PROFILE: {tmp_path / name} can't be written: {said[name]}"
