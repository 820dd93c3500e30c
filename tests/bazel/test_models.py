"""The ready manifests' bundles are built by name in both modes; a pattern does not even plan them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import scratch

FILES = sorted((scratch.CHECKOUT / "manifests" / "models").glob("*.yaml"))
NAMES = {path.stem for path in FILES}
MODELS = {re.sub("_(f16|q4_k_m)$", "", name) for name in NAMES}
TARGETS = ("trn1", "trn1n", "inf2", "trn2")
ANALYSE = ("build", "--nobuild")

# These tests use the checkout of test_builds.py, whose server is running.
pytestmark = pytest.mark.together("builds")


@pytest.fixture(scope="module")
def checkout(checkouts: scratch.Checkouts) -> Iterator[scratch.Checkout]:
    with checkouts.lend("project") as made:
        yield made


def planned(checkout: scratch.Checkout) -> set[str]:
    """Returns the models whose kernels are planned."""
    plans = checkout.output_root.glob("*/external/*neuron_*/plan.json")
    return {
        path.parent.name.partition("neuron_")[2] for path in plans if not path.parent.name.endswith("neuron_kernels")
    }


def listed(text: str, name: str) -> list[str]:
    """Returns the words of the list after `name`."""
    (words,) = re.findall(rf"{name} \[(.*?)\]", text, re.DOTALL)
    return re.findall(r'"(\w+)"', words)


def test_every_ready_manifest_is_named_in_the_one_list_and_in_the_module() -> None:
    one = (scratch.CHECKOUT / "manifests" / "models" / "models.bzl").read_text()
    module = (scratch.CHECKOUT / "MODULE.bazel").read_text()
    models, types = listed(one, "MODELS ="), listed(one, "FILE_TYPES =")
    assert sorted(f"{model}_{kind}" for model in models for kind in types) == sorted(NAMES)
    assert (listed(module, "for model in"), listed(module, "for file_type in")) == (models, types)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_manifest_names_the_targets_that_have_bundles(file: Path) -> None:
    assert set(yaml.safe_load(file.read_text())["targets"]) == set(TARGETS)


@pytest.mark.long
def test_a_pattern_plans_none_and_a_name_plans_its_model_alone(checkout: scratch.Checkout) -> None:
    checkout.bazel(*ANALYSE, "//manifests/...")
    assert planned(checkout) == set()
    labels = checkout.bazel("query", "//manifests/models:all").output.split()
    for target in TARGETS:
        assert {f"//manifests/models:{name}_{target}" for name in (*NAMES, "all")} <= set(labels)
    checkout.bazel(
        *ANALYSE,
        *(f"//manifests/models:llama_3_8b_{kind}_{target}" for kind in ("f16", "q4_k_m") for target in TARGETS),
        *(f"//manifests/devices:llama_3_8b_f16_2_devices_{target}" for target in ("trn1", "trn1n", "inf2")),
    )
    assert planned(checkout) == {"llama_3_8b", "llama_3_8b_f16_2_devices"}
    assert "//manifests/models:llama_3_8b_f16_trn2.tree" in labels


@pytest.mark.long
def test_every_bundle_of_every_model_is_there(checkout: scratch.Checkout) -> None:
    checkout.bazel(*ANALYSE, *(f"//manifests/models:all_{target}" for target in TARGETS))
    assert planned(checkout) == MODELS | {"llama_3_8b_f16_2_devices"}


def test_they_are_there_without_modules(checkout: scratch.Checkout) -> None:
    checkout.bazel(*ANALYSE, "//manifests/models:llama_3_8b_f16_trn2", flags=["--config=workspace"])
