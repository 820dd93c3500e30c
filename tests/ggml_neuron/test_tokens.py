"""Any number of tokens, and any length of the cache, from kernels for a few: what is computed, and how kernels are chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import Run

from conftest import build
from kernelgen.costs import TEXT


@pytest.fixture(scope="module")
def few(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with kernels for 1, 4, 16 and 64 tokens and for caches of 64 and 256 cells."""
    folder = tmp_path_factory.mktemp("few")
    result = run("few-tokens", GGML_NEURON_RECORD=folder / "few.yaml", GGML_NEURON_BUFFERS="device")
    assert result.said["few-tokens"].startswith("no kernel for"), result.log
    build(folder / "few.yaml", folder / "kernels")
    return folder / "kernels"


@pytest.mark.parametrize("buffers", ["device", "host"])
def test_random_calls_compute_what_the_cpu_does_and_change_nothing_else(run: Run, few: Path, buffers: str) -> None:
    """Tokens, past ones, cells, outputs and the cache's type are random; every byte beside the results stays as it was."""
    result = run(
        "few-tokens", "any-tokens", GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_BUFFERS=buffers, GGML_NEURON_LOG="1"
    )
    assert result.said == {"few-tokens": "ok", "any-tokens": "ok"}, result.log
    assert "no kernel for" not in result.log


def test_exact_kernels_alone_can_be_asked_for(run: Run, few: Path) -> None:
    assert run("three-tokens", GGML_NEURON_KERNEL_DIR=few).said == {"three-tokens": "ok"}
    result = run("three-tokens", GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_EXACT="1")
    assert result.said["three-tokens"].startswith("no kernel for")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"launch_us": 0}, "launch_us is not a number above 0"),
        ({"rows_ms": []}, "rows_ms is empty"),
        ({"rows_ms": [[128, 1], [128, 2]]}, "the rows of rows_ms do not ascend"),
        ({"rows_ms": [[128]]}, "rows_ms holds pairs of rows and milliseconds"),
        (None, "it can't be read"),
    ],
)
def test_costs_that_cannot_be_read_are_reported(
    run: Run, few: Path, tmp_path: Path, change: dict[str, object] | None, said: str
) -> None:
    path = tmp_path / "costs.json"
    if change is not None:
        path.write_text(json.dumps(json.loads(TEXT) | change))
    # no kernel is made for these, so costs are asked for
    result = run("three-tokens", GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_COSTS=path)
    assert f"GGML_NEURON_COSTS: {path}: " in result.log and said in result.log, result.log
