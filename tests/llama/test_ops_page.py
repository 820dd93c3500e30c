"""docs/results/ops.md and ops-cases.md are the output of their command for a run's CSV files."""

from __future__ import annotations

from pathlib import Path

import backend_ops
import cases
import ops_page
import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "results"

SUPPORT = """\
"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name"
"NEURON0","ADD","a=1","support","1","yes","NEURON"
"NEURON0","MUL","a=1","support","0","no","NEURON"
"NEURON0","MUL","a=2","support","1","yes","NEURON"
"""
RESULTS = """\
"op","params","status","seconds","reason"
"ADD","a=1","passed","0.1",""
"MUL","a=1","unsupported","0","MUL: no emitter for these types"
"MUL","a=2","uncompared","0",""
"MUL_ADD","a=1","failed","0.1","ERR = 1"
"MUL_ADD","a=2","unsupported","0","x | y"
"MUL_ADD","a=3","unsupported","0","x | y"
"""
KERNELS = '"kernel","hlo_bytes"\n"add-1-f32-0","100"\n"add-2-f32-0","300"\n"mul-1-f32-0","7"\n'


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, ops_page.Table]:
    for name, text in (("support", SUPPORT), ("results", RESULTS), ("kernels", KERNELS)):
        (tmp_path / f"{name}.csv").write_text(text)
    others = tmp_path / "others"
    others.mkdir()
    text = SUPPORT.replace("NEURON0", "CPU").replace('"NEURON"', '"CPU"').replace("MUL", "SUB")
    (others / "CPU.csv").write_text(text)
    summaries = ops_page.summarize(tmp_path) | {"backends": ops_page.summarize_others(others)}
    return {name: ops_page.read(text) for name, text in summaries.items()}


def test_the_pages_are_what_the_command_makes_of_the_summaries() -> None:
    for name, text in ops_page.pages(ops_page.load(FOLDER / "ops")).items():
        assert (FOLDER / name).read_text() == text


def test_the_summaries_add_up() -> None:
    tables = ops_page.load(FOLDER / "ops")
    left_out: dict[str, int] = {}
    for row in tables["left-out"]:
        left_out[row["op"]] = left_out.get(row["op"], 0) + int(row["cases"])
    for row in tables["neuron"]:
        tested = int(row["tested_supported"])
        assert int(row["tested_cases"]) - tested == left_out.get(row["op"], 0), row
        assert int(row["uncompared"]) + int(row["passed"]) + int(row["failed"]) == tested, row
        assert int(row["supported"]) <= int(row["cases"]) <= int(row["tested_cases"]), row


def test_ops_are_counted(tables: dict[str, ops_page.Table]) -> None:
    assert [list(row.values()) for row in tables["neuron"]] == [
        ["ADD", "1", "1", "1", "1", "0", "1", "0"],
        ["MUL", "2", "1", "2", "1", "1", "0", "0"],
        ["MUL_ADD", "0", "0", "3", "1", "0", "0", "1"],
    ]
    assert tables["hlo"][0] == {"op": "add", "kernels": "2", "median_bytes": "200", "largest_bytes": "300"}


def test_the_page_has_every_op_beside_the_other_backends(tables: dict[str, ops_page.Table]) -> None:
    page = ops_page.page(tables)
    assert "| ADD | ✅ | ✅ |" in page
    assert "| MUL | 🟡 | ❌ |" in page
    assert "| SUB | – | 🟡 |" in page
    assert "| MUL_ADD | ✅" not in page and "| MUL_ADD | 🟡" not in page
    counted = ops_page.cases_page(tables)
    assert "| MUL_ADD | 3 | 1 | 0 | 0 | 1 |" in counted
    assert "| MUL_ADD | 2 | x \\| y |" in counted
    assert (
        "supports 2 of 3 cases of this mode, and 3 of 6 of" in page and "1 passed, 1 failed, and 1 did not run" in page
    )


def test_what_a_run_leaves_can_be_summarized(tmp_path: Path) -> None:
    summary = backend_ops.Summary(cases.TestResults([cases.Result('A(x="1,2")', cases.PASSED, 0.5)]))
    backend_ops.write_results(tmp_path, summary, [cases.CaseRow('A(x="1,2")', "NEURON0", True, "")])
    (row,) = ops_page.read(ops_page.summarize(tmp_path)["neuron"])
    assert list(row.values()) == ["A", "1", "1", "1", "1", "0", "1", "0"]
