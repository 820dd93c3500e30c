"""The ready manifests' bundles: built by name, in both modes, and not so much as planned by a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

import scratch

NAMES = {path.stem for path in (scratch.CHECKOUT / "manifests" / "models").glob("*.yaml")}
ANALYSE = ("build", "--nobuild")

# They use the checkout of test_builds.py, whose server runs.
pytestmark = pytest.mark.together("builds")


@pytest.fixture(scope="module")
def checkout(checkouts: scratch.Checkouts) -> Iterator[scratch.Checkout]:
    with checkouts.lend("project") as made:
        yield made


def fetched(checkout: scratch.Checkout) -> bool:
    return any(checkout.output_root.glob("*/external/*neuron_models/plan.json"))


@pytest.mark.parametrize("file", ["MODULE.bazel", "WORKSPACE"])
def test_every_ready_manifest_is_named(file: str) -> None:
    text = (scratch.CHECKOUT / file).read_text()
    (named,) = re.findall(r"for name in \[(.*?)\]", text, re.DOTALL)
    assert set(re.findall(r'"(\w+)"', named)) == NAMES


def test_a_pattern_does_not_plan_them_and_a_name_does(checkout: scratch.Checkout) -> None:
    checkout.bazel(*ANALYSE, "//manifests/...")
    assert not fetched(checkout)
    labels = checkout.bazel("query", "//manifests/models:all").output.split()
    for target in ("trn1", "trn1n", "inf2", "trn2"):
        assert {f"//manifests/models:{name}_{target}" for name in (*NAMES, "all")} <= set(labels)
    # A manifest's targets are those of the package: each bundle that it names is there.
    checkout.bazel(*ANALYSE, *(f"//manifests/models:all_{target}" for target in ("trn1", "trn1n", "inf2", "trn2")))
    assert fetched(checkout)
    assert "//manifests/models:llama_3_2_1b_f16_trn2.tree" in labels


def test_they_are_there_without_modules(checkout: scratch.Checkout) -> None:
    checkout.bazel(*ANALYSE, "//manifests/models:llama_3_8b_f16_trn2", flags=["--config=workspace"])


def test_a_folder_of_kernelgen_may_go_between_two_builds(checkout: scratch.Checkout) -> None:
    folder = checkout.path / "tools" / "kernelgen" / "was_here"
    folder.mkdir()
    (folder / "module.py").write_text("")
    checkout.bazel(*ANALYSE, "//manifests:basic_trn1")
    (folder / "module.py").unlink()
    folder.rmdir()
    checkout.bazel(*ANALYSE, "//manifests:basic_trn1")
