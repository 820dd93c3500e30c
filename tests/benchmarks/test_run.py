"""The command that runs benchmarks: its files and its exit status. The benchmarks here are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jsonschema
import pytest

import machine
import run
from figures import UNITS, Figure, Limit, Peer

SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "benchmarks/results.schema.json").read_text())


def benchmark(folder: Path, name: str, program: str) -> run.Benchmark:
    """Returns a benchmark that is a program; sys.argv[1] has the path of its JSON as `--json=…`."""
    script = folder / f"{name}.py"
    script.write_text(f"import json, sys\npath = sys.argv[1].removeprefix('--json=')\n{program}\n")
    return run.Benchmark(name, (sys.executable, str(script)))


def program(*found: Figure, status: int = 0) -> str:
    text = json.dumps({"figures": [f.to_json() for f in found]})
    return f"open(path, 'w').write({text!r})\nsys.exit({status})"


GOOD = Figure("good", 1, "s", 10, Peer("worse", 4), "peer / value", Limit("ratio", at_least=3))
BAD = Figure("bad", 9, "s", limit=Limit("value", at_most=2))


@pytest.mark.parametrize(
    ("programs", "statuses", "status"),
    [
        ([program(GOOD)], ["met"], 0),
        ([program(BAD, GOOD, status=1), program(GOOD)], ["missed", "met"], 1),
        (["sys.exit('broken')", program(GOOD)], ["failed", "met"], 1),
        (["open(path, 'w').write('no json')"], ["failed"], 1),
        # A status that does not agree with the figures is neither a success nor a miss.
        ([program(GOOD, status=1)], ["failed"], 1),
        ([program(BAD, status=0)], ["failed"], 1),
    ],
)
def test_results_and_exit_status(tmp_path: Path, programs: list[str], statuses: list[str], status: int) -> None:
    benchmarks = {f"b{n}": benchmark(tmp_path, f"b{n}", text) for n, text in enumerate(programs)}
    out = tmp_path / "out"
    assert run.collect(list(benchmarks), out, quick=True, benchmarks=benchmarks) == status
    results = json.loads((out / "results.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(results)
    assert [b["status"] for b in results["benchmarks"]] == statuses
    assert [bool(b["failure"]) for b in results["benchmarks"]] == [s == "failed" for s in statuses]


def test_quick_is_passed_on(tmp_path: Path) -> None:
    made = benchmark(tmp_path, "b", "assert ('--quick' in sys.argv) is True\n" + program(GOOD))
    assert run.run(made, quick=True).status == "met"
    assert run.run(made, quick=False).status == "failed"


def test_the_table_has_every_figure_and_marks_misses() -> None:
    outcomes = {"one": run.Outcome(1.0, [GOOD, BAD]), "two": run.Outcome(1.0, [], "exit status 3")}
    lines = run.table(outcomes).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == "one good 10 1 s worse: 4 s 4 ratio ≥ 3".split()
    assert lines[2].split()[-1] == "MISSED"
    assert lines[3].split() == "two FAILED: exit status 3".split()


def test_the_schema_is_one_and_refuses_what_is_not_a_result() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    results = json.loads(run.to_json({"one": run.Outcome(1.0, [GOOD])}, machine.describe(), False))
    validator = jsonschema.Draft202012Validator(SCHEMA)
    assert validator.is_valid(results)
    for spoil in (
        lambda r: r.pop("machine"),
        lambda r: r["machine"].pop("commit"),
        lambda r: r["benchmarks"][0]["figures"][0].pop("unit"),
        lambda r: r["benchmarks"][0]["figures"][0].update(value="1"),
        lambda r: r["benchmarks"][0]["figures"][0].update(unit="parsecs"),
        lambda r: r["benchmarks"][0].update(status="fine"),
    ):
        spoiled = json.loads(json.dumps(results))
        spoil(spoiled)
        assert not validator.is_valid(spoiled)


def test_the_schema_has_the_units_of_figures_and_no_others() -> None:
    units = SCHEMA["$defs"]["figure"]["properties"]["unit"]["enum"]
    assert units == list(UNITS)
    with pytest.raises(ValueError, match="a walk: 'parsecs' is not a unit"):
        Figure("a walk", 1.0, "parsecs")


def test_the_machine_is_described_and_not_named() -> None:
    described = machine.describe()
    assert described["cores"] >= described["cores_usable"] >= 1
    assert described["memory_mb"] > 100
    assert len(described["load"]) == 3
    assert described["versions"]["python"]
    assert str(Path.home()) not in json.dumps(described)


@pytest.mark.parametrize("name", run.BENCHMARKS)
def test_every_benchmark_of_the_command_is_there(name: str) -> None:
    command = run.BENCHMARKS[name].command
    if command[0] == sys.executable:
        assert Path(command[-1]).is_file()
    else:
        folder, _, target = next(w for w in command if w.startswith("//benchmarks")).removeprefix("//").partition(":")
        assert f'"{target or name}"' in (run.HERE.parent / folder / "BUILD.bazel").read_text()
