"""Build files agree with the plan, in the syntax of each build system, for any names and parameters."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kernelgen import manifest
from kernelgen.build.steps import Build, argument_files, steps_of
from kernelgen.cache import OFF, CacheSettings
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library, builtin_library
from kernelgen.errors import KernelgenError
from kernelgen.plan import Plan
from kernelgen.render import _cmake, bazel, cmake
from kernelgen.spec.kernel import GraphSpec, Spec

MANIFEST = """
format: 1
name: two
targets: [trn1, trn2]
compiler: {optlevel: 1, extra_flags: ["--verbose=35"], memory_per_compile: 9G}
kernels:
  - {op: add, inputs: ["(8,2,1,1)/f32", "(8,1,1,1)/f32"], output: "(8,2,1,1)/f32"}
  - {op: rms_norm, inputs: ["(8,2,1,1)/f32"], output: "(8,2,1,1)/f32", params: {eps: 1.0e-6}}
"""


GROUP = """
format: 1
name: group
targets: [trn1]
graphs:
  - inputs: {x: "(8,2,1,1)/f32", w: "(8,1,1,1)/f32"}
    nodes:
      - {name: norm, op: rms_norm, inputs: [x], output: "(8,2,1,1)/f32", params: {eps: 1.0e-6}}
      - {name: y, op: mul, inputs: [norm, w], output: "(8,2,1,1)/f32"}
    outputs: [y]
"""


@pytest.fixture
def group(tmp_path: Path) -> Plan:
    path = tmp_path / "group.yaml"
    path.write_text(GROUP)
    return Plan.merge(manifest.load([path], Catalog([builtin_library()])))


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "two.yaml"
    path.write_text(MANIFEST)
    return Plan.merge(manifest.load([path], Catalog([builtin_library()])))


def calls(text: str) -> list[tuple[str, dict[str, ast.expr]]]:
    """Returns the rule calls of a BUILD file; Starlark's calls and literals are Python's."""
    statements = ast.parse(text).body
    found = [s.value for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    return [(ast.unparse(c.func), {k.arg: k.value for k in c.keywords if k.arg}) for c in found]


def spec_of(attributes: Mapping[str, ast.expr]) -> Spec:
    """Returns the kernel of a `neuron_hlo`."""
    return Spec.from_json(json.loads(ast.literal_eval(attributes["spec"])))


def test_bazel_has_a_target_for_every_hlo_neff_and_bundle(plan: Plan) -> None:
    files = bazel.generate(plan, [bazel.BazelLibrary(builtin_library(), "@@rules~//kernels")], "@@rules~")
    kernels = calls(files["kernels/BUILD.bazel"])
    hlos = {ast.literal_eval(a["name"]): spec_of(a) for rule, a in kernels if rule == "neuron_hlo"}
    assert hlos == {f"{k.spec.id}.hlo": k.spec for k in plan.kernels}
    neffs = {ast.literal_eval(a["name"]): a for rule, a in kernels if rule == "neuron_neff"}
    assert set(neffs) == {f"{n.id}.neff" for n in plan.neffs}
    assert {ast.literal_eval(a["memory_mb"]) for a in neffs.values()} == {9 * 1024}
    assert {ast.literal_eval(a["target"]) for a in neffs.values()} == {"trn1", "trn2"}
    (flags,) = [s.value for s in ast.parse(files["kernels/BUILD.bazel"]).body if "_FLAGS" in ast.unparse(s)[:8]]
    assert ast.literal_eval(flags) == {config.key: config.flags() for config in plan.configs}
    bundles = [a for rule, a in calls(files["bundles/BUILD.bazel"]) if rule == "neuron_kernel_bundle"]
    assert [ast.literal_eval(a["name"]) for a in bundles] == ["two_trn1", "two_trn2"]
    for bundle in bundles:
        labels = ast.literal_eval(bundle["neffs"])
        assert [label.removeprefix("//kernels:") in neffs for label in labels] == [True, True]


def test_a_bundle_names_the_neffs_of_kernels_with_settings_of_their_own(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "special.yaml"
    path.write_text(
        MANIFEST.replace("op: add,", "compiler: {optlevel: 3}, op: add,", 1).replace("name: two", "name: special")
    )
    special = Plan.merge(manifest.load([path], Catalog([builtin_library()])))
    assert Plan.from_json(special.to_json()) == special and len(special.neffs) == len(plan.neffs)
    assert {bundle.config for bundle in special.bundles} == {bundle.config for bundle in plan.bundles}
    files = bazel.generate(special, [bazel.BazelLibrary(builtin_library(), "@@rules~//kernels")], "@@rules~")
    rules = [a for rule, a in calls(files["bundles/BUILD.bazel"]) if rule == "neuron_kernel_bundle"]
    steps = {step.name: step for step in steps_of(special, BUILD) if step.kind == "bundle"}
    for bundle, attributes in zip(special.bundles, rules, strict=True):
        assert ast.literal_eval(attributes["entries"]) == f"{bundle.id}.entries.json"
        neffs = [
            label.removeprefix("//kernels:").removesuffix(".neff") for label in ast.literal_eval(attributes["neffs"])
        ]
        assert set(neffs) <= {neff.id for neff in special.neffs} and len(neffs) == len(bundle.kernels)
        assert sum(neff.rpartition(".")[2] != bundle.config for neff in neffs) == 1
        assert [f"neff/{neff}.neff" for neff in neffs] == [i for i in steps[bundle.id].inputs if i.endswith(".neff")]


def test_a_group_has_the_emitters_of_all_of_its_ops(group: Plan) -> None:
    (kernel,) = (k for k in group.kernels if isinstance(k.spec, GraphSpec))
    assert kernel.emitters == (("kernelgen", "elementwise"), ("kernelgen", "norm"))
    assert Plan.from_json(group.to_json()) == group
    library = bazel.BazelLibrary(builtin_library(), "@@rules~//kernels", ("@@//a:x.npy", "@@//b:all"))
    text = bazel.generate(group, [library], "@@rules~")["kernels/BUILD.bazel"]
    assert '_DATA = {\n    "kernelgen": ["@@//a:x.npy", "@@//b:all"],\n}' in text
    assert '"kernelgen/norm": "@@rules~//kernels:norm.py"' in text
    assert '"kernelgen/norm": ["@@rules~//kernels:common.py"]' in text
    rules = {ast.literal_eval(a["name"]): a for name, a in calls(text) if name == "neuron_hlo"}
    assert {name: spec_of(a) for name, a in rules.items()} == {f"{k.id}.hlo": k.spec for k in group.kernels}
    assert {ast.unparse(a["data"]) for a in rules.values()} == {"_DATA['kernelgen']"}
    rule = rules[f"{kernel.id}.hlo"]
    assert ast.unparse(rule["emitters"]) == (
        "{_EMITTERS['kernelgen/elementwise']: 'kernelgen', _EMITTERS['kernelgen/norm']: 'kernelgen'}"
    )
    assert ast.literal_eval(rule["helpers"]) == ["@@rules~//kernels:common.py"]
    files = cmake.generate(group, [builtin_library()], BUILD)
    words = files[f"steps/{kernel.id}.emit"].splitlines()
    assert [Path(w).name for w in words if w.startswith("--emitter=")] == ["elementwise.py", "norm.py"]
    assert words.count("--library=kernelgen") == 2 and len([w for w in words if w.startswith("--spec=")]) == 1


def test_a_library_without_a_package_cannot_be_rendered(plan: Plan, tmp_path: Path) -> None:
    other = bazel.BazelLibrary(Library("other", tmp_path), "//other")
    with pytest.raises(KeyError, match="kernelgen"):
        bazel.generate(plan, [other], "@@")


BUILD = Build(
    compiler="neuronx-cc",
    identity="neuronx-cc 2.21",
    executable=Path("/sdk/bin/neuronx-cc"),
    jax_version="0.10.2",
    cache=CacheSettings(Path("/cache")),
    cpus=8,
    memory_mb=30 * 1024,
)


def test_cmake_has_a_call_for_every_kernel_neff_and_bundle(plan: Plan) -> None:
    files = cmake.generate(plan, [builtin_library()], BUILD)
    steps = re.findall(r"^neuron_kernels_step\((\S+) (\S+)", files["kernels.cmake"], re.M)
    assert steps == [
        *(("emit", k.id) for k in plan.kernels),
        *(("compile", n.id) for n in plan.neffs),
        ("bundle", "two_trn1"),
        ("bundle", "two_trn2"),
    ]
    for kernel in plan.kernels:
        assert f"--spec={kernel.spec.json}" in files[f"steps/{kernel.id}.emit"].splitlines()
    assert Plan.from_json(files["plan.json"]) == plan


def test_what_changes_no_neff_is_in_no_file_that_a_compile_depends_on(plan: Plan) -> None:
    first = cmake.generate(plan, [builtin_library()], BUILD)
    moved = replace(BUILD, executable=Path("/elsewhere/neuronx-cc"), memory_mb=9 * 1024, cache=OFF)
    second = cmake.generate(plan, [builtin_library()], moved)
    changed = {name for name in first if first[name] != second[name]}
    # The number of compiles at once is in kernels.cmake and for the servers.
    assert changed == {"steps/compiler", "kernels.cmake", "workers/compile/servers"}
    newer = cmake.generate(plan, [builtin_library()], replace(BUILD, identity="neuronx-cc 2.22"))
    changed = {name for name in first if first[name] != newer[name]}
    assert {name for name in changed if name.startswith("steps/")} == {
        *(f"steps/{config.key}.compile" for config in plan.configs),
        # A bundle records its compiler.
        *(f"steps/{bundle.id}.bundle" for bundle in plan.bundles),
    }


def test_compiles_run_at_once_as_memory_and_cpus_allow(plan: Plan) -> None:
    assert BUILD.slots(plan) == 3
    assert replace(BUILD, memory_mb=1024).slots(plan) == 1
    assert replace(BUILD, cpus=2).slots(plan) == 2
    assert replace(BUILD, compiler="simulator", executable=None).slots(plan) == 8


def test_another_version_of_a_package_emits_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    before = argument_files(plan, [builtin_library()], BUILD)
    monkeypatch.setattr("kernelgen.build.steps.version", lambda name: f"{name} of tomorrow")
    after = argument_files(plan, [builtin_library()], BUILD)
    assert {name for name in before if before[name] != after[name]} == {f"steps/{k.id}.emit" for k in plan.kernels}


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


SOURCES = """
format: 1
name: sources
targets: [trn1]
kernels:
  - {source: "k/one.py:one", inputs: ["f32[2]"], outputs: ["f32[2]"]}
  - {source: "own/sub/two.py:two", inputs: ["f32[2]"], outputs: ["f32[2]"]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "k/BUILD.bazel": "",
        "k/one.py": "import numpy\nfrom .helper import one\n",
        "k/helper.py": "import numpy as np\ndef one(x):\n    return np.exp(x)\n",
        "own/sub/two.py": "import jax\ndef two(x):\n    return x\n",
        "m/sources.yaml": SOURCES.replace("k/", "../k/").replace("own/", "../own/"),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_that_kernels_are_named_by_have_the_labels_of_their_packages(folder: Path) -> None:
    catalog = Catalog([builtin_library()])
    plan = Plan.merge(manifest.load([folder / "m" / "sources.yaml"], catalog))
    roots = {folder: "@@"}
    with pytest.raises(KernelgenError, match="it is in no Bazel package"):
        [bazel.package_of(library, roots) for library in catalog.sources.values()]
    (folder / "own" / "BUILD.bazel").write_text("")
    sources = [bazel.package_of(library, roots) for library in catalog.sources.values()]
    text = bazel.generate(plan, sources, "@@rules")["kernels/BUILD.bazel"]
    tree = ast.parse(text)
    emitters, helpers, *_ = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert sorted(emitters.values()) == ["@@//k:one.py", "@@//own:sub/two.py"]
    assert sorted(map(str, helpers.values())) == ["['@@//k:helper.py']", "[]"]
    rules = [a for name, a in calls(text) if name == "neuron_hlo"]
    languages = {"one": "numpy", "two": None}
    assert [
        (ast.literal_eval(a["name"]), spec_of(a), ast.literal_eval(a["language"]) if "language" in a else None)
        for a in rules
    ] == [(f"{k.id}.hlo", k.spec, languages[k.spec.op]) for k in plan.kernels]


def test_kernels_in_jax_alone_are_emitted_without_the_other_languages(tmp_path: Path) -> None:
    for name, text in {
        "BUILD.bazel": "",
        "plain.py": "import jax\ndef plain(x):\n    return x\n",
        "around.py": "from kernelgen.languages.nki import inline\ndef around(x):\n    return x\n",
        "helped.py": "from .around import around\ndef helped(x):\n    return around(x)\n",
        "other.py": "import numpy as np\ndef other(x):\n    return np.exp(x)\n",
    }.items():
        (tmp_path / name).write_text(text)
    kernels = [
        {"source": f"{name}.py:{name}", "inputs": ["f32[8]"], "outputs": ["f32[8]"]}
        for name in ("plain", "around", "helped", "other")
    ]
    path = tmp_path / "four.yaml"
    path.write_text(json.dumps({"format": 1, "name": "four", "targets": ["trn1"], "kernels": kernels}))
    catalog = Catalog([builtin_library()])
    plan = Plan.merge(manifest.load([path], catalog))
    sources = [bazel.package_of(library, {tmp_path: "@@"}) for library in catalog.sources.values()]
    text = bazel.generate(plan, sources, "@@rules")["kernels/BUILD.bazel"]
    alone = {
        spec_of(attributes).op for name, attributes in calls(text) if name == "neuron_hlo" and "jax_alone" in attributes
    }
    assert alone == {"plain"}
