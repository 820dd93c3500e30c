"""Kernels by NKI's own compiler, here a double: the call in the HLO, and the files for neuronx-cc."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from nki_double import Double

from kernelgen import manifest
from kernelgen.cli.frame import run
from kernelgen.compilers import nki_calls, simulate
from kernelgen.compilers.settings import CompileConfig
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.errors import KernelgenError
from kernelgen.hlo import custom_calls, proto
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.lint import errors, lint
from kernelgen.languages.nki.native import using
from kernelgen.lowering.emission import emit
from kernelgen.neff.container import tensors_of
from kernelgen.plan import Plan

KERNEL = (Path(__file__).parents[1] / "data" / "native_kernels" / "kernels" / "add.py").read_text()
MANIFEST = """\
format: 1
name: m
targets: [trn1, trn2]
kernels:
  - source: add.py:add
    inputs: ["f32[128,8]", "f32[128,8]"]
    outputs: ["f32[128,8]"]
    lowering: native
    check: {reference: ref.py:add}
"""


@pytest.fixture
def plan(tmp_path: Path) -> tuple[Plan, Catalog]:
    (tmp_path / "add.py").write_text(KERNEL)
    (tmp_path / "ref.py").write_text("import numpy as np\n\n\ndef add(x, y):\n    return x + y\n")
    (tmp_path / "m.yaml").write_text(MANIFEST)
    catalog = Catalog([builtin_library()])
    return Plan.merge(manifest.load([tmp_path / "m.yaml"], catalog)), catalog


def emitted(plan: tuple[Plan, Catalog], toolchain: Double, number: int = 0) -> bytes:
    made, catalog = plan
    kernel = made.kernels[number]
    with using(toolchain):
        return emit(catalog.emitters(kernel), kernel.spec, targets=kernel.targets).hlo


def call_of(hlo: bytes) -> Any:
    (found,) = [i for c in proto.parse(hlo).computations for i in c.instructions if i.opcode == "custom-call"]
    return found


def test_each_target_has_a_call_of_its_own_with_the_whole_configuration(plan: tuple[Plan, Catalog]) -> None:
    made, _ = plan
    assert [k.id.split("-")[-1].split(".")[1:] for k in made.kernels] == [["trn1", "nki"], ["trn2", "nki"]]
    assert [len(b.kernels) for b in made.bundles] == [1, 1] and len({k.spec.id for k in made.kernels}) == 1
    assert Plan.from_json(made.to_json()) == made
    for number, target in enumerate(("trn1", "trn2")):
        hlo = emitted(plan, Double(False, collectives=True), number)
        call = call_of(hlo)
        assert call.custom_call_target == "AwsNeuronCustomNativeKernel"
        assert json.loads(call.backend_config)["target"] == target
        kept = {a.key: a.value for a in call.frontend_attributes.map}
        assert {k: v for k, v in kept.items() if not k.startswith("neff_")} == {"has_collectives": "1"}
        assert not errors(lint(hlo))
        assert nki_calls.materialized(hlo, Path("nowhere")) == hlo


def test_a_file_is_named_by_its_content_and_put_back_for_the_compiler(
    plan: tuple[Plan, Catalog], tmp_path: Path
) -> None:
    hlo = emitted(plan, Double(True))
    assert emitted(plan, Double(True)) == hlo  # the compiler's folder differs each time
    names = [t.name for t in tensors_of(hlo)]
    assert canonicalize(hlo, names[:2], names[2:]) == hlo
    config = json.loads(base64.b64decode(call_of(hlo).backend_config))
    assert config["version"] == 4 and config["path"].startswith("sha256:")
    given = nki_calls.materialized(hlo, tmp_path)
    path = Path(json.loads(base64.b64decode(call_of(given).backend_config))["path"])
    assert path.parent == tmp_path and json.loads(path.read_text())["of"] == "add"
    assert custom_calls.ARTIFACT.encode() not in given
    other = emitted(plan, Double(True), 1)
    assert call_of(other).backend_config != call_of(hlo).backend_config


def test_what_the_kernel_writes_in_place_is_aliased(plan: tuple[Plan, Catalog]) -> None:
    hlo = emitted(plan, Double(False, results=2, aliases={1: 1}))
    assert list(map(str, tensors_of(hlo)))[1:] == [
        "input1.must_alias_input: f32[128,8]",
        "output0: f32[128,8]",
        "input1.updated: f32[128,8] in place of input1.must_alias_input",
    ]
    with pytest.raises(KernelgenError, match="returns 0 results, and 1 are declared"):
        emitted(plan, Double(False, aliases={1: 0}))


def test_the_cpu_judges_by_the_interpreter_and_no_cpu_runs_the_call(
    plan: tuple[Plan, Catalog], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(tmp_path / "m.yaml")]) == 0
    assert "1 ok, 0 different" in capsys.readouterr().out
    assert run(["run", "add", "--manifest", str(tmp_path / "m.yaml"), "--target", "trn1"]) == 0
    with pytest.raises(KernelgenError, match="which no CPU runs: use neuronx-cc, or 'lowering: interpreted'"):
        simulate.simulate(emitted(plan, Double(False)), CompileConfig.make("trn1").flags())


def test_without_a_toolchain_or_for_another_language_it_is_refused(plan: tuple[Plan, Catalog], tmp_path: Path) -> None:
    made, catalog = plan
    with pytest.raises(KernelgenError, match="needs NKI's own compiler, which is not installed"):
        emit(catalog.emitters(made.kernels[0]), made.kernels[0].spec, targets=("trn1",))
    (tmp_path / "m.yaml").write_text(MANIFEST.replace("add.py:add", "ref.py:add"))
    with pytest.raises(KernelgenError, match=r"only a kernel in NKI has the lowering 'native', and ref\.py is not"):
        manifest.load([tmp_path / "m.yaml"], Catalog([builtin_library()]))
