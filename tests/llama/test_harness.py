"""How the harness reads the programs' output: it reports no failure as a success."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import backend_ops
import case_runner
import cases
import harness
import kernel_builder
import program_cases
import program_results
import pytest
import whole_programs

HEADER = '"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name"'
RELU = '{op: "relu", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
NONSENSE = '{op: "nonsense", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'


def node_line(op: str) -> str:
    """Returns a node as the backend's log has it."""
    shape = {"type": "f32", "ne": [4, 1, 1, 1], "nb": [4, 16, 16, 16]}
    tensors = [{"name": name, "op": op, **shape} for name, op in (("x", "none"), ("y", op))]
    tensors[1]["src"] = [0]
    return json.dumps({"sizes": {}, "context": {}, "tensors": tensors})


def read(*lines: str) -> list[cases.CaseRow]:
    reader = cases.Reader()
    for line in (HEADER, *lines):
        reader.line(line + "\n")
    return reader.rows


def row(case: str, **kwargs: object) -> cases.CaseRow:
    return cases.CaseRow(case, "NEURON0", False, "not supported", **kwargs)


def test_what_stands_before_a_row_is_its_note() -> None:
    (found,) = read(
        "load_backend: loaded",
        '[ADD] ERR = 0.5 > 0.1 "NEURON0","ADD","ne=[1,2]","test","1","test failed",""',
    )
    assert (found.case, found.status, found.note) == ("ADD(ne=[1,2])", cases.FAILED, "[ADD] ERR = 0.5 > 0.1")


def test_a_cases_settings_are_printed_before_its_row() -> None:
    first, second = read(
        *(f"ggml-neuron: no kernel for {node_line(op)}" for op in ("relu", "nonsense", "relu")),
        '"NEURON0, NEURON0","A","x=1","test","0","not supported",""',
        '"CPU","B","x=1","test","0","not supported",""',
    )
    assert first.nodes == ((RELU, None), (NONSENSE, "nonsense: no emitter for this op"))
    assert (first.status, second.status, second.nodes) == (cases.UNSUPPORTED, cases.UNCOMPARED, ())


@pytest.mark.parametrize(
    "text, expected",
    [
        ("ADD,MUL_MAT", ["ADD", "MUL_MAT"]),
        ("ADD(ne=[1,2],nr=[3,4]),SQR", ["ADD(ne=[1,2],nr=[3,4])", "SQR"]),
    ],
)
def test_commas_between_parentheses_are_the_cases_own(text: str, expected: list[str]) -> None:
    assert cases.split_cases(text) == expected


def test_groups_hold_every_case_as_often_as_the_program_has_it() -> None:
    rows = [row(f"BIG(n={n % 450})") for n in range(500)]
    rows += [row(f"SMALL{op}(n={n})") for op in range(5) for n in range(60)]
    rows += [row(f"LONG(n={n},{'x' * 3000})") for n in range(100)]
    groups = cases.group(rows)
    assert sum((Counter(group.cases) for group in groups), Counter()) == Counter(r.case for r in rows)
    assert all(sum(len(case) + 1 for case in group.cases) <= cases.MOST_BYTES for group in groups)
    assert all(len(group.cases) <= cases.MOST_CASES for group in groups)
    assert len({group.name for group in groups}) == len(groups)
    assert groups == cases.group(rows)
    for group in groups:
        assert cases.Group.from_json(json.loads(json.dumps(group.to_json()))) == group


def test_a_group_knows_what_each_case_asks_for() -> None:
    (group,) = cases.group([row("A(1)", nodes=((RELU, None),)), row("B(1)", nodes=((NONSENSE, "why"), (RELU, None)))])
    assert group.nodes == [(RELU, None), (NONSENSE, "why")]
    assert group.asks == {"A(1)": [0], "B(1)": [1, 0]}


def test_ops_that_ran_are_counted_over_all_processes() -> None:
    log = "ggml-neuron: 3 ops ran on NeuronCores: 1 ADD, 2 MUL_MAT\nggml-neuron: 0 ops ran on the CPU instead of a NeuronCore\n"
    assert harness.ran(log + log) == {"device": Counter(ADD=2, MUL_MAT=4), "cpu": Counter()}
    lost = "ggml-neuron: 1 ops ran on the CPU instead of a NeuronCore: 1 CPY\n"
    assert harness.ran(lost)["cpu"] == Counter(CPY=1)


def test_an_outcome_without_a_passed_case_is_a_failure() -> None:
    passed, failed = cases.Result("A(1)", cases.PASSED), cases.Result("A(2)", cases.FAILED)
    unsupported = cases.Result("A(3)", cases.UNSUPPORTED)
    assert not cases.TestResults().ok
    assert not cases.TestResults([unsupported]).ok
    assert not cases.TestResults([passed, failed]).ok
    assert not cases.TestResults([passed], failures=["the backend ran ops on the CPU"]).ok
    assert cases.TestResults([passed, unsupported]).ok


def test_the_sample_has_some_of_every_op_and_the_cheap_ones() -> None:
    costs = {f"BIG({n})": 5_000_000 if n % 2 else 100 + n % 7 for n in range(5000)}
    costs |= {f"SMALL{op}({n})": 9 for op in range(10) for n in range(12)}
    costs["DEAR(1)"] = 99_000_000
    chosen = backend_ops.choose(costs, 200)
    ops = Counter(cases.op_of(case) for case in chosen)
    assert set(ops) == {"BIG", "DEAR", *(f"SMALL{op}" for op in range(10))}
    assert ops["BIG"] > ops["SMALL0"] >= 2
    assert len(set(chosen)) == len(chosen) >= 190
    numbers = [int(case[4:-1]) for case in chosen if case.startswith("BIG")]
    assert all(n % 14 == 0 for n in numbers)
    assert numbers == sorted(numbers) and numbers[0] < 200 and numbers[-1] > 4800


def test_a_case_costs_what_its_tensors_hold() -> None:
    node = '{op: "add", inputs: ["(4,2,1,1)/f32", "(4,1,1,1)/f16/(2,64,64,64)"], output: "(4,2,1,1)/f32"}'
    assert row("ADD(1)", nodes=((node, None), (node, "why"))).elements == 2 * (8 + 4 + 8)


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = cases.group([row("A(1)"), row("A(2)")])
    show = backend_ops.Show(2, 1, terminal=False)
    show.stage(group, "running", 1)
    outcome = cases.TestResults([cases.Result("A(1)", cases.PASSED), cases.Result("A(2)", cases.UNSUPPORTED)])
    show.done(group, case_runner.GroupResult(kernel_builder.BuiltGroup(sizes={"a": 1}), outcome, 3.0))
    show.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("1/1 A-1: 1 of 2 cases supported, 1 passed, 0 failed; 1 kernels, 3 s")
    assert "\x1b" not in line


def test_progress_is_a_line_that_changes_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    first, second = cases.group([row(f"{op}({n})") for op in "AB" for n in range(150)])
    show = backend_ops.Show(300, 2, terminal=True)
    show.stage(first, "running", 17)
    passed = cases.TestResults([cases.Result(case, cases.PASSED) for case in first.cases])
    show.done(first, case_runner.GroupResult(kernel_builder.BuiltGroup(), passed, 3.0))
    show.stage(second, "building", 3)
    failed = cases.TestResults([cases.Result(case, cases.FAILED) for case in second.cases])
    show.done(second, case_runner.GroupResult(kernel_builder.BuiltGroup(), failed, 3.0))
    show.close()
    shown = capsys.readouterr().err
    states = [part for part in shown.split("\r\x1b[K") if part]
    assert states[0].startswith("0 of 300 cases: 0 passed, 0 failed; A-1 running 17")
    assert states[1].startswith("150 of 300 cases: 150 passed")
    assert sum("\n" in part for part in states) == 1, "only the group with a failed case has a line that stays"
    assert all(len(part) < 60 for part in states if "\n" not in part)
    assert shown.endswith("\r\x1b[K")


# --- a program that behaves as test-backend-ops does -----------------------------------------------------------------------

FAKE = """#!/usr/bin/env python3
import fcntl, os, sys, time
asked = sys.argv[sys.argv.index("-o") + 1] if "-o" in sys.argv else None
print({header!r})
for case in {cases!r}:
    op = case.partition("(")[0]
    if asked and case not in asked and op not in asked.split(","):
        continue
    if os.path.exists({crash!r}) and case == open({crash!r}).read():
        sys.stdout.flush()
        os.abort()
    if "hang" in os.environ.get("GGML_NEURON_KERNEL_DIR", "") and op == "B" and asked:
        sys.stdout.flush()
        lock = open(os.path.dirname(__file__) + "/lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        time.sleep(600)
    print('"NEURON0","' + op + '","' + case[len(op) + 1:-1] + '","test","1","",""')
"""


def fake_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: list[str]) -> harness.Programs:
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "test-backend-ops").write_text(FAKE.format(header=HEADER, cases=listed, crash=str(folder / "crash")))
    (folder / "test-backend-ops").chmod(0o755)
    for name, variable in (
        ("plugin", "GGML_NEURON_PLUGIN"),
        ("libnrt", "GGML_NEURON_LIBNRT"),
        ("load", "LLAMA_LOAD_BACKENDS"),
    ):
        (folder / name).touch()
        monkeypatch.setenv(variable, str(folder / name))
    monkeypatch.setenv("LLAMA_CPP_PROGRAMS", str(folder))
    return harness.Programs.find()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> harness.Programs:
    """Returns programs whose test-backend-ops passes A(1), A(2), A(3) and A(2) again, and aborts at the case that the
    file `crash` names.
    """
    return fake_programs(tmp_path, monkeypatch, ["A(1)", "A(2)", "A(3)", "A(2)"])


def test_a_result_is_taken_again_only_when_nothing_it_depends_on_changed(
    fake: harness.Programs, tmp_path: Path
) -> None:
    def again() -> bool:
        summary = backend_ops.run(fake, tmp_path / "work", jobs=1, terminal=False)
        assert summary.ok and len(summary.outcome.results) == 4
        return all(done.reused for done in summary.groups.values())

    assert not again()
    assert again()
    for part in (fake.plugin, fake.libnrt):
        part.write_text("other")
        assert not again()
        assert again()
    text = (fake.llama_cpp / "test-backend-ops").read_text()
    (fake.llama_cpp / "test-backend-ops").write_text(text + "# other\n")
    assert not again()
    (tmp_path / "work" / "A-1" / "result.json").write_text("{")
    assert not again()
    assert again()


def test_parts_of_a_run_are_together_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = fake_programs(tmp_path, monkeypatch, [f"{op}({n})" for op in "AB" for n in range(150)])
    groups = []
    for shard in ((1, 2), (2, 2), (1, 1)):
        summary = backend_ops.run(programs, tmp_path / "work", shard=shard, jobs=1, terminal=False)
        assert summary.ok and len(summary.outcome.results) == len(summary.costs)
        groups.append({name: done.reused for name, done in summary.groups.items()})
    assert groups == [{"A-1": False}, {"B-1": False}, {"A-1": True, "B-1": True}]


def test_cases_are_chosen_by_the_language_that_computes_them() -> None:
    norm = '{op: "rms_norm", inputs: ["(64,8,1,1)/f32"], output: "(64,8,1,1)/f32", params: {eps: 1e-5}}'
    rows = [
        row("RELU(1)", nodes=((RELU, None),)),
        row("RMS_NORM(1)", nodes=((norm, None),)),
        row("NONSENSE(1)", nodes=((NONSENSE, "no emitter for this op"),)),
    ]
    chosen = {name: backend_ops.computed_by(rows, name, ["nki", "jax"]) for name in ("nki", "jax")}
    assert chosen == {"nki": [rows[1]], "jax": [rows[0]]}


def test_a_case_that_ends_the_program_fails_and_the_others_go_on(fake: harness.Programs, tmp_path: Path) -> None:
    group = cases.group(cases.listing(fake, tmp_path / "empty"))[0]
    (fake.llama_cpp / "crash").write_text("A(3)")
    worker = case_runner.CaseRunner(fake, tmp_path / "work", 1)
    outcome = worker.run(group, tmp_path / "empty", lambda stage, count: None)
    became = Counter((result.case, result.status) for result in outcome.results)
    assert became[("A(1)", cases.PASSED)] == 1
    assert became[("A(3)", cases.FAILED)] == 1
    assert sum(became.values()) == 4
    assert not outcome.ok


def test_a_run_that_is_killed_leaves_no_process_and_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = fake_programs(tmp_path, monkeypatch, [f"{op}({n})" for op in "AB" for n in range(150)])
    work = tmp_path / "hang"
    command = [sys.executable, backend_ops.__file__, "--work", work, "-j", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        wait_for((work / "whole" / "B-1" / "lock").exists)
        # The worker locks its group's folder, and the program that it runs locks another file.
        locks = [work / "whole" / "B-1" / "lock", programs.llama_cpp / "lock"]
        wait_for(lambda: all(held(lock) for lock in locks))
        process.kill()
    wait_for(lambda: not any(held(lock) for lock in locks))
    (work / "whole").rename(tmp_path / "whole")
    summary = backend_ops.run(programs, tmp_path / "whole", jobs=1, terminal=False)
    assert summary.ok and len(summary.outcome.results) == 300
    assert {name: done.reused for name, done in summary.groups.items()} == {"A-1": True, "B-1": False}


def held(lock: Path) -> bool:
    """Whether a running process has locked a file."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_no_emitter_takes_is_left_out_with_the_reason(tmp_path: Path) -> None:
    copy = '{op: "cpy", inputs: ["(32,1,1,1)/f32", "(32,1,1,1)/iq1_s"], output: "(32,1,1,1)/iq1_s"}'
    builder = kernel_builder.KernelBuilder()
    built, pack = builder.build([RELU, NONSENSE, copy], tmp_path, lambda stage, count: None)
    assert len(built.sizes) == 1 and not built.failed and pack
    assert set(built.refused) == {NONSENSE, copy}
    assert "unknown op 'nonsense'" in built.refused[NONSENSE]
    assert "iq1_s" in built.refused[copy]
    again, same = builder.build([RELU, NONSENSE, copy], tmp_path, lambda stage, count: None)
    assert again.reused and same == pack
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    mended, same = builder.build([RELU, NONSENSE, copy], tmp_path, lambda stage, count: None)
    assert not mended.reused and same == pack


def test_kernels_are_those_that_kernelgen_builds(neuron_target: str, tmp_path: Path) -> None:
    """Without the compile whose result is discarded, the NEFF's bytes are the same."""
    recorded = tmp_path / "group.yaml"
    recorded.write_text(f"format: 1\nname: group\ntargets: [{neuron_target}]\nkernels:\n  - {RELU}\n")
    harness.build(recorded, tmp_path / "out", say=lambda text: None)
    kernel_builder.KernelBuilder().build([RELU], tmp_path / "quick", lambda stage, count: None)
    name = f"group_{neuron_target}.kernels.gguf"
    assert (tmp_path / "quick" / "kernels" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_entries_that_no_emitter_takes_are_left_out_and_counted(neuron_target: str, tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(
        f"format: 1\nname: recorded\ntargets: [{neuron_target}]\nkernels:\n"
        f"  - {RELU}  # asked for 1 time\n"
        f"  - {NONSENSE}  # asked for 2 times\n"
    )
    built = harness.build(recorded, tmp_path / "out", say=lambda text: None)
    assert (built.kernels, built.compiled, built.failed) == (1, 1, {})
    assert sorted(built.refused.values()) == [1]
    again = harness.build(recorded, tmp_path / "out", say=lambda text: None)
    assert (again.kernels, again.compiled) == (1, 0)


# --- llama.cpp's programs with groups and without ------------------------------------------------------------------------------

CALLBACK = """\
common_debug_cb_eval:                   norm-0 = (f32)   RMS_NORM(embd{4, 1, 1, 1}, }) = {4, 1, 1, 1}
    [
        [
            [      0.7869,      -0.8546,    ...,      -inf,       1.0000  ],
        ],
    ]
    sum = 0.932300
common_debug_cb_eval:                    y-0 = (f32)        MUL(norm-0{4, 1, 1, 1}, w{4, 1, 1, 1}}) = {4, 1, 1, 1}
    [
        [
            [      2.0000,      3.0000  ],
        ],
    ]
    sum = 5.000000
"""


def test_results_of_programs_are_distinguished() -> None:
    read = program_results.tensors
    assert list(read(CALLBACK)) == ["0 norm-0 RMS_NORM", "1 y-0 MUL"]
    for changed, size in (
        ("2.0000", 0.0),
        ("2.0001", 0.0),  # the last decimal in the output
        ("2.1000", pytest.approx(0.01 / 13, rel=1e-3)),
        ("nan", float("inf")),
    ):
        assert program_results.compare(read(CALLBACK.replace("2.0000", changed)), read(CALLBACK)).size == size
    assert program_results.compare(read(CALLBACK.replace("y-0", "z-0")), read(CALLBACK)).size == float("inf")
    assert program_results.perplexities("[1]585.2146,[2]597.5405,") == {"chunk 1": 585.2146, "chunk 2": 597.5405}
    texts = program_results.texts(program_cases._TEXT)
    assert texts("abc\nllama_completion: saving final output to session file '/x'\n") == {"text 0": "abc"}
    answer = program_results.texts(program_cases._ANSWER)
    assert answer("  /exit\n\n\n> abcdef\nOne\ntwo\n\n\nExiting...\n") == {"text 0": "One\ntwo"}
    assert answer("> abcdef\nOne\n\n[ Prompt: 1.0 t/s | Generation: 2.0 t/s ]\n\n\nExiting...\n") == {"text 0": "One"}
    assert program_results.answers_of_pictures("\nOne\n\n\ntwo\n") == {"text 0": "One", "text 1": "two"}
    assert not program_results.answers_of_pictures("One\nOne\n"), "no picture was seen"


def test_a_row_says_what_is_wrong() -> None:
    (case,) = (case for case in program_cases.CASES if case.name == "completion")
    good = whole_programs.Run({"text 0": "abc"}, grouped=90, launches=6, device=93)
    plain = whole_programs.Run({"text 0": "abc"}, device=90)
    row, wrong = whole_programs.check("llama", case, {"groups": good, "nodes": plain, "cpu": plain})
    assert wrong == [] and "| equal | equal | equal | 90 | 6 | 93 | 0 |" in row
    other, none, broken = (
        whole_programs.Run({"text 0": "abd"}),
        whole_programs.Run({"text 0": "abc"}),
        whole_programs.Run(failure="status -6"),
    )
    elsewhere = dataclasses.replace(good, cpu=Counter(SET_ROWS=20))
    for ways, said in (
        ({"groups": good, "nodes": plain, "cpu": other}, "inf at text 0, more than"),
        ({"groups": none, "nodes": plain, "cpu": plain}, "no group ran"),
        ({"groups": good, "nodes": good, "cpu": plain}, "groups ran with GGML_NEURON_FUSION=0"),
        ({"groups": broken, "nodes": plain, "cpu": plain}, "groups: status -6"),
        ({"groups": elsewhere, "nodes": plain, "cpu": plain}, "the CPU computed 20 SET_ROWS"),
    ):
        _, wrong = whole_programs.check("llama", case, ways)
        assert wrong and all(line.startswith("llama completion: ") for line in wrong) and said in " ".join(wrong)
