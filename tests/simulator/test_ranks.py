"""Several ranks compute one program together, as libnrt's documentation of collectives describes."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rank_programs
from rank_programs import all_reduce, hlo_of

from kernelgen.compilers.settings import CompileConfig
from kernelgen.dispatch import chips
from kernelgen.hlo import execute
from kernelgen.neff import container
from kernelgen.simulator import ranks

HERE = Path(__file__).parent
RANKS = 4

SUM = "0,1,2,3"
QUICK = {"NEURON_RT_EXEC_TIMEOUT": "0.5"}
"""Seconds that an execution waits for a missing rank."""

LOADED = {"NEURON_SIMULATOR_LOAD_TIMEOUT": "4"}
"""Seconds that loading waits for a missing rank; on a busy machine, successful loads take some of it."""

IN_TIME = {"NEURON_RT_EXEC_TIMEOUT": "3"}
"""Seconds that an execution waits for a late rank."""

LOADING, EXECUTING = "nrt_load_collectives returned", "nrt_execute returned"
TIMEOUT, INVALID, STUCK = "NRT_TIMEOUT (5)", "NRT_INVALID (2)", "NRT_EXEC_HW_ERR_COLLECTIVES (1200)"

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run(
    library: Path, environment: dict[str, str], neuron_target: str, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Returns a function that runs commands of ranks on a program's HLO in a process; it returns each command's output,
    and stderr.
    """
    folder = tmp_path_factory.mktemp("ranks")

    def run(hlo: bytes, *commands: str, library: Path = library, **variables: str) -> tuple[list[Any], str]:
        file = folder / "program.neff"
        file.write_bytes(container.write_simulated(hlo, CompileConfig.make(neuron_target).flags(), "simulator 1"))
        machine = {"NEURON_RT_NUM_CORES": str(RANKS), "PYTHONPATH": environment["NEURON_SIMULATOR_PATH"]}
        made = subprocess.run(
            [sys.executable, HERE / "rank_programs.py", library, file, str(RANKS), *commands],
            capture_output=True,
            text=True,
            check=False,
            env=environment | machine | variables,
            timeout=120,
        )
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout), made.stderr

    return run


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the library and the variables with which `run` uses a sanitizer."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = f"-fsanitize={request.param} -g"
    source = HERE.parents[1] / "backend" / "simulator"
    configure = ["cmake", "-S", source, "-B", folder, "-DNEURON_SIMULATOR_TESTS=OFF", f"-DCMAKE_CXX_FLAGS={flags}"]
    for command in (configure, ["cmake", "--build", folder, "--parallel", "2"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[request.param]
    found = subprocess.run(["gcc", f"-print-file-name={runtime}"], check=True, capture_output=True, text=True)
    # Leaks of Python's own memory are not reported; a report ends the process with status 66.
    options = "exitcode=66:detect_leaks=0:report_signal_unsafe=0"
    return {
        "library": folder / "libnrt.so.1",
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": options.replace(":report_signal_unsafe=0", ""),
        "TSAN_OPTIONS": options.replace(":detect_leaks=0", ""),
    }


@pytest.mark.long
@pytest.mark.parametrize("sanitized", ["address", "thread"], indirect=True)
def test_sanitizers_find_nothing(run: Run, sanitized: dict[str, Any]) -> None:
    hlo = hlo_of(all_reduce(SUM))
    for commands in (["execute", "again", "queue", "different", "clocks", "communicator"], ["unloaded"], ["closing"]):
        run(hlo, *commands, NEURON_RT_EXEC_TIMEOUT="3", **sanitized)
    for fault in ("rank@6", "straggler/3", "absent@7", "execute@5", "kill@2", "load@2"):
        run(
            hlo,
            "again",
            "outputs",
            "again",
            NEURON_SIMULATOR_FAULT=fault,
            NEURON_RT_EXEC_TIMEOUT="3",
            **LOADED,
            **sanitized,
        )


def summed(groups: str) -> list[list[float]]:
    """Returns the result of `all_reduce` on each rank."""
    out: list[list[float]] = [[]] * RANKS
    for group in groups.split(";"):
        members = [int(rank) for rank in group.split(",")]
        total = np.zeros(64, np.float32)
        for rank in members:
            total += 2 * rank_programs.values(rank, 64)
        for rank in members:
            out[rank] = (total + 1).tolist()
    return out


@pytest.mark.parametrize("groups", [SUM, "0,1;2,3", "2,0;3,1", "0;1;2;3"])
def test_ranks_of_a_group_get_their_sum(run: Run, groups: str) -> None:
    (first, second), _ = run(hlo_of(all_reduce(groups)), "execute", "execute")
    assert first == second == summed(groups)


def test_ranks_meet_in_queues_that_one_thread_fills(run: Run) -> None:
    (queued,), _ = run(hlo_of(all_reduce(SUM)), "queue", NEURON_RT_NUM_CORES="8")
    assert queued == summed(SUM)


def test_a_program_whose_ranks_do_not_fit_is_refused(run: Run) -> None:
    """After these refusals the ranks still load a right program."""
    found, log = run(hlo_of(all_reduce(SUM)), "plain", "too_many", "other_count", "same_core", "different", "execute")
    plain, too_many, other_count, same_core, (different, same), executed = found
    assert plain == "nrt_load returned NRT_FAILURE (1)"
    assert "every rank loads with nrt_load_collectives" in log
    not_enough = f"{LOADING} NRT_LOAD_NOT_ENOUGH_NC (9)"
    assert too_many == [not_enough, not_enough, f"{LOADING} {INVALID}", f"{LOADING} {INVALID}"]
    assert "129 devices are wanted, and the instance has " in log
    assert other_count == [f"{LOADING} {INVALID}"] * 2
    assert "its collectives are over 4 ranks, and 2 load it" in log
    assert same_core == [f"{LOADING} {INVALID}"] * RANKS
    assert "ranks 0 and 1 are both on core 0" in log
    assert different == [f"{LOADING} {INVALID}"] * RANKS
    assert "ranks 0 and 3 load different NEFFs" in log
    assert same == executed == summed(SUM)


def test_loading_waits_for_all_ranks(run: Run) -> None:
    (alone, executed), log = run(hlo_of(all_reduce(SUM)), "alone", "execute", **LOADED)
    assert alone == f"{LOADING} {TIMEOUT}"
    assert "rank 0 of 4 waited for rank 1, 2, 3 for 4 s" in log
    assert executed == summed(SUM)


def test_ranks_of_other_processes_are_refused(run: Run) -> None:
    (found,), log = run(hlo_of(all_reduce(SUM)), "execute", NEURON_RT_VISIBLE_CORES="0-1", NEURON_SIMULATOR_CORES="4")
    assert found == [f"{LOADING} NRT_FAILURE (1)"] * RANKS
    assert "the simulator has no ranks in several processes" in log


@pytest.mark.parametrize("root", ["", "127.0.0.1", "127.0.0.1:0"])
def test_collectives_need_an_address_where_ranks_meet(run: Run, root: str) -> None:
    """kernelgen.device.libnrt sets the variable, and other tests pass, unless it is set."""
    (failed,), log = run(hlo_of(all_reduce(SUM)), "execute", NEURON_RT_ROOT_COMM_ID=root)
    assert failed == [f"{LOADING} NRT_FAILURE (1)"] * RANKS
    assert (
        f"collectives need NEURON_RT_ROOT_COMM_ID=ADDRESS:PORT before nrt_init, where the ranks meet; it is '{root}'"
        in log
    )


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"NEURON_SIMULATOR_INSTANCE": "trn1.32xlarge"},
            "trn1 has collectives over 1, 2, 8, 16 or 32 cores, not 4",
        ),
        ({"NEURON_RT_VISIBLE_CORES": "2-5"}, "rank 0 of 4 is on core 2 of the machine"),
    ],
)
def test_cores_that_have_no_collectives_are_refused(run: Run, variables: dict[str, str], text: str) -> None:
    (failed,), log = run(hlo_of(all_reduce(SUM)), "execute", **variables)
    assert failed == [f"{LOADING} {INVALID}"] * RANKS
    assert text in log


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("0,1", "replica groups {{0,1}} do not have each of 4 ranks once"),
        ("0,1,2,3,4", "its collectives are over 5 ranks, and 4 load it"),
    ],
)
def test_wrong_groups_are_refused(run: Run, groups: str, said: str) -> None:
    (found,), log = run(hlo_of(all_reduce(groups)), "execute")
    assert found == [f"{LOADING} {INVALID}"] * RANKS
    assert said in log


@pytest.mark.parametrize(("count", "good"), [(12, True), (13, False)])
def test_a_program_has_twelve_replica_groups_at_most(run: Run, count: int, good: bool) -> None:
    groups = [",".join(map(str, p)) for p in itertools.islice(itertools.permutations(range(RANKS)), count)]
    body = "".join(all_reduce(group).replace("%", f"%v{i}_") for i, group in enumerate(groups))
    for i in range(count):
        body = body.replace(f"%v{i}_p", "%p" if i == 0 else f"%v{i - 1}_q")
    (found,), log = run(hlo_of(body + f"%q = stablehlo.abs %v{count - 1}_q : tensor<64xf32>"), "again")
    assert found == ([[None] * RANKS] * 3 if good else [f"{LOADING} {INVALID}"] * RANKS)
    assert good or "13 different replica groups, and a NEFF has 12 at most" in log


def test_a_communicator_says_how_many_ranks_there_are(run: Run) -> None:
    (found,), log = run(hlo_of(all_reduce(SUM)), "communicator")
    other = f"nrt_build_global_comm returned {INVALID}"
    assert found == [[None] * RANKS, [other, other, None, None], f"{LOADING} {INVALID}"]
    assert "nrt_build_global_comm was called for at most 2 devices, and this program has 4" in log


def test_a_barrier_is_passed_when_all_are_there(run: Run) -> None:
    (found,), _ = run(hlo_of(all_reduce(SUM)), "barrier", **IN_TIME)
    assert found == [[RANKS] * RANKS, [f"nrt_barrier returned {TIMEOUT}"] * 3 + [None]]


def test_collectives_are_stuck_after_a_rank_is_missing(run: Run) -> None:
    (found,), log = run(hlo_of(all_reduce(SUM)), "missing", **QUICK)
    late, stuck = f"{EXECUTING} {TIMEOUT}", f"{EXECUTING} {STUCK}"
    assert found == [[late] * 3 + [None], [stuck] * 3 + [late], [stuck] * RANKS, [f"{LOADING} {TIMEOUT}"] * RANKS]
    assert "waited for rank 3 for 0.5 s" in log


def test_a_rank_unloads_while_others_wait(run: Run) -> None:
    (found,), _ = run(hlo_of(all_reduce(SUM)), "unloaded", **QUICK)
    assert found == [None] + [f"{EXECUTING} {TIMEOUT}"] * 3


def test_closing_ends_what_waits(run: Run) -> None:
    (found,), _ = run(hlo_of(all_reduce(SUM)), "closing", NEURON_RT_EXEC_TIMEOUT="100")
    assert found == [f"{EXECUTING} NRT_CLOSED (14)"]


HALF = float(np.frombuffer(b"\x5a" * 4, np.float32)[0])
"""The first element of a half-written result."""


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("rank@2", "NRT_EXEC_UNIT_UNRECOVERABLE (101)", STUCK),
        ("lost@2", "NRT_EXEC_UNIT_UNRECOVERABLE (101)", STUCK),
        ("execute@2", "NRT_EXEC_COMPLETED_WITH_ERR (1004)", STUCK),
        ("absent@2", TIMEOUT, TIMEOUT),
    ],
)
def test_one_rank_fails(run: Run, fault: str, own: str, others: str) -> None:
    ((found, results),), _ = run(hlo_of(all_reduce(SUM)), "outputs", NEURON_SIMULATOR_FAULT=fault, **QUICK)
    assert sorted(found) == sorted([f"{EXECUTING} {own}"] + [f"{EXECUTING} {others}"] * 3)
    assert set(results) <= {HALF, "nrt_tensor_read returned NRT_EXEC_UNIT_UNRECOVERABLE (101)"}


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("load@3", "NRT_FAILURE (1)", TIMEOUT),
        pytest.param("memory@3", "NRT_RESOURCE (4)", TIMEOUT, marks=pytest.mark.long),
        pytest.param("wedged@3", TIMEOUT, TIMEOUT, marks=pytest.mark.long),
    ],
)
def test_one_rank_does_not_load(run: Run, fault: str, own: str, others: str) -> None:
    (failed, whole), _ = run(hlo_of(all_reduce(SUM)), "outputs", "execute", NEURON_SIMULATOR_FAULT=fault, **LOADED)
    assert sorted(failed) == sorted([f"{LOADING} {own}"] + [f"{LOADING} {others}"] * 3)
    assert whole == summed(SUM)


def test_a_late_rank_is_waited_for(run: Run) -> None:
    (found,), _ = run(hlo_of(all_reduce(SUM)), "execute", NEURON_SIMULATOR_FAULT="straggler@2", **IN_TIME)
    assert found == summed(SUM)


def test_a_helper_that_dies_is_replaced(run: Run) -> None:
    ((first, *others),), _ = run(hlo_of(all_reduce(SUM)), "again", NEURON_SIMULATOR_FAULT="kill@1")
    assert first == [f"{EXECUTING} NRT_HW_ERROR (6)"] * RANKS
    assert others == [[None] * RANKS] * 2


FAULTS = ("rank", "straggler", "absent", "wedged", "load", "memory", "execute", "deferred", "lost", "kill")


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 200))])
def test_whatever_fails_no_result_is_wrong(run: Run, seed: int) -> None:
    """One or two faults at random counts: each rank gets a right result or an error, everything can be freed, and the
    process ends.
    """
    chosen = random.Random(seed)
    names = chosen.sample(FAULTS, chosen.choice((1, 1, 2)))
    fault = ",".join(f"{name}{chosen.choice('@@/')}{int(2 ** chosen.uniform(1, 5))}" for name in names)
    (found, again), _ = run(
        hlo_of(all_reduce(SUM)), "steps", "steps", NEURON_SIMULATOR_FAULT=fault, NEURON_RT_EXEC_TIMEOUT="1", **LOADED
    )
    first = summed(SUM)[0][0]
    for step, each in itertools.chain(enumerate(found), enumerate(again)):
        for result in each:
            assert isinstance(result, str) or result in ("loaded", first + 2 * RANKS * step), fault


def test_collectives_have_a_price(run: Run, neuron_target: str) -> None:
    (found,), _ = run(hlo_of(all_reduce(SUM)), "clocks")
    chip = chips.of(neuron_target)
    bytes_us = 2 * 64 * 4 / chip.number("gb_per_s") / 1e3
    each = chip.number("all_reduce_us")
    waited = chip.by("launch_us", "waited") + chip.at("collectives_us", RANKS) + each
    for ns, us in zip(found, (waited, chip.by("launch_us", "queued") + each), strict=True):
        assert ns == [pytest.approx((us + bytes_us) * 1e3, abs=2)] * RANKS


def test_a_core_says_what_it_executed_at_another_rate(run: Run, neuron_target: str) -> None:
    (found,), log = run(
        hlo_of(all_reduce(SUM)), "clocks", NEURON_SIMULATOR_GB_PER_S="0.001", NEURON_RT_LOG_LEVEL="INFO"
    )
    chip = chips.of(neuron_target)
    waited = chip.by("launch_us", "waited") + chip.at("collectives_us", RANKS) + chip.number("all_reduce_us")
    assert found[0] == [pytest.approx(waited * 1e3 + 2 * 64 * 4 * 1e3, abs=2)] * RANKS
    said = re.findall(
        r"exit: core (\d): (\d+) executions, which read (\d+) bytes of inputs and take (\d+) ns on a device", log
    )
    assert said == [(str(core), "2", str(2 * 64 * 4), str(found[0][core] + found[1][core])) for core in range(RANKS)]


# The helper's merged program.


def merged(body: str, inputs: list[np.ndarray], result: int | None = None) -> list[np.ndarray]:
    """Returns the result on each rank."""
    return execute.run(ranks.merge(hlo_of(body, len(inputs[0]), result), len(inputs)), inputs)


def test_sums_are_in_the_order_of_the_ranks() -> None:
    """The sum has the bits of one addition after another in the ranks' order, for any order of a group's list."""
    made = np.random.default_rng(1)
    inputs = [(made.standard_normal(64) * 10.0 ** made.integers(-6, 6, 64)).astype(np.float32) for _ in range(8)]
    expected = inputs[0] * 2
    for other in inputs[1:]:
        expected = expected + other * 2
    assert not np.array_equal(expected, sum(reversed(inputs)) * np.float32(2))
    for groups in ("0,1,2,3,4,5,6,7", "7,3,5,1,6,2,4,0"):
        assert all(np.array_equal(x, expected + 1) for x in merged(all_reduce(groups), inputs))


@pytest.mark.parametrize(
    ("function", "expected"),
    [("add", np.add), ("multiply", np.multiply), ("maximum", np.maximum), ("minimum", np.minimum)],
)
def test_reductions(function: str, expected: np.ufunc) -> None:
    inputs = [rank_programs.values(rank, 8) / 500 for rank in range(4)]
    body = all_reduce("0,2;1,3", 8).replace("stablehlo.add %a", f"stablehlo.{function} %a")
    pairs = [expected(2 * inputs[i], 2 * inputs[i + 2]) + 1 for i in (0, 1)]
    assert np.array_equal(merged(body, inputs), [pairs[0], pairs[1], pairs[0], pairs[1]])


def collective(name: str, attributes: str, types: tuple[int, int], region: str = "") -> str:
    shapes = [f"tensor<{n}xf32>" for n in types]
    return f'%q = "stablehlo.{name}"(%p) {region} {{ {attributes} }} : ({shapes[0]}) -> {shapes[1]}'


GROUPS = "replica_groups = dense<[[0, 2], [3, 1]]> : tensor<2x2xi64>"


def test_all_gather() -> None:
    inputs = [rank_programs.values(rank, 4) for rank in range(4)]
    found = merged(collective("all_gather", f"all_gather_dim = 0 : i64, {GROUPS}", (4, 8)), inputs, 8)
    for rank, members in enumerate(([0, 2], [3, 1], [0, 2], [3, 1])):
        assert np.array_equal(found[rank], np.concatenate([inputs[i] for i in members]))


def test_reduce_scatter() -> None:
    inputs = [rank_programs.values(rank, 4) for rank in range(4)]
    text = collective("reduce_scatter", f"scatter_dimension = 0 : i64, {GROUPS}", (4, 2), rank_programs.ADD)
    found = merged(text, inputs, 2)
    low, high = inputs[0] + inputs[2], inputs[1] + inputs[3]
    assert np.array_equal(found, [low[:2], high[2:], low[2:], high[:2]])


def test_collective_permute() -> None:
    inputs = [rank_programs.values(rank, 4) for rank in range(4)]
    pairs = "source_target_pairs = dense<[[0, 1], [1, 3]]> : tensor<2x2xi64>"
    found = merged(collective("collective_permute", pairs, (4, 4)), inputs)
    assert np.array_equal(found, [np.zeros(4), inputs[0], np.zeros(4), inputs[1]])


@pytest.mark.parametrize("name", ["replica_id", "partition_id"])
def test_a_rank_knows_its_number(name: str) -> None:
    body = f"""
      %n = stablehlo.{name} : tensor<ui32>
      %f = stablehlo.convert %n : (tensor<ui32>) -> tensor<f32>
      %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<4xf32>
      %q = stablehlo.add %p, %b : tensor<4xf32>
    """
    assert np.array_equal(merged(body, [np.zeros(4, np.float32)] * 3), [[0] * 4, [1] * 4, [2] * 4])


def in_a_loop(body: str) -> str:
    """Returns a program that repeats another one while the first element is below 1."""
    for old, new in (("%x", "%y"), ("%p", "%x"), ("%q =", "%z =")):
        body = body.replace(old, new)
    return f"""
      %q = stablehlo.while(%x = %p) : tensor<64xf32> cond {{
        %s = stablehlo.slice %x [0:1] : (tensor<64xf32>) -> tensor<1xf32>
        %e = stablehlo.reshape %s : (tensor<1xf32>) -> tensor<f32>
        %limit = stablehlo.constant dense<1.0> : tensor<f32>
        %less = stablehlo.compare LT, %e, %limit : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %less : tensor<i1>
      }} do {{ {body} stablehlo.return %z : tensor<64xf32> }}
    """


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (in_a_loop(all_reduce(SUM)), "a collective is in what 'while.* calls"),
        (all_reduce(SUM).replace("stablehlo.add %a", "stablehlo.subtract %a"), "reduces with subtract of parameter"),
    ],
)
def test_what_is_not_executed(body: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ranks.merge(hlo_of(body), RANKS)


@pytest.mark.parametrize("groups", [((0, 1), (1, 2, 3)), ((0, 1, 2),), ((0, 1, 3),)])
def test_each_rank_is_in_one_group(groups: tuple[tuple[int, ...], ...]) -> None:
    assert "do not have each of 4 ranks once" in ranks.Collectives(("all-reduce",), (groups,), ()).mistake(4)
    assert not ranks.Collectives(("all-reduce",), (((0, 1), (2, 3)), ()), (((0, 1), (1, 0)),)).mistake(4)
    twice = ranks.Collectives(("collective-permute",), (), (((0, 1), (2, 1)),))
    assert "a rank twice among its sources or targets: {{0,1},{2,1}}" in twice.mistake(4)
