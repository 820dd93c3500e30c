"""Build files say what the plan says, in the syntax of each build system, whatever is in a name or a parameter."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from kernelgen import manifest
from kernelgen.library import Library, builtin_library
from kernelgen.plan import Plan, spec_json
from kernelgen.render import _cmake, bazel, cmake

MANIFEST = """
format: 1
name: two
targets: [trn1, trn2]
compiler: {optlevel: 1, extra_flags: ["--verbose=35"], memory_per_compile: 9G}
kernels:
  - {op: add, inputs: ["(8,2,1,1)/f32", "(8,1,1,1)/f32"], output: "(8,2,1,1)/f32"}
  - {op: rms_norm, inputs: ["(8,2,1,1)/f32"], output: "(8,2,1,1)/f32", params: {eps: 1.0e-6}}
"""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "two.yaml"
    path.write_text(MANIFEST)
    return Plan.merge(manifest.load([path], libraries=[builtin_library()]))


def calls(text: str) -> list[tuple[str, dict[str, ast.expr]]]:
    """Returns the rule calls of a BUILD file; Starlark's calls and literals are Python's."""
    statements = ast.parse(text).body
    found = [s.value for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    return [(ast.unparse(c.func), {k.arg: k.value for k in c.keywords if k.arg}) for c in found]


def test_bazel_has_a_target_for_every_hlo_neff_and_bundle(plan: Plan) -> None:
    files = bazel.generate(plan, [bazel.BazelLibrary(builtin_library(), "@@rules~//kernels")], "@@rules~")
    kernels = calls(files["kernels/BUILD.bazel"])
    hlos = {ast.literal_eval(a["name"]): ast.literal_eval(a["spec"]) for rule, a in kernels if rule == "neuron_hlo"}
    assert hlos == {f"{k.spec.id}.hlo": spec_json(k.spec) for k in plan.kernels}
    neffs = {ast.literal_eval(a["name"]): a for rule, a in kernels if rule == "neuron_neff"}
    assert set(neffs) == {f"{n.id}.neff" for n in plan.neffs}
    assert {ast.literal_eval(a["memory_mb"]) for a in neffs.values()} == {9 * 1024}
    bundles = [a for rule, a in calls(files["bundles/BUILD.bazel"]) if rule == "neuron_kernel_bundle"]
    assert [ast.literal_eval(a["name"]) for a in bundles] == ["two_trn1", "two_trn2"]
    for bundle in bundles:
        labels = ast.literal_eval(bundle["neffs"])
        assert [label.removeprefix("//kernels:") in neffs for label in labels] == [True, True]


def test_bazel_names_an_emitter_and_the_helpers_that_it_imports_by_label(plan: Plan) -> None:
    text = bazel.generate(plan, [bazel.BazelLibrary(builtin_library(), "@@rules~//kernels")], "@@rules~")
    assert '"kernels/norm": "@@rules~//kernels:norm.py"' in text["kernels/BUILD.bazel"]
    assert '"kernels/norm": ["@@rules~//kernels:common.py"]' in text["kernels/BUILD.bazel"]


def test_a_library_without_a_package_can_not_be_rendered(plan: Plan, tmp_path: Path) -> None:
    other = bazel.BazelLibrary(Library("other", tmp_path), "//other")
    with pytest.raises(KeyError, match="kernels"):
        bazel.generate(plan, [other], "@@")


def test_cmake_has_a_call_for_every_hlo_neff_and_bundle(plan: Plan) -> None:
    text = cmake.generate(plan, [builtin_library()])["kernels.cmake"]
    assert re.findall(r"^neuron_kernels_hlo\((\S+)", text, re.M) == [k.spec.id for k in plan.kernels]
    assert re.findall(r"^neuron_kernels_neff\((\S+)", text, re.M) == [n.id for n in plan.neffs]
    assert re.findall(r"^neuron_kernels_bundle\((\S+)", text, re.M) == ["two_trn1", "two_trn2"]
    for kernel in plan.kernels:
        assert f"[[{spec_json(kernel.spec)}]]" in text or f"[=[{spec_json(kernel.spec)}]=]" in text


@pytest.mark.parametrize("value", ["", "plain", "a]]b", "ends]", "a]=]b]]", 'quote " $ENV{HOME} \\'])
def test_a_cmake_bracket_argument_holds_any_text(value: str) -> None:
    quoted = _cmake(value)
    match = re.fullmatch(r"\[(=*)\[(.*)\]\1\]", quoted, re.S)
    assert match and match[2] == value
    # CMake ends the argument at the first closing bracket of its length.
    assert quoted.index(f"]{match[1]}]") == len(quoted) - len(match[1]) - 2


def test_rendering_twice_gives_the_same_bytes_and_the_plan_reads_back(plan: Plan) -> None:
    source = [bazel.BazelLibrary(builtin_library(), "@@//kernels")]
    first, second = bazel.generate(plan, source, "@@"), bazel.generate(plan, source, "@@")
    assert first == second
    assert Plan.from_json(first["plan.json"]) == plan
    assert json.loads(first["plan.json"])["format"] == 1
