"""Data that an emitter reads must be declared; then an edit of the data rebuilds only what depends on it."""

from __future__ import annotations

import pytest

import scratch

pytestmark = pytest.mark.together("smoke")

READS = """
FACTOR = float(__import__("pathlib").Path(__file__).with_name("factor.txt").read_text())


@emitter("squared_relu")"""


@pytest.mark.parametrize(
    "mode",
    [pytest.param([], id="bzlmod"), pytest.param(["--config=workspace"], id="workspace", marks=pytest.mark.long)],
)
def test_data_is_declared(mode: list[str], checkouts: scratch.Checkouts) -> None:
    with checkouts.lend("smoke", folder="e2e/smoke", flags=mode) as checkout:
        kernels = "e2e/smoke/my_kernels"
        checkout.edit(f"{kernels}/squared_relu.py", '\n@emitter("squared_relu")', READS)
        checkout.edit(f"{kernels}/squared_relu.py", "jnp.float32(scale)", "jnp.float32(scale * FACTOR)")
        (checkout.path / kernels / "factor.txt").write_text("2\n")
        for more in ([], ["--strategy=NeuronEmit=sandboxed"]):
            failed = checkout.bazel("build", "--keep_going", "//:tiny_trn1.pack", expect=1, flags=more).output
            assert "squared_relu.py:" in failed and "No such file or directory" in failed and "factor.txt" in failed

        checkout.edit(f"{kernels}/BUILD.bazel", '["*.py"]', '["*.py", "*.txt"]')
        given = 'kernels = ["//my_kernels"],'
        for file in ("MODULE.bazel", "WORKSPACE"):
            checkout.edit(f"e2e/smoke/{file}", given, f'data = ["//my_kernels:factor.txt"],\n    {given}')
        # Other kernels may have been compiled beside the failed one.
        assert checkout.bazel("build", "//:tiny_trn1.pack").compiles in (1, 2, 3)
        (checkout.path / kernels / "factor.txt").write_text("3\n")
        result = checkout.bazel("build", "//:tiny_trn1.pack")
        assert (result.emits, result.compiles) == (1, 1)
        result = checkout.bazel("build", "//:tiny_trn1.pack")
        assert (result.emits, result.compiles) == (0, 0)
