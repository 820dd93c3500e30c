"""`kernelgen list` shows the names that a manifest can use."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from kernelgen.cli.list import architectures
from kernelgen.ggml.ops import OPS
from kernelgen.ggml.types import TYPES
from kernelgen.targets import TARGETS

from .conftest import Done

Run = Callable[..., Done]


def test_everything_by_default(kernelgen: Run) -> None:
    done = kernelgen("list")
    assert done.code == 0
    ops, targets, dtypes = done.out.split("\n\n")
    assert {line.split()[0] for line in ops.splitlines()[1:]} == set(OPS)
    assert [line.split()[0] for line in targets.splitlines()[1:]] == list(TARGETS)
    assert [line.split()[0] for line in dtypes.splitlines()[1:]] == list(TYPES)


def test_one_part(kernelgen: Run) -> None:
    done = kernelgen("list", "--targets")
    assert [line.split()[0] for line in done.out.splitlines()] == ["target", *TARGETS]
    assert "experimental" in next(line for line in done.out.splitlines() if line.startswith("trn3"))


def test_json_says_what_an_op_takes(kernelgen: Run) -> None:
    parts = json.loads(kernelgen("list", "--ops", "--format", "json").out)
    assert list(parts) == ["ops"]
    rope = next(op for op in parts["ops"] if op["name"] == "rope")
    assert rope["inputs"][2] == {"name": "freq_factors", "optional": True}
    assert {"name": "freq_base", "kind": "float", "default": 10000.0} in rope["params"]
    assert rope["emitter"] == "kernelgen/rope.py"


def test_an_op_says_its_types_and_which_model_families_need_it(kernelgen: Run) -> None:
    ops = {op["name"]: op for op in json.loads(kernelgen("list", "--ops", "--json").out)["ops"]}
    assert ops["relu"]["types"] == [[["f32", "f16", "bf16"]]]
    assert [["f16"], ["f32", "f16"]] in ops["add"]["types"]
    assert "llama" in ops["rms_norm"]["families"] and "mamba" in ops["ssm_scan"]["families"]
    assert "llama" not in ops["ssm_scan"]["families"]
    rows = {line.split()[0]: line for line in kernelgen("list", "--ops").out.splitlines()}
    assert " float|quantized " in rows["mul_mat"] and " all " in rows["mul_mat"]


def test_every_op_that_a_model_family_needs_is_known() -> None:
    assert set(architectures()) <= set(OPS)


def test_a_users_emitters_are_listed_and_win(kernelgen: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "own.py").write_text(
        "from kernelgen.emitters import emitter\n\n"
        '@emitter("add")\ndef add(a, b):\n    return a + b\n\n'
        '@emitter("twice")\ndef twice(x, *, times: int = 2):\n    return x * times\n'
    )
    parts = json.loads(kernelgen("list", "--ops", "--kernels", folder, "--format", "json").out)
    ops = {op["name"]: op for op in parts["ops"]}
    assert ops["add"]["emitter"] == "mine/own.py"
    assert ops["sub"]["emitter"].startswith("kernelgen/")
    assert ops["twice"] == {
        "name": "twice",
        "ggml": False,
        "inputs": [{"name": "x", "optional": False}],
        "params": [{"name": "times", "kind": "int", "default": 2}],
        "emitter": "mine/own.py",
        "types": [],
        "families": [],
    }


def test_a_broken_emitter_file_is_an_error_with_its_place(kernelgen: Run, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    done = kernelgen("list", "--ops", "--kernels", tmp_path)
    assert done.code == 2
    assert f"{tmp_path}/broken.py:1:" in done.err
