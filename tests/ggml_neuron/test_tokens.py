"""Any number of tokens, and any length of the cache, from kernels for a few: what is computed, and how kernels are chosen."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest
from programs import Programs, Run

from conftest import build
from kernelgen.costs import TEXT, read
from kernelgen.pieces import choose


@pytest.fixture(scope="module")
def few(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with kernels for 1, 4, 16 and 64 tokens and for caches of 64 and 256 cells."""
    folder = tmp_path_factory.mktemp("few")
    result = run("few-tokens", GGML_NEURON_RECORD=folder / "few.yaml", GGML_NEURON_BUFFERS="device")
    assert result.said == {"few-tokens": "ok"}, result.log  # the CPU computes what is recorded
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
    launched = re.search(r"other numbers of tokens were launched (\d+) times, with (\d+) rows of padding", result.log)
    assert launched and int(launched[1]) > 100 and int(launched[2]) > 100, result.log


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


def test_kernelgen_chooses_as_the_backend_does(programs: Programs, tmp_path: Path) -> None:
    """By its own figures and by others, for nodes of all sizes."""
    rng = random.Random(5)
    others = {"launch_us": 13, "rows_ms": [[64, 1.0], [128, 1.5], [4096, 100.0]]}
    costs_file = tmp_path / "costs.json"
    costs_file.write_text(json.dumps(json.loads(TEXT) | others))
    for file in (None, costs_file):
        costs = read(file.read_text() if file else TEXT)
        cases, expected = [], []
        for _ in range(2000):
            n = rng.randint(1, 700)
            counts = sorted({rng.choice((1, 2, 8, 32, 100, 128, 256, 512)) for _ in range(rng.randint(1, 6))})
            again = rng.random() < 0.8
            whole, row = rng.choice((0, 8_388_608, 117_440_512)), rng.choice((4, 32_768, 131_072))
            cases.append(" ".join(map(str, (n, int(again), whole, row, *counts))))
            pieces = choose(n, counts, [costs.launch(whole, row, count) for count in counts], again=again)
            expected.append(" ".join(f"{first}:{size}" for first, size in pieces))
        done = subprocess.run(
            [programs.find("choose")],
            input="".join(f"{case}\n" for case in cases),
            env=programs.environment(GGML_NEURON_COSTS=file),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        differing = [case for case in zip(cases, done.stdout.splitlines(), expected, strict=True) if case[1] != case[2]]
        assert differing == []
        assert len({line.count(":") for line in expected}) > 8
