"""Kernels that NKI's own compiler, here a double, made earlier; Bazel builds them with a double of neuronx-cc."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from nki_double import Double

import scratch
from kernelgen.cli.frame import run
from kernelgen.languages.nki.native import using

pytestmark = [pytest.mark.together("smoke"), pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "native_kernels"
BUNDLE = "@neuron_kernels//bundles:native_trn1"


def prebuilt(folder: Path, salt: str) -> Path:
    """Returns a copy of the manifest and its kernels with the double's results."""
    shutil.copytree(DATA, folder)
    with using(Double(True, salt=salt)):
        assert run(["prebuild", str(folder / "native.yaml"), "--target", "trn1"]) == 0
    return folder


@pytest.mark.parametrize(
    "mode",
    [pytest.param([], id="bzlmod"), pytest.param(["--config=workspace"], id="workspace")],
)
def test_kernels_of_nkis_own_compiler_are_built_and_built_again_where_they_change(
    mode: list[str], checkouts: scratch.Checkouts, tmp_path: Path
) -> None:
    sdk = tmp_path / "sdk" / "bin"
    sdk.mkdir(parents=True)
    # The double refuses a module whose calls name missing files.
    shutil.copy(ROOT / "tests" / "compilers" / "fake_neuronx_cc", sdk / "neuronx-cc")
    with checkouts.lend("smoke", folder="e2e/smoke", flags=mode) as checkout:
        smoke = checkout.path / "e2e" / "smoke"
        shutil.copytree(DATA, smoke, dirs_exist_ok=True)
        build_file = (
            'exports_files(\n    glob(["*.py", "native/*.json"]),\n    visibility = ["//visibility:public"],\n)\n'
        )
        (smoke / "kernels" / "BUILD.bazel").write_text(build_file)
        for file in ("MODULE.bazel", "WORKSPACE"):
            checkout.edit(f"e2e/smoke/{file}", '"//:tiny.yaml"', '"//:native.yaml"')
        checkout.edit("e2e/smoke/BUILD.bazel", 'neuron_manifest(name = "tiny")', "")
        checkout.env = {"NEURON_SDK": str(sdk.parent)}
        check(checkout, smoke, tmp_path)


def check(checkout: scratch.Checkout, smoke: Path, tmp_path: Path) -> None:
    said = checkout.bazel("build", "--keep_going", BUNDLE, expect=1).output
    assert ".trn1.nki.json is missing" in said and "kernelgen prebuild" in said

    one, two = (prebuilt(tmp_path / salt, salt) for salt in ("one", "two"))
    shutil.copytree(one, smoke, dirs_exist_ok=True)
    result = checkout.bazel("build", "--output_groups=hlo,pack", BUNDLE)
    assert (result.emits, result.compiles) == (2, 2)  # one kernel is interpreted, and did not fail
    # The bytes equal those emitted without Bazel.
    assert run(["emit", str(one / "native.yaml"), "--only", "*.trn1.nki", "-o", str(tmp_path / "emitted")]) == 0
    outputs = [
        *checkout.output_root.glob("*/execroot/*/bazel-out/*/bin/external/*neuron_kernels/kernels/*.trn1.nki.hlo.pb")
    ]
    assert len({p.name for p in outputs}) == 2
    assert all(p.read_bytes() == (tmp_path / "emitted" / p.name).read_bytes() for p in outputs)

    # A comment compiles nothing; another artifact compiles its kernel.
    checkout.edit("e2e/smoke/kernels/add.py", "@nki.jit", "# A comment.\n@nki.jit")
    for file in (two / "kernels" / "native").glob("add_8-*"):
        shutil.copy(file, smoke / "kernels" / "native")
    result = checkout.bazel("build", BUNDLE)
    assert (result.emits, result.compiles) == (3, 1)
    checkout.edit("e2e/smoke/kernels/add.py", "op=nl.add", "op=nl.multiply")
    said = checkout.bazel("build", "--keep_going", BUNDLE, expect=1).output
    assert "its sources differ from add.py" in said and "undo the edit, or make it again" in said
