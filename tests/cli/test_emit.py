"""`kernelgen emit` writes HLO for kernels of manifests and for kernels given on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Done

Run = Callable[..., Done]

RELU = {"op": "relu", "inputs": ["(8,4,1,1)/f32"], "output": "(8,4,1,1)/f32", "params": {}, "alias": None}


def test_a_manifest(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    done = kernelgen("emit", basic, "-o", tmp_path, "--only", "[ar]*")
    assert done.code == 0, done.err
    paths = [Path(line) for line in done.out.splitlines()]
    assert [p.name.split("-")[0] for p in paths] == ["add", "relu", "reshape"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(p.name.endswith(".hlo.pb") and p.stat().st_size for p in paths)


def test_a_spec_as_plan_prints_it(kernelgen: Run, basic: Path, tmp_path: Path) -> None:
    plan = json.loads(kernelgen("plan", basic, "--format", "json").out)
    entry = next(k for k in plan["kernels"] if k["spec"]["op"] == "relu")
    one = kernelgen("emit", "--spec", json.dumps(entry), "-o", tmp_path / "one")
    two = kernelgen("emit", "--spec", json.dumps(entry["spec"]), "-o", tmp_path / "two")
    three = kernelgen("emit", basic, "--only", entry["id"], "-o", tmp_path / "three")
    assert (one.code, two.code, three.code) == (0, 0, 0)
    (a,), (b,), (c,) = ((tmp_path / n).iterdir() for n in ("one", "two", "three"))
    assert a.name == b.name == c.name == f"{entry['id']}.hlo.pb"
    assert a.read_bytes() == b.read_bytes() == c.read_bytes()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{", "--spec: not a kernel"),
        ("[]", "--spec: not a kernel"),
        ("3", "--spec: not a kernel"),
        ("{}", "'op' is missing"),
        (json.dumps({**RELU, "inputs": ["(8,4)/f32"]}), "expected (ne0,ne1,ne2,ne3)/dtype"),
        (json.dumps({**RELU, "output": "(8,4,1,1)/f33"}), "unknown dtype 'f33'"),
        (json.dumps({**RELU, "op": "rleu"}), "no emitter computes op 'rleu': did you mean 'relu'?"),
        (json.dumps({**RELU, "params": []}), "--spec: not a kernel"),
        (json.dumps({**RELU, "inputs": [5]}), "--spec: not a kernel"),
        (json.dumps({**RELU, "op": "scale", "params": {"s": 1e39}}), "--spec: not a kernel"),
    ],
)
def test_texts_that_are_not_specs(kernelgen: Run, tmp_path: Path, spec: str, message: str) -> None:
    done = kernelgen("emit", "--spec", spec, "-o", tmp_path / "out")
    assert done.code in (1, 2) and done.out == ""
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_the_others_are_written_when_one_fails(kernelgen: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.py").write_text(
        "from kernelgen.emitters import emitter\n\n@emitter('relu')\ndef relu(x):\n    raise ValueError('broken')\n"
    )
    silu = json.dumps({**RELU, "op": "silu"})
    arguments = ["--spec", json.dumps(RELU), "--spec", silu, "--kernels", tmp_path / "mine", "-o", tmp_path / "out"]
    done = kernelgen("emit", *arguments)
    assert done.code == 1
    assert "broken" in done.err and "mine/own.py" in done.err
    assert [p.name.split("-")[0] for p in (tmp_path / "out").iterdir()] == ["silu"]
