"""A new language is a package, a name in `kernelgen.languages`, and a run of `regenerate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_targets import ROOT, copy_checkout, run

LANGUAGE = """
from kernelgen.languages import _Jax


class _Doubling(_Jax):
    \"\"\"JAX, in which every result is twice what the function says.\"\"\"

    name = "doubling"

    def call(self, function, call):
        returned = super().call(function, call)
        return type(returned)(tuple(2 * result for result in returned.results))


LANGUAGE = _Doubling()
"""
KERNELS = """
import jax.numpy as jnp
from kernelgen.emitters import emitter


@emitter("relu", types="f32", language="doubling")
def relu(x):
    return jnp.maximum(x, 0)
"""
MANIFEST = """
format: 1
name: tiny
targets: [trn1]
languages: [doubling]
kernels:
  - {op: relu, inputs: ["(8,4,1,1)/f32"], output: "(8,4,1,1)/f32"}
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with the language `doubling`, after `regenerate`."""
    copy = copy_checkout(tmp_path_factory.mktemp("checkout"))
    languages = copy / "tools" / "kernelgen" / "languages"
    (languages / "doubling").mkdir()
    (languages / "doubling" / "__init__.py").write_text(LANGUAGE)
    table = languages / "__init__.py"
    table.write_text(table.read_text().replace('LANGUAGES = ("jax", ', 'LANGUAGES = ("jax", "doubling", '))
    assert "written" in run(copy, "regenerate")
    return copy


def test_the_rules_and_the_schema_have_a_new_language(checkout: Path) -> None:
    assert run(checkout, "regenerate", "--check") == ""
    for name in ("rules/private/languages.bzl", "tools/kernelgen/manifest/manifest.schema.json"):
        assert '"doubling",\n' in (checkout / name).read_text(), name


def test_kernels_in_a_new_language_are_built(checkout: Path) -> None:
    (checkout / "own").mkdir()
    (checkout / "own" / "relu.py").write_text(KERNELS)
    (checkout / "tiny.yaml").write_text(MANIFEST)
    run(checkout, "kernelgen", "build", "tiny.yaml", "--kernels=own", "--compiler=simulator", "-o", "out")
    hlo = next((checkout / "out" / ".kernelgen").rglob("*.hlo.pb"))
    assert hlo.name.endswith(".doubling.hlo.pb")
    assert "multiply" in run(checkout, "kernelgen", "inspect", str(hlo))


def test_no_rule_lists_languages() -> None:
    names = ('"numpy"', '"nki"')
    sources = [*(ROOT / "rules").rglob("*.bzl"), *(ROOT / "rules").rglob("*.cmake")]
    found = {path.name for path in sources if all(name in path.read_text(encoding="utf-8") for name in names)}
    assert found == {"languages.bzl"}
