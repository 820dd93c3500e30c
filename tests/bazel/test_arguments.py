"""The arguments of neuron.kernels() in both modes, which are those of CMake's add_neuron_kernels()."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import scratch
from kernelgen.cli.frame import run

pytestmark = pytest.mark.together("smoke")

DATA = Path(__file__).resolve().parents[1] / "data" / "source_kernels"
MODES = pytest.mark.parametrize(
    "mode",
    [pytest.param([], id="bzlmod"), pytest.param(["--config=workspace"], id="workspace", marks=pytest.mark.long)],
)


BY_HAND = """\
load("@neuron_kernelgen//rules:defs.bzl", "neuron_hlo", "neuron_kernel_bundle", "neuron_neff")

neuron_hlo(
    name = "norm.hlo",
    emitters = {"@neuron_kernelgen//kernels:norm.py": "kernelgen"},
    helpers = ["@neuron_kernelgen//kernels:common.py"],
    inputs = ["(64,1,1,1)/f32"],
    op = "rms_norm",
    output = "(64,1,1,1)/f32",
    params = {"eps": "1e-05"},
)

neuron_neff(
    name = "norm.trn1.neff",
    hlo = ":norm.hlo",
    target = "trn1",
)

neuron_kernel_bundle(
    name = "hand_trn1",
    compiler = "simulator",
    manifest = "hand",
    neffs = [":norm.trn1.neff"],
)
"""


@MODES
def test_every_kind_of_kernel_is_in_the_pack_that_kernelgen_build_writes(
    mode: list[str], checkouts: scratch.Checkouts, tmp_path: Path
) -> None:
    manifest = shutil.copytree(DATA, tmp_path / "data") / "every.yaml"
    assert (
        run(["build", str(manifest), "--compiler", "simulator", "--target", "trn1", "-o", str(tmp_path / "out")]) == 0
    )
    with checkouts.lend("smoke", folder="e2e/smoke", flags=mode) as checkout:
        smoke = checkout.path / "e2e" / "smoke"
        shutil.copytree(DATA, smoke, dirs_exist_ok=True)
        (smoke / "kernels" / "BUILD.bazel").write_text(
            'exports_files(\n    glob(["**/*.py"]),\n    visibility = ["//visibility:public"],\n)\n'
        )
        arguments = 'compiler = "simulator",\n    memory_per_compile = "2G",\n    targets = ["trn1"],'
        for file in ("MODULE.bazel", "WORKSPACE"):
            checkout.edit(
                f"e2e/smoke/{file}", 'manifest = ["//:tiny.yaml"],', f'manifest = ["//:every.yaml"],\n    {arguments}'
            )
        # The arguments override the flags.
        flags = ["--@neuron_kernelgen//rules:compiler=neuronx-cc"]
        (smoke / "hand").mkdir()
        (smoke / "hand" / "BUILD.bazel").write_text(BY_HAND)
        checkout.bazel("build", "@neuron_kernels//bundles:every_trn1", "//hand:hand_trn1", flags=flags)
        repository = "neuron_kernels" if mode else "*[~+]neuron_kernels"
        built = [
            *checkout.output_root.glob(
                f"*/execroot/*/bazel-out/*/bin/external/{repository}/bundles/every_trn1.kernels.gguf"
            )
        ]
        assert {path.read_bytes() for path in built} == {(tmp_path / "out" / "every_trn1.kernels.gguf").read_bytes()}
        said = checkout.bazel("build", "@neuron_kernels//bundles:every_trn2", expect=1).output
        assert "every_trn2" in said
        (plan,) = checkout.output_root.glob(f"*/external/{repository}/plan.json")
        assert '"memory_mb":2048' in plan.read_text() and '"memory_mb":4096' not in plan.read_text()


LIBRARY = """\
module(name = "{name}", version = "0.1")
bazel_dep(name = "neuron_kernelgen", version = "0.1.0")
neuron = use_extension("@neuron_kernelgen//rules:extensions.bzl", "neuron")
neuron.kernels(kernels = ["//my_kernels"], manifest = ["//:tiny.yaml"])
use_repo(neuron, "neuron_kernels")
"""
NAMED = 'load("@neuron_kernels//:defs.bzl", "neuron_manifest")\nneuron_manifest(name = "tiny", visibility = ["//visibility:public"])\n'


def test_modules_may_use_the_same_names(checkouts: scratch.Checkouts) -> None:
    """A manifest `tiny` and a folder `my_kernels` of two libraries, beside those of the root."""
    with checkouts.lend("smoke", folder="e2e/smoke") as checkout:
        for name in ("liba", "libb"):
            folder = checkout.path / "e2e" / name
            (folder / "my_kernels").mkdir(parents=True)
            (folder / "MODULE.bazel").write_text(LIBRARY.format(name=name))
            (folder / "BUILD.bazel").write_text(f'{NAMED}exports_files(["tiny.yaml"])\n')
            (folder / "my_kernels/BUILD.bazel").write_text(
                'exports_files(["act.py"], visibility = ["//visibility:public"])\n'
            )
            (folder / "my_kernels/act.py").write_text(
                f'from kernelgen.emitters import emitter\n\n\n@emitter("act_{name}")\ndef act(x):\n    return x + x\n'
            )
            tensor = '"(64,4,1,1)/f32"'
            (folder / "tiny.yaml").write_text(
                f"format: 1\nname: tiny\ntargets: [trn1]\nkernels: [{{op: act_{name}, inputs: [{tensor}], output: {tensor}}}]\n"
            )
            checkout.append(
                "e2e/smoke/MODULE.bazel",
                f'bazel_dep(name = "{name}", version = "0.1")\n'
                f'local_path_override(module_name = "{name}", path = "../{name}")\n',
            )
        checkout.bazel("build", "--output_groups=hlo", "//:tiny_trn1", "@liba//:tiny_trn1", "@libb//:tiny_trn1")
        shown = checkout.bazel(
            "query", "kind(neuron_hlo, deps(@liba//:tiny_trn1 + @libb//:tiny_trn1 + //:tiny_trn1))"
        ).output
        ops = re.findall(r"^@\S*kernels:(act_lib.|\w+?)-", shown, re.MULTILINE)
        assert sorted(op for op in ops if op.startswith("act_")) == ["act_liba", "act_libb"] and len(ops) > 2, shown
