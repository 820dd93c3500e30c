"""Any number of tokens and any cache length with kernels for a few: results, and the choice of kernels."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_cuts import cut
from programs import ROOT, Programs, Run, build, edit_pack, ran_on

from kernelgen.bundle import reader
from kernelgen.dispatch import chips
from kernelgen.dispatch.costs import builtin
from kernelgen.dispatch.lengths import MAX_CHUNKS, LengthIndex, choose
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES

OWN = "queued_us=13,waited_us=260,gb_per_s=330"
"""Figures of a user's machine."""


@pytest.fixture(scope="module")
def few(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with kernels for caches of 64 and 256 cells: for 1, 4, 16 and 64 tokens, without flash attention
    1 and 16.
    """
    folder = tmp_path_factory.mktemp("few")
    scenarios = ("few-tokens", "few-tokens-of-scores")
    result = run(*scenarios, GGML_NEURON_RECORD=folder / "few.graphs", GGML_NEURON_BUFFERS="device")
    assert result.said == dict.fromkeys(scenarios, "ok"), result.log  # the CPU computes what is recorded
    build(folder / "few.graphs", folder / "kernels")
    return folder / "kernels"


@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_random_calls_compute_what_the_cpu_does_and_change_nothing_else(run: Run, few: Path, buffers: str) -> None:
    """Tokens, past tokens, cells, outputs and the cache's type are random; every byte outside the results stays unchanged."""
    scenarios = ("few-tokens", "any-tokens", "few-tokens-of-scores", "any-tokens-of-scores")
    result = run(*scenarios, GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_BUFFERS=buffers, GGML_NEURON_LOG="1")
    assert result.said == dict.fromkeys(scenarios, "ok"), result.log
    assert "no kernel for" not in result.log
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.log
    launched = re.search(r"other numbers of tokens were launched (\d+) times, with (\d+) rows of padding", result.log)
    assert launched and int(launched[1]) > 100 and int(launched[2]) > 100, result.log


@pytest.mark.long
@pytest.mark.parametrize("buffers", ["device", pytest.param("host", marks=pytest.mark.long)])
def test_attention_of_several_streams_has_the_kernels_of_one(run: Run, few: Path, buffers: str) -> None:
    """2 and 5 sequences with a cache each, as without `--kv-unified`, with and without kernels for their number of tokens."""
    variables = {"GGML_NEURON_KERNEL_DIR": few, "GGML_NEURON_BUFFERS": buffers, "GGML_NEURON_LOG": "1"}
    result = run("streams", **variables)
    assert result.said == {"streams": "ok"}, result.log
    assert "no kernel for" not in result.log
    assert " 0 ops ran on the CPU instead of a NeuronCore" in result.log
    exact = run("streams", **variables, GGML_NEURON_EXACT="1")
    assert exact.said == {"streams": "no kernel for FLASH_ATTN_EXT"}, exact.log


def test_the_last_stream_is_not_read_on_beyond_its_cache(run: Run, few: Path) -> None:
    """Kernels for 256 cells read past the 100 cells of each of five streams; past the last stream the buffer ends."""
    result = run("short-streams", GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_BUFFERS="device")
    assert result.said == {"short-streams": "no kernel for FLASH_ATTN_EXT"}, result.log


def test_attention_without_flash_attention_is_what_kernels_of_its_own_shapes_compute(
    run: Run, few: Path, tmp_path: Path
) -> None:
    name = "three-tokens-of-scores"
    assert run(name, GGML_NEURON_RECORD=tmp_path / "exact.graphs").said == {name: "ok"}
    build(tmp_path / "exact.graphs", tmp_path / "exact")
    logits = []
    for folder, exact in ((few, "0"), (tmp_path / "exact", "1")):
        file = tmp_path / f"logits{exact}"
        result = run(name, GGML_NEURON_KERNEL_DIR=folder, GGML_NEURON_EXACT=exact, SCENARIO_LOGITS=file)
        assert result.said == {name: "ok"}, result.log
        logits.append(np.fromfile(file, np.float32))
    # kernelgen predicts this
    index = LengthIndex.of(spec for bundle in reader.read(few) for spec in bundle.ops())
    asked = [spec for bundle in reader.read(tmp_path / "exact") for spec in bundle.ops()]
    assert [spec.id for spec in asked if index.select(spec) is None] == []
    error = np.sum((logits[0] - logits[1]) ** 2) / np.sum(logits[1] ** 2)
    assert error <= 1e-6


@pytest.mark.parametrize(
    ("scenario", "without", "lacking"),
    [
        ("scheduled-scores", "", set()),
        # if the program reads each node, the CPU computes the products instead of the device
        ("watched-scores", "", {"mul_mat", "scale", "soft_max", "tanh", "cont"}),
        # so it does if the program reads the scores, which have no softcap here
        ("wanted-scores", "", {"mul_mat", "soft_max", "cont"}),
        # so it does if the next node has no kernel
        ("scheduled-scores", "cont", {"mul_mat", "scale", "soft_max", "tanh", "cont"}),
    ],
)
def test_nodes_of_attention_that_cannot_be_computed_together_are_computed_all_the_same(
    run: Run, few: Path, tmp_path: Path, scenario: str, without: str, lacking: set[str]
) -> None:
    """The backend accepts the first nodes before it receives the next ones. Nodes without a kernel get a message."""

    def leave_out(index: dict[str, Any]) -> None:
        index["kernels"] = [k for k in index["kernels"] if k["spec"]["op"] != without]

    pack = edit_pack(few, tmp_path / "few.kernels.gguf", leave_out)
    result = run(scenario, GGML_NEURON_KERNEL_DIR=pack, GGML_NEURON_BUFFERS="device")
    assert result.said == {scenario: "ok"}, result.log
    assert set(re.findall(r"no kernel for (\w+) of", result.log)) == lacking


def test_the_cpu_computes_each_node_of_attention_whose_kernels_do_not_load(run: Run, few: Path) -> None:
    name = "scheduled-scores"
    chosen = {"GGML_NEURON_KERNEL_DIR": few, "GGML_NEURON_BUFFERS": "device", "GGML_NEURON_LOG": "1"}
    loaded = run(name, **chosen)
    failed = run(name, NEURON_SIMULATOR_FAULT="load/1", **chosen)
    assert loaded.said == failed.said == {name: "ok"}, failed.log
    assert "computing CONT on the CPU" in failed.log
    n_ops, on_cpu = ran_on(loaded)
    assert on_cpu == 0, loaded.log
    assert ran_on(failed) == (0, n_ops), failed.log


def test_exact_kernels_alone_can_be_requested(run: Run, few: Path) -> None:
    assert run("three-tokens", GGML_NEURON_KERNEL_DIR=few).said == {"three-tokens": "ok"}
    result = run("three-tokens", GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_EXACT="1")
    assert result.said["three-tokens"].startswith("no kernel for")


@pytest.mark.parametrize(
    "costs", ["queued_us=0", "launch_us=15", "gb_per_s", "gb_per_s=", "queued_us=15 us", "costs.json"]
)
def test_costs_that_cannot_be_read_are_reported(run: Run, few: Path, costs: str) -> None:
    # The backend reads them when it is loaded; nothing is computed.
    result = run("memory", GGML_NEURON_KERNEL_DIR=few, GGML_NEURON_COSTS=costs)
    assert "GGML_NEURON_COSTS is numbers above 0, such as " in result.log, result.log
    assert f", not '{costs}'; using those of " in result.log, result.log


def best_of_all(n: int, counts: Sequence[int], costs: Sequence[float], again: bool) -> float:
    """Returns the least cost of pieces of one size followed by pieces of another, over all pairs of sizes."""
    best = float("inf")
    for size, cost in zip(counts, costs, strict=True):
        whole = max(n // size, 1)
        left = max(n - whole * size, 0)
        rest = [(0.0, 0)] if left == 0 else []
        for then, its in zip(counts, costs, strict=True):
            if left and (left % then == 0 or (again and then <= n)) and -(-left // then) <= MAX_CHUNKS:
                rest.append((-(-left // then) * its, -(-left // then)))
        total, times = min(rest, default=(best, 0))
        if whole + times <= MAX_CHUNKS:
            best = min(best, whole * cost + total)
    return best


@dataclass(frozen=True)
class Asked:
    """The arguments of `choose`: tokens, the kernels' numbers of tokens, and the bytes that a launch reads."""

    n: int
    again: bool
    whole: int
    row: int
    counts: tuple[int, ...]

    @staticmethod
    def some(rng: random.Random) -> Asked:
        n, n_counts = rng.randint(1, 700), rng.randint(1, 6)
        of = (1, 2, 8, 32, 100, 128, 256, 512) if rng.random() < 0.7 else range(1, 2 * n + 1)
        counts = tuple(sorted({rng.choice(of) for _ in range(n_counts)}))
        whole, row = rng.choice((0, 8_388_608, 117_440_512)), rng.choice((4, 32_768, 131_072))
        return Asked(n, rng.random() < 0.8, whole, row, counts)

    @property
    def line(self) -> str:
        return " ".join(map(str, (self.n, int(self.again), self.whole, self.row, *self.counts)))


@pytest.mark.parametrize(("depth", "said"), [("3", "queued takes 13 us"), ("1", "waited for takes 260 us")])
def test_costs_of_a_user_replace_those_of_the_target(run: Run, few: Path, depth: str, said: str) -> None:
    variables = {"GGML_NEURON_COSTS": OWN, "GGML_NEURON_QUEUE_DEPTH": depth, "GGML_NEURON_LOG": "1"}
    log = run("memory", GGML_NEURON_KERNEL_DIR=few, **variables).log
    assert f" and GGML_NEURON_COSTS: a launch that is {said}, memory is read at 330 GB/s" in log, log


@pytest.mark.parametrize(
    ("target", "lnc", "instance"),
    [("trn1", 1, "trn1.2xlarge"), ("inf2", 1, "inf2.48xlarge"), ("trn2", 2, "trn2.48xlarge")],
)
def test_kernels_are_chosen_by_the_figures_of_the_bundles_target(
    run: Run, few: Path, tmp_path: Path, target: str, lnc: int, instance: str
) -> None:
    pack = edit_pack(few, tmp_path / "few.kernels.gguf", lambda index: index.update(target=target, lnc=lnc))
    for depth, queued in (("3", True), ("1", False)):
        result = run(
            "memory",
            GGML_NEURON_KERNEL_DIR=pack,
            NEURON_SIMULATOR_INSTANCE=instance,
            GGML_NEURON_QUEUE_DEPTH=depth,
            GGML_NEURON_LOG="1",
        )
        costs = builtin(target, lnc, queued=queued)
        said = f"{target} with LNC {lnc}: a launch that is {'queued' if queued else 'waited for'} takes {costs.launch_us:g} us, "
        assert f"{said}memory is read at {costs.gb_per_s:g} GB/s" in result.log, result.log


def test_kernelgen_chooses_as_the_backend_does(programs: Programs) -> None:
    """Both use the figures of each target and other figures, queued and waited for, for nodes of all sizes; the choice
    is the cheapest.
    """
    rng = random.Random(5)
    cases = [Asked.some(rng) for _ in range(1000)]
    # A server's warm-up asks for each number of tokens.
    cases += [Asked(2501, again, 8_388_608, 4, tuple(range(1, 2501))) for again in (False, True)]
    told = {}
    rows = [(*key, None) for key in chips.builtin()] + [("trn1", 1, OWN)]
    for (target, lnc, own), queued in itertools.product(rows, (True, False)):
        costs = builtin(target, lnc, queued=queued)
        if own:
            costs = replace(costs, launch_us=13 if queued else 260, gb_per_s=330)
        expected = []
        for case in cases:
            launches = [costs.launch(case.whole, case.row, count) for count in case.counts]
            pieces = choose(case.n, case.counts, launches, again=case.again)
            expected.append(" ".join(f"{first}:{size}" for first, size in pieces))
            if case.n < 2500:
                cost = sum(launches[case.counts.index(size)] for _, size in pieces) if pieces else float("inf")
                best = best_of_all(case.n, case.counts, launches, case.again)
                if len(pieces) > MAX_CHUNKS or (not case.again and math.isinf(best) and pieces):
                    assert not case.again and sum(size for _, size in pieces) == case.n
                    continue  # in place: more pieces or other sizes than best_of_all tries
                assert cost == pytest.approx(best, rel=1e-12), case
        done = subprocess.run(
            [programs.find("choose"), "pieces", target, str(lnc), "queued" if queued else "waited"],
            input="".join(f"{case.line}\n" for case in cases),
            env=programs.environment(GGML_NEURON_COSTS=own),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        differing = [case for case in zip(cases, done.stdout.splitlines(), expected, strict=True) if case[1] != case[2]]
        assert differing == [], (target, lnc, queued)
        assert len({line.count(":") for line in expected}) > 8
        told[target, lnc, queued, own] = expected
    assert told["trn1", 1, True, None] != told["trn1", 1, False, None], "what is waited for makes fewer pieces"
    assert told["trn1", 1, True, None] != told["trn2", 2, True, None]


def test_kernelgen_and_the_backend_cut_nodes_as_the_table_says(programs: Programs) -> None:
    """tests/data/token-cuts.json has kernels, nodes, and how each node is cut for its kernel."""
    table = json.loads((ROOT / "tests" / "data" / "token-cuts.json").read_text())
    lines, expected = [], []
    for case in table:
        assert cut(case["op"], case["node"], case["kernel"]) == (case["cut"], case["why_not"]), case
        words = [case["op"], len(case["node"]) - 1]
        for text in (*case["kernel"], *case["node"]):
            t = text and TensorDesc.parse(text)
            words += [TYPES[t.dtype].number, *t.ne, *t.nb] if t else [-1]
        lines.append(" ".join(map(str, words)))
        expected.append(f"{case['cut']}|{case['why_not']}")
    done = subprocess.run(
        [programs.find("choose"), "cuts"],
        input="".join(f"{line}\n" for line in lines),
        env=programs.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    differing = [case for case in zip(table, done.stdout.splitlines(), expected, strict=True) if case[1] != case[2]]
    assert differing == []
    # some of each kind
    assert 50 < sum(case["cut"] == "none" for case in table) < len(table) - 100
    assert len({re.sub(r"\d+", "n", case["why_not"]) for case in table}) == 6
