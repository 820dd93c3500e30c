"""Another repository depends on this one, with a manifest, a kernel and a program of its own."""

from __future__ import annotations

import pytest

import scratch

pytestmark = pytest.mark.together("smoke")


@pytest.mark.parametrize(
    "mode",
    [pytest.param([], id="bzlmod"), pytest.param(["--config=workspace"], id="workspace", marks=pytest.mark.long)],
)
def test_a_repository_that_uses_the_rules_builds_and_its_program_finds_its_kernels(
    mode: list[str], checkouts: scratch.Checkouts
) -> None:
    with checkouts.lend("smoke", folder="e2e/smoke", flags=mode) as checkout:
        result = checkout.bazel("test", "//...")
        assert (result.emits, result.compiles) == (3, 3)
        assert "1 test passes" in result.output
