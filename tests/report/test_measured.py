"""Times of kernels that `kernelgen report --measured` reads, by format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.report import measured
from kernelgen.spec.kernel import KernelSpec

VECTOR = TensorDesc.make([4096, 1, 1, 1], "f32")
ADD = KernelSpec.make("add", [VECTOR, VECTOR], VECTOR)
WEIGHTS = TensorDesc.make([4096, 128, 1, 1], "f16")
PRODUCT = KernelSpec.make("mul_mat", [WEIGHTS, VECTOR], TensorDesc.make([128, 1, 1, 1], "f32"))
CASES = (
    ("ADD", "type=f32,ne=[4096,1,1,1],nr=[1,1,1,1],nf=1,perm1=0,src_overlap=0", "3.5"),
    ("ADD", "type=f32,ne=[4096,1,1,1],nr=[1,1,1,1],nf=1,perm1=1,src_overlap=0", "99"),  # another layout
    ("ADD", "type=f32,ne=[4096,1,1,1],nr=[1,512,1,1],nf=1,perm1=0,src_overlap=0", "99"),  # another shape
    ("MUL_MAT", "type_a=f16,type_b=f32,m=128,n=1,k=4096,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1", "7"),
    ("MUL_MAT", "type_a=f16,type_b=f32,m=128,n=1,k=4096,bs=[1,1],nr=[1,1],per=[0,2,1,3],k_v=0,o=1", "99"),
    ("ROPE", "what=ever", "99"),
    ("SUB", "type=f32,ne=[4096,1,1,1],nr=[1,1,1,1],nf=1,perm1=0,src_overlap=0", "0"),  # not supported
)
TABLE = "CREATE TABLE IF NOT EXISTS test_backend_ops (\n  op_name TEXT,\n  op_params TEXT,\n  time_us REAL\n);\n\n"
INSERT = "INSERT INTO test_backend_ops (op_name, op_params, time_us) VALUES "


def read(folder: Path, text: str, name: str = "measured") -> dict[str, float]:
    (folder / name).write_text(text)
    return measured.read(folder / name, [ADD, PRODUCT])


def event(kernel: str, us: float, failed: bool = False) -> dict[str, Any]:
    return {"name": kernel, "ph": "X", "ts": 1.0, "dur": us, "args": {"node": "a", "failed": failed}}


def test_a_table_has_its_times(tmp_path: Path) -> None:
    assert read(tmp_path, "kernel,us\na,10\nb,2.5\n") == {"a": 10, "b": 2.5}


@pytest.mark.parametrize("form", ["sql", "csv"])
def test_cases_of_test_backend_ops_are_those_of_kernels(tmp_path: Path, form: str) -> None:
    if form == "sql":
        text = TABLE + "".join(f"{INSERT}{case};\n" for case in CASES)
    else:
        text = "op_name,op_params,time_us\n" + "".join(f'{op},"{params}",{us}\n' for op, params, us in CASES)
    assert read(tmp_path, text) == {ADD.id: 3.5, PRODUCT.id: 7}


def test_a_profile_has_the_median_of_launches_that_did_not_fail(tmp_path: Path) -> None:
    events = [{"name": "thread_name", "ph": "M", "args": {"name": "NeuronCore 0"}}]
    events += [event("a", us) for us in (90, 10, 12)] + [event("a", 1, failed=True), event("b", 5)]
    assert read(tmp_path, json.dumps(events)) == {"a": 12, "b": 5}


def test_a_profile_of_a_program_that_was_killed_is_read_up_to_its_last_line(tmp_path: Path) -> None:
    lines = ",\n".join(json.dumps(event("a", us)) for us in (10, 12, 14))
    assert read(tmp_path, f"[\n{lines[:-20]}") == {"a": 11}


def test_a_summary_of_neuron_profile_is_of_the_kernel_that_its_file_is_named_after(tmp_path: Path) -> None:
    assert read(tmp_path, '{"n_1": {"total_time": 2.5e-05, "pe_utilization": 1}}', "a.json") == {"a": 25}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name,us\nx,1\n", "expected a table with the columns kernel and us"),
        ("kernel,us\nx,quick\n", "measured:2: us is 'quick'; expected a number above 0"),
        ("kernel,us\nx,-1\n", "expected a number above 0"),
        ("kernel,us\nx,nan\n", "expected a number above 0"),
        ("kernel,us\nx,1e999\n", "expected a number above 0"),
        ("kernel,us\nx\n", "measured:2: expected 2 values"),
        ("us,kernel\n1\n", "measured:2: expected 2 values"),
        (f"kernel,us\n{'x' * 200_000},1\n", "not CSV: field larger than field limit"),
        ("op_name,op_params,supported\n", "run `test-backend-ops perf --output sql` instead"),
        ("op_name,op_params,time_us\nADD,,quick\n", "expected a number above 0"),
        (f"{TABLE}INSERT INTO test_backend_ops SELECT * FROM test_backend_ops;\n", "measured:7: expected a row"),
        (f"{TABLE}{INSERT}('ADD', '1');\n", "measured:7: expected a row"),
        ("CREATE TABLE other (a TEXT);", "measured:1: expected a row"),
        ('[{"name": "a"}]', "expected events of the backend's profile"),
        (json.dumps([event("a", -5)]), "dur of a is -5; expected a number above 0"),
        (json.dumps([event("a", math.nan)]), "dur of a is nan; expected a number above 0"),
        (json.dumps([event("a", 10**400)]), "expected a number above 0"),
        (json.dumps([event("a", 1)]).replace('"a"', "[]"), "expected events of the backend's profile"),
        (f"[{'9' * 5000}]", "limit"),
        ("[1 2]", "expected a profile of the backend"),
        ('{"a": 1}', "with total_time in seconds"),
        ('{"a": {"total_time": 0}}', "expected a number above 0"),
        ("{", "expected what `neuron-profile view"),
    ],
)
def test_what_is_not_times_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(KernelgenError, match=said):
        read(tmp_path, text)
    assert [path.name for path in tmp_path.iterdir()] == ["measured"]
