"""The arguments of neuron.kernels() in both modes, which are those of CMake's add_neuron_kernels()."""

from __future__ import annotations

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
        checkout.bazel("build", "@neuron_kernels//bundles:every_trn1", flags=flags)
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
