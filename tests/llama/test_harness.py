"""What the harness reads out of the programs' output: nothing that went wrong may be taken for a success."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import harness
import pytest

HEADER = '"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name"'


def test_what_stands_before_a_row_is_its_note() -> None:
    output = f'{HEADER}\nload_backend: loaded\n[ADD] ERR = 0.5 > 0.1 "NEURON0","ADD","ne=[1,2]","test","1","test failed",""\n'
    (row,) = harness.rows(output)
    assert row["note"] == "[ADD] ERR = 0.5 > 0.1"
    assert (row["op_name"], row["op_params"], row["error_message"]) == ("ADD", "ne=[1,2]", "test failed")


@pytest.mark.parametrize(
    "text, cases",
    [
        ("ADD,MUL_MAT", ["ADD", "MUL_MAT"]),
        ("ADD(ne=[1,2],nr=[3,4]),SQR", ["ADD(ne=[1,2],nr=[3,4])", "SQR"]),
    ],
)
def test_commas_between_parentheses_are_the_cases_own(text: str, cases: list[str]) -> None:
    assert harness.split_cases(text) == cases


def test_ops_that_ran_are_counted_over_all_processes() -> None:
    log = "ggml-neuron: 3 ops ran on NeuronCores: 1 ADD, 2 MUL_MAT\nggml-neuron: 0 ops ran on the CPU for want of a kernel\n"
    assert harness.ran(log + log) == {"device": Counter(ADD=2, MUL_MAT=4), "cpu": Counter()}
    lost = "ggml-neuron: 1 ops ran on the CPU for want of a kernel: 1 CPY\n"
    assert harness.ran(lost)["cpu"] == Counter(CPY=1)


def test_an_outcome_without_a_passed_case_is_no_success() -> None:
    assert not harness.Outcome().ok
    assert not harness.Outcome(passed=["a"], failures=[("b", "ERR")]).ok
    assert harness.Outcome(passed=["a"]).ok


def test_entries_that_no_emitter_takes_are_left_out_and_counted(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.yaml"
    recorded.write_text(
        "format: 1\nname: recorded\ntargets: [trn1]\nkernels:\n"
        '  - {op: "relu", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}  # asked for 1 time\n'
        '  - {op: "nonsense", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}  # asked for 2 times\n'
        '  - {op: "cpy", inputs: ["(32,1,1,1)/f32", "(32,1,1,1)/q4_1"], output: "(32,1,1,1)/q4_1"}  # asked for 1 time\n'
    )
    built = harness.build(recorded, tmp_path / "out", say=lambda text: None)
    assert (built.kernels, built.compiled, built.failed) == (1, 1, {})
    assert sorted(built.refused.values()) == [1, 1]
    assert any("nothing quantizes to q4_1" in reason for reason in built.refused)
    again = harness.build(recorded, tmp_path / "out", say=lambda text: None)
    assert (again.kernels, again.compiled) == (1, 0)
