"""test-backend-ops on the simulated device: a fixed sample of its cases, some of each op."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import backend_ops
import harness
import pytest
from backend_ops import FAILED, PASSED, UNCOMPARED, CaseRow


def test_the_sample_passes_and_has_some_of_every_op(programs: harness.Programs, tmp_path: Path) -> None:
    sample = backend_ops.sample()
    assert len(sample) == len(set(sample)) >= 400
    rows = backend_ops.list_cases(programs, tmp_path)
    ops = {row.op for row in rows}
    assert len(ops) > 100
    assert ops == {backend_ops.op_of(case) for case in sample}
    chosen = frozenset(sample)
    result = backend_ops.run(programs, [row for row in rows if row.case in chosen], tmp_path)
    backend_ops.report(result)
    assert result.of(FAILED) == {}
    assert (result.failures, result.pack.failed) == ([], {})
    assert set(result.of(PASSED)) == chosen
    assert result.ran >= len(sample) * 0.9  # some cases have no elements and run nothing


NKI = ("nki", "jax")
PER_TYPE = {"MUL_MAT": 5, "MUL_MAT_ID": 4, "FLASH_ATTN_EXT": 10}
"""Cases with a kernel in NKI for each op and each type of its weights or keys."""


@pytest.mark.long
@pytest.mark.parametrize("op", PER_TYPE)
def test_cases_of_each_type_pass_with_the_kernels_in_nki(programs: harness.Programs, tmp_path: Path, op: str) -> None:
    """Cases by the type of the weights or keys, spread evenly over the list, the cheapest of each stretch. Uses
    test-backend-ops' own limits and inputs.
    """
    rows = backend_ops.computed_by(backend_ops.list_cases(programs, tmp_path, [op]), "nki", NKI)
    costs: dict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        kind = re.search(r"type_[aK]=(\w+)", row.case)
        assert kind
        costs[kind[1]][row.case] = row.elements
    chosen = {kind: backend_ops.choose(of_kind, PER_TYPE[op]) for kind, of_kind in costs.items()}
    print({kind: len(of_kind) for kind, of_kind in chosen.items()})
    assert {"f32", "f16", "bf16"} <= set(chosen)
    packed = {kind for kind in chosen if kind.startswith("q")}
    quantized = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"}
    assert packed == (set() if op == "FLASH_ATTN_EXT" else quantized)
    cases = {case for of_kind in chosen.values() for case in of_kind}
    result = backend_ops.run(programs, [row for row in rows if row.case in cases], tmp_path, languages=NKI)
    backend_ops.report(result)
    assert result.ok
    passed = set(result.of(PASSED))
    assert passed | set(result.of(UNCOMPARED)) == cases
    assert len(passed) >= 0.8 * len(cases)  # the CPU does not compute quantized weights times F16
    assert result.pack.languages["nki"] >= len(passed) * 0.9


def test_an_absent_device_is_an_error(programs: harness.Programs, tmp_path: Path) -> None:
    environment = programs.environment(kernels=harness.odd_kernel(tmp_path / "odd-kernel"))
    del environment["GGML_BACKEND_PATH"]
    with pytest.raises(RuntimeError, match="had no device NEURON0"):
        backend_ops.run_program(programs, environment, ["RELU"])


# --- the harness reports no failure as a success -----------------------------------------------------------------------------

RELU = '{op: "relu", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
NONSENSE = '{op: "nonsense", inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}'
HEADER = '"backend_name","op_name","op_params","test_mode","supported","error_message","backend_reg_name"'


def node_line(op: str) -> str:
    """Returns a node as the backend's log has it."""
    shape = {"type": "f32", "ne": [4, 1, 1, 1], "nb": [4, 16, 16, 16]}
    tensors = [{"name": name, "op": op, **shape} for name, op in (("x", "none"), ("y", op))]
    tensors[1]["src"] = [0]
    return f"ggml-neuron: no kernel for {json.dumps({'sizes': {}, 'context': {}, 'tensors': tensors})}\n"


def row(case: str, *nodes: tuple[str, str | None]) -> CaseRow:
    return CaseRow(case, "NEURON0", False, "not supported", nodes=nodes)


def test_what_stands_before_a_row_is_of_the_row() -> None:
    failed, unsupported, uncompared = backend_ops.read_rows(
        f"{HEADER}\nload_backend: loaded\n"
        '[ADD] ERR = 0.5 > 0.1 "NEURON0","ADD","ne=[1,2]","test","1","test failed",""\n'
        f"{node_line('relu')}{node_line('nonsense')}{node_line('relu')}"
        '"NEURON0, NEURON0","A","x=1","test","0","not supported",""\n'
        '"CPU","B","x=1","test","0","not supported",""\n'
    )
    assert (failed.case, failed.status, failed.note) == ("ADD(ne=[1,2])", FAILED, "[ADD] ERR = 0.5 > 0.1")
    assert (unsupported.status, uncompared.status, uncompared.nodes) == (backend_ops.UNSUPPORTED, UNCOMPARED, ())
    assert unsupported.nodes == ((RELU, None), (NONSENSE, "nonsense: no emitter for this op"))


FAKE = """#!/usr/bin/env python3
import os, sys
print({header!r})
for case in "121":
    print('"NEURON0","A","' + case + '","test","1","",""')
sys.stdout.flush()
os.abort()
"""


def test_cases_after_one_that_ends_the_program_fail(tmp_path: Path) -> None:
    program = tmp_path / "test-backend-ops"
    program.write_text(FAKE.format(header=HEADER))
    program.chmod(0o755)
    programs = harness.Programs(tmp_path, tmp_path, tmp_path, tmp_path)
    result = backend_ops.run_group(programs, [row(f"A({n})") for n in (1, 2, 1, 3, 4)], tmp_path / "work")
    statuses = Counter((case, status) for case, status, _ in result.results)
    assert statuses == {("A(1)", PASSED): 2, ("A(2)", PASSED): 1, ("A(3)", FAILED): 1, ("A(4)", FAILED): 1}
    assert "exit status -6, at A(3)" in result.failures[0]
