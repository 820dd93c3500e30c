"""Entries of `kernels:` become specs: combinations of batches, values of expressions, and ggml's defaults and aliasing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernelgen import manifest
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import Library
from kernelgen.errors import KernelgenError
from kernelgen.ggml import shapes
from kernelgen.ggml.ops import OPS
from kernelgen.model import graph_ops
from kernelgen.plan import Plan, Request
from kernelgen.spec.kernel import GraphSpec, KernelSpec

DATA = Path(__file__).parents[1] / "data" / "graph-ops"


def load(tmp_path: Path, body: str, *libraries: Library, name: str = "t") -> Request:
    file = tmp_path / f"{name}.yaml"
    file.write_text(f"format: 1\nname: {name}\ntargets: [trn1]\n{body}", encoding="utf-8")
    (request,) = manifest.load([file], Catalog(libraries))
    return request


def test_a_batch_stands_for_every_combination(library: Library, tmp_path: Path) -> None:
    request = load(
        tmp_path,
        """
kernels:
  - op: mul
    inputs: ["(${d},${n},1,1)/${t}", "(${d},1,1,1)/f32"]
    output: "(${d},${n},1,1)/${t}"
    batch: {n: [1, 512], d: [64, 128], t: [f32, f16]}
""",
        library,
    )
    assert [str(k.spec.output) for k in request.kernels] == [
        f"({d},{n},1,1)/{t}" for n in (1, 512) for d in (64, 128) for t in ("f32", "f16")
    ]


def test_expressions_count_in_integers(library: Library, tmp_path: Path) -> None:
    request = load(
        tmp_path,
        """
kernels:
  - op: rope
    inputs: ["(128,8,${n},1)/f32/(4,${128 * 4},${(8 + 2) * 512},${n * 5120})", "(${n},1,1,1)/i32"]
    output: "(128,8,${n},1)/f32"
    params: {n_dims: "${128 - n // 512 * 64}", freq_base: "${b}", n_ctx_orig: "${-n + 1000}"}
    batch: {n: [512], b: [1e6]}
""",
        library,
    )
    spec = request.kernels[0].spec
    assert spec.inputs[0] is not None
    assert spec.inputs[0].nb == (4, 512, 5120, 512 * 5120)
    params = dict(spec.params)
    assert (params["n_dims"], params["freq_base"], params["n_ctx_orig"]) == (64, 1e6, 488)


def test_equal_entries_are_one_kernel_whatever_is_left_to_defaults(library: Library, tmp_path: Path) -> None:
    request = load(
        tmp_path,
        """
kernels:
  - {op: soft_max, inputs: ["(8,4,2,1)/f32"], output: "(8,4,2,1)/f32"}
  - {op: soft_max, inputs: ["(8,4,2,1)/f32/(4,32,128,1000)", null], output: "(8,4,2,1)/f32", params: {scale: 1, max_bias: 0}}
""",
        library,
    )
    assert len({k.spec for k in request.kernels}) == 1


SCALE = 'op: scale, output: "(8,4,1,1)/f32"'


def test_numbers_of_scale_may_be_any(library: Library, tmp_path: Path) -> None:
    entry = f'- {{{SCALE}, inputs: ["(8,4,1,1)/f32"], params: '
    request = load(tmp_path, f"kernels:\n  {entry}{{s: any}}}}\n  {entry}{{s: any, b: any}}}}\n", library)
    (spec,) = {k.spec for k in request.kernels}
    assert isinstance(spec, KernelSpec)
    assert spec.opened == ("s", "b")
    assert spec.op_params == (*[0] * 15, 0b11)
    assert KernelSpec.from_json(spec.to_json()) == spec
    assert OPS["scale"].decode(spec.op_params) == dict(spec.params)
    own = KernelSpec.make("scale", spec.inputs, spec.output, {"s": 2.0})
    assert own.open == spec and spec.open is None and own.id != spec.id


def test_in_place_ops_share_memory_by_themselves(library: Library, tmp_path: Path) -> None:
    entry = 'inputs: ["(4,3,1,1)/f32", "(3,1,1,1)/i64", "(4,6,1,1)/f16"], output: "(4,6,1,1)/f16"'
    body = f"kernels:\n  - {{op: set_rows, {entry}}}\n  - {{op: set_rows, {entry}, alias: 2}}\n"
    request = load(tmp_path, body, library)
    assert {k.spec.alias for k in request.kernels} == {2}


def test_a_custom_op_is_defined_by_its_emitter(library: Library, tmp_path: Path) -> None:
    inputs = '["(4,1,1,1)/f32", "(4,1,1,1)/f32"]'
    entry = f'{{op: my_bias, inputs: {inputs}, output: "(4,1,1,1)/f32", params: {{scale: 3}}}}'
    request = load(tmp_path, f"kernels: [{entry}]\n", library)
    kernel = request.kernels[0]
    assert (kernel.library, kernel.emitter) == ("stub", "everything")
    assert dict(kernel.spec.params) == {"scale": 3.0, "steps": 2, "clip": False}


def test_the_first_library_that_has_an_op_wins(library: Library, tmp_path: Path) -> None:
    shutil.copytree(library.root, tmp_path / "mine")
    mine = Library("mine", tmp_path / "mine")
    (mine.root / "everything.py").write_text(
        "from kernelgen.emitters import emitter\n\n\n@emitter('relu')\ndef relu(x):\n    return x\n", encoding="utf-8"
    )
    body = 'kernels:\n  - {op: relu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}\n'
    body += '  - {op: silu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}\n'
    assert [k.library for k in load(tmp_path, body, mine, library).kernels] == ["mine", "stub"]
    with pytest.raises(KernelgenError, match="no emitter for op 'silu'"):
        load(tmp_path, body, mine)


def test_compiler_settings_reach_every_target(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        """
format: 1
name: t
targets: [trn1, trn2]
compiler: {optlevel: 3, auto_cast: all, auto_cast_type: fp16, model_type: transformer, extra_flags: ["--x", "1"],
           memory_per_compile: 8G, cpus_per_compile: 2}
kernels:
  - {op: relu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}
""",
        encoding="utf-8",
    )
    (request,) = manifest.load([file], Catalog([library]))
    assert (request.memory_mb, request.cpus) == (8192, 2)
    assert [(c.target, c.lnc, c.optlevel, c.auto_cast, c.auto_cast_type) for c in request.configs] == [
        ("trn1", 1, 3, "all", "fp16"),
        ("trn2", 2, 3, "all", "fp16"),
    ]
    assert {c.extra_flags for c in request.configs} == {("--x", "1")}


def test_a_kernel_has_one_set_of_settings_whoever_asks_for_it(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        """
format: 1
name: t
targets: [trn1, trn2]
sizes: {n: [1, 8], m: [1, 8]}
compiler: {optlevel: 2, cases: [{when: n > m, optlevel: 1}, {when: n > 1, optlevel: 3}]}
kernels:
  - {op: relu, inputs: ["(4,${n},1,1)/f32"], output: "(4,${n},1,1)/f32"}
  - {op: relu, inputs: ["(${n * m},1,1,1)/f32"], output: "(${n * m},1,1,1)/f32"}
  - {op: relu, inputs: ["(5,1,1,1)/f32"], output: "(5,1,1,1)/f32"}
graphs:
  - inputs: {x: "(6,${n},1,1)/f32"}
    nodes: [{name: a, op: relu, inputs: [x], output: "(6,${n},1,1)/f32"}]
    outputs: [a]
    compiler: {model_type: transformer}
""",
        encoding="utf-8",
    )
    (request,) = manifest.load([file], Catalog([library]))
    found = {}
    for kernel, configs in request.special:
        assert [c.target for c in configs] == ["trn1", "trn2"] and configs[0].optlevel == configs[1].optlevel
        found[kernel.rpartition("-")[0]] = (configs[0].optlevel, configs[0].model_type)
    graphs = [what for name, what in found.items() if name.startswith("graph")]
    assert graphs == [(2, "transformer")]  # both have this id except for the digest, and both have these settings
    assert {name: level for name, (level, _) in found.items() if not name.startswith("graph")} == {
        "relu-4x8-f32": 3,
        "relu-6x8-f32": 3,  # a node of the group is compiled by the manifest's settings
        "relu-64-f32": 3,
        # 8 is also 1 * 8, to which no case applies
    }


def test_a_manifest_may_be_named_twice_but_not_two_manifests_alike(library: Library, tmp_path: Path) -> None:
    body = 'kernels: [{op: %s, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}]\n'
    files = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for file, op in zip(files, ("relu", "silu"), strict=True):
        file.write_text("format: 1\nname: same\ntargets: [trn1]\n" + body % op, encoding="utf-8")
    assert len(manifest.load([files[0], files[0]], Catalog([library]))) == 1
    with pytest.raises(KernelgenError) as caught:
        manifest.load(files, Catalog([library]))
    (diagnostic,) = caught.value.diagnostics
    assert str(diagnostic.location) == f"{files[1]}:2:7"
    assert diagnostic.message == "manifest 'same' is already defined, with other content"
    assert diagnostic.hint == f"the first is at {files[0]}:2:7"


@pytest.mark.parametrize("export", sorted(DATA.glob("*.txt")), ids=lambda path: path.stem)
def test_what_llama_cpp_builds_fits_the_shape_rules(export: Path) -> None:
    for spec, line, _ in graph_ops.read(export):
        params = dict(spec.params)
        assert shapes.check(spec.op, spec.inputs, spec.output, params, spec.alias) == [], f"{export}:{line}"
        expected = shapes.result(spec.op, spec.inputs, params)
        assert expected in (None, spec.output), f"{export}:{line}"


def test_sizes_are_shared_and_where_leaves_combinations_out(library: Library, tmp_path: Path) -> None:
    request = load(
        tmp_path,
        """
sizes: {n_tokens: [1, 512], n_kv: [256, 512], n_outputs: [1, 512]}
where: [n_outputs <= n_tokens, n_tokens <= n_kv]
kernels:
  - {op: get_rows, inputs: ["(8,${n_tokens},1,1)/f32", "(${n_outputs},1,1,1)/i32"], output: "(8,${n_outputs},1,1)/f32"}
  - {op: relu, inputs: ["(${n_kv},${n_tokens},1,1)/f32"], output: "(${n_kv},${n_tokens},1,1)/f32"}
  - {op: exp, inputs: ["(${n_kv},1,1,1)/f32"], output: "(${n_kv},1,1,1)/f32"}
  - {op: neg, inputs: ["(${n_tokens},1,1,1)/f32"], output: "(${n_tokens},1,1,1)/f32", batch: {n_tokens: [7]}}
  - op: abs
    inputs: ["(${n_kv},${n_tokens},1,1)/f32"]
    output: "(${n_kv},${n_tokens},1,1)/f32"
    where: [n_tokens <= 2 * n_kv]
""",
        library,
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for kernel in request.kernels:
        found.setdefault(kernel.spec.op, []).append((str(kernel.spec.inputs[0]), str(kernel.spec.output)))
    assert found["get_rows"] == [(f"(8,{n},1,1)/f32", f"(8,{m},1,1)/f32") for n, m in ((1, 1), (512, 1), (512, 512))]
    assert [x for x, _ in found["relu"]] == [f"({k},{n},1,1)/f32" for n, k in ((1, 256), (1, 512), (512, 512))]
    assert [x for x, _ in found["exp"]] == ["(256,1,1,1)/f32", "(512,1,1,1)/f32"]
    assert [x for x, _ in found["neg"]] == ["(7,1,1,1)/f32"]
    assert [x for x, _ in found["abs"]] == [f"({k},{n},1,1)/f32" for n in (1, 512) for k in (256, 512)]


def test_too_many_combinations_are_one_mistake(library: Library, tmp_path: Path) -> None:
    numbers = list(range(1, 402))
    entry = '{op: relu, inputs: ["(${a},${b},1,1)/f32"], output: "(${a},${b},1,1)/f32", batch: BATCH}'
    with pytest.raises(KernelgenError) as error:
        load(tmp_path, f"kernels: [{entry}]\n".replace("BATCH", f"{{a: {numbers}, b: {numbers}}}"), library)
    assert [d.message for d in error.value.diagnostics] == [
        "the entry's variables have 160801 combinations, more than 100000"
    ]


def test_weights_have_layouts_by_target_and_by_shape_and_type(library: Library, tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    named = '{bf16: ["(256,8,1,1)/q8_0"]}'
    file.write_text(
        f"""\
format: 1
name: t
targets: [trn1, inf2, trn2]
weights: {{trn1: [bf16], trn2: [{named}, planes]}}
kernels:
  - &small {{op: mul_mat, inputs: ["(256,8,1,1)/q8_0", "(256,${{n}},1,1)/f32"], output: "(8,${{n}},1,1)/f32", batch: {{n: [1, 2]}}}}
  - {{<<: *small, inputs: ["(256,16,1,1)/q8_0", "(256,${{n}},1,1)/f32"], output: "(16,${{n}},1,1)/f32"}}
  - {{<<: *small, weights: {{trn1: [planes]}}, batch: {{n: [4]}}}}
  - {{op: relu, inputs: ["(8,1,1,1)/f32"], output: "(8,1,1,1)/f32"}}
graphs:
  - inputs: {{w: "(256,8,1,1)/q8_0", x: "(256,1,1,1)/f32"}}
    nodes:
      - {{name: y, op: mul_mat, inputs: [w, x], output: "(8,1,1,1)/f32"}}
      - {{name: z, op: relu, inputs: [y], output: "(8,1,1,1)/f32"}}
    outputs: [z]
    fallback: false
"""
    )
    (request,) = manifest.load([file], Catalog([library]))
    wanted = {
        "trn1": {8: "bf16", 16: "bf16", 4: "planes"},
        "inf2": {8: "", 16: "", 4: ""},
        "trn2": {8: "bf16", 16: "planes", 4: ""},
    }
    for target, layouts in wanted.items():
        specs = [kernel.spec for kernel in request.kernels_for(target)]
        (group,) = [spec for spec in specs if isinstance(spec, GraphSpec)]
        weight = group.nodes[0].inputs[0]
        assert weight is not None and weight.tensor.layout == layouts[8]
        found = [spec.inputs for spec in specs if isinstance(spec, KernelSpec) and spec.op == "mul_mat"]
        assert len(found) == 5
        for w, x in found:
            assert w is not None and x is not None
            assert w.layout == layouts[4 if x.ne[1] == 4 else w.ne[1]], target
    plan = Plan.merge([request])
    of = {bundle.target: set(bundle.kernels) for bundle in plan.bundles}
    assert [len(ids) for ids in of.values()] == [7, 7, 7] and len(set.intersection(*of.values())) == 1
    assert {kernel.targets for kernel in plan.kernels} == {()}


def test_a_group_is_for_those_targets_that_it_names(tmp_path: Path, library: Library) -> None:
    file = tmp_path / "m.yaml"
    entry = """
  - inputs: {{x: "(4,1,1,1)/f32"}}
    nodes:
      - {{name: a, op: relu, inputs: [x], output: "(4,1,1,1)/f32"}}
      - {{name: b, op: {op}, inputs: [a], output: "(4,1,1,1)/f32"}}
    outputs: [b]
    {more}"""
    entries = [("relu", "targets: [trn2]"), ("sqr", "targets: [inf2, trn1]"), ("sqr", "targets: [trn2]"), ("neg", "")]
    text = "".join(entry.format(op=op, more=more) for op, more in entries)
    file.write_text(f"format: 1\nname: t\ntargets: [trn1, inf2, trn2]\ngraphs:{text}\n")
    (request,) = manifest.load([file], Catalog([library]))
    plan = Plan.merge([request])
    ops = {kernel.spec.id: kernel.spec for kernel in plan.kernels}
    for target, lasts in (("trn1", "neg sqr"), ("inf2", "neg sqr"), ("trn2", "neg relu sqr")):
        (bundle,) = [bundle for bundle in plan.bundles if bundle.target == target]
        specs = [ops[id] for id in {kernel.spec.id for kernel in request.kernels_for(target)}]
        assert len(bundle.kernels) == len(specs)
        assert sorted(s.nodes[-1].op for s in specs if isinstance(s, GraphSpec)) == lasts.split()
        assert sorted(s.op for s in specs if isinstance(s, KernelSpec)) == sorted({"relu", *lasts.split()})
