"""A kernel that NKI's own compiler, here a double, compiles with the Python of the SDK in NEURON_SDK."""

from __future__ import annotations

import json
import shutil
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

import scratch

pytestmark = pytest.mark.together("builds")

TESTS = Path(__file__).resolve().parents[1]
KERNELS = """\
import nki


@nki.jit
def add(x, y):
    return x + y


@nki.jit
def double(x):
    return x + x
"""
MANIFEST = """\
format: 1
name: native
targets: [trn1, trn2]
kernels:
  - source: kernels.py:add
    inputs: ["f32[128,8]", "f32[128,8]"]
    outputs: ["f32[128,8]"]
    lowering: native
  - source: kernels.py:double
    inputs: ["f32[128,8]"]
    outputs: ["f32[128,8]"]
    lowering: native
"""
BUNDLES = ("@neuron_kernels//bundles:native_trn1", "@neuron_kernels//bundles:native_trn2")


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """Returns a virtual environment with the double of neuronx-cc and NumPy."""
    folder = tmp_path / "sdk"
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "numpy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.copy(TESTS / "compilers" / "fake_neuronx_cc", folder / "bin" / "neuronx-cc")
    (folder / "bin" / "neuronx-cc").chmod(0o755)
    (folder / "bin" / "neuronx-cc.json").write_text(json.dumps({"record": str(tmp_path / "record")}))
    return folder


@pytest.fixture
def checkout(checkouts: scratch.Checkouts) -> Iterator[scratch.Checkout]:
    with checkouts.lend("project") as made:
        folder = made.path / "manifests" / "native"
        folder.mkdir()
        (folder / "kernels.py").write_text(KERNELS)
        (folder / "native.yaml").write_text(MANIFEST)
        (folder / "BUILD.bazel").write_text(
            'exports_files(\n    ["kernels.py", "native.yaml"],\n    visibility = ["//visibility:public"],\n)\n'
        )
        named = 'neuron.kernels(manifest = ["//manifests:basic.yaml"])'
        made.edit("MODULE.bazel", named, f'{named}\nneuron.kernels(manifest = ["//manifests/native:native.yaml"])')
        yield made


@pytest.mark.long
def test_the_sdks_python_compiles_it_and_an_edit_compiles_its_own_kernels_alone(
    checkout: scratch.Checkout, sdk: Path, tmp_path: Path
) -> None:
    def runs() -> int:
        return (tmp_path / "record").read_text().count('"compile"')

    absent = checkout.bazel("build", *BUNDLES, "--keep_going", expect=1).output
    assert "needs NKI's own compiler: the simulator is used. Install" in absent
    checkout.env = {"NEURON_SDK": str(sdk), "NEURON_KERNELGEN_NEFF_CACHE": str(tmp_path / "cache")}
    absent = checkout.bazel("build", *BUNDLES, "--keep_going", expect=1).output
    assert f"needs NKI's own compiler: {sdk}/bin/python3 has none. Install" in absent
    (packages,) = sdk.glob("lib/python*/site-packages")
    shutil.copytree(TESTS / "data" / "fake_nki", packages, dirs_exist_ok=True)
    built = checkout.bazel("build", *BUNDLES)
    assert (built.emits, built.compiles) == (4, 4)
    checkout.edit("manifests/native/kernels.py", "@nki.jit", "# A comment.\n@nki.jit")
    built = checkout.bazel("build", *BUNDLES)
    assert (built.emits, built.compiles) == (4, 0)
    checkout.edit("manifests/native/kernels.py", "return x + x", "return 2 * x")
    built = checkout.bazel("build", *BUNDLES)
    assert (built.emits, built.compiles) == (4, 2)
    assert runs() == 6
    # Earlier compiles are in kernelgen's cache.
    checkout.edit("manifests/native/kernels.py", "return 2 * x", "return x + x")
    built = checkout.bazel("build", *BUNDLES)
    assert (built.emits, built.compiles) == (4, 2)
    assert runs() == 6
