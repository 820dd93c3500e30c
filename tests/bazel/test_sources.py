"""Kernels in every language that a manifest names by their source, for two targets: built once, and again after an edit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import scratch

pytestmark = [pytest.mark.together("smoke"), pytest.mark.long]

DATA = Path(__file__).resolve().parents[1] / "data" / "source_kernels"
BUNDLES = ("@neuron_kernels//bundles:sources_trn1", "@neuron_kernels//bundles:sources_trn2")


def test_an_edit_builds_what_it_changes_and_a_comment_compiles_nothing(checkouts: scratch.Checkouts) -> None:
    with checkouts.lend("smoke", folder="e2e/smoke") as checkout:
        smoke = checkout.path / "e2e" / "smoke"
        shutil.copytree(DATA, smoke, dirs_exist_ok=True)
        checkout.edit("e2e/smoke/MODULE.bazel", '"//:tiny.yaml"', '"//:tiny.yaml", "//:sources.yaml"')
        failed = checkout.bazel("build", *BUNDLES, expect=None).output
        assert "package" in failed and "kernels" in failed  # the root package does not export them
        (smoke / "kernels" / "BUILD.bazel").write_text(
            'exports_files(\n    glob(["*.py"]),\n    visibility = ["//visibility:public"],\n)\n'
        )

        def counts() -> tuple[int, int]:
            result = checkout.bazel("build", *BUNDLES)
            return result.emits, result.compiles

        assert counts() == (9, 18)
        checkout.edit("e2e/smoke/kernels/in_numpy.py", "def quantize", "# A comment.\ndef quantize")
        assert counts() == (3, 0)
        checkout.edit("e2e/smoke/kernels/in_nki.py", "        tile = ", "        # A comment.\n        tile = ")
        assert counts() == (2, 0)
        # An imported file belongs to the kernels that import it; a kernel whose HLO changes is compiled for each
        # target.
        checkout.edit("e2e/smoke/kernels/rows.py", "rows[-1:]", "rows[:1]")
        assert counts() == (3, 2)
        checkout.edit("e2e/smoke/sources.yaml", "{BLOCK: 512}", "{BLOCK: 256}")
        assert counts() == (1, 2)
