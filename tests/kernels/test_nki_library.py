"""kernelgen's own kernels in NKI compute what the references compute, and decline the kernels that they do not support."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_harness import LIBRARY, check, emit, spec

from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.loading import load_function
from kernelgen.hlo import execute, proto
from kernelgen.lowering import emission

NKI = ("nki",)
LLAMA = {"n_dims": 64, "mode": 0, "freq_base": 5e5}
SHOWN = "(96,5,1,1)/f16"
F8 = ":f8_e4m3_128x128"


def attention(kind: str, n: int, n_kv: int, heads: int = 4, groups: int = 2, mask: bool = True, **params: float):
    inputs = [f"(64,{n},{heads},1)/f32", *[f"(64,{n_kv},{groups},1)/{kind}"] * 2]
    if mask:
        inputs.append(f"({n_kv},{n},1,1)/f16")
    return spec("flash_attn_ext", inputs, f"(64,{heads},{n},1)/f32", scale=0.125, **params)


def product(kind: str, m: int, k: int, n: int, shared: int = 1, matrices: int = 1, layout: str = ""):
    a, b = f"({k},{m},{matrices},1)/{kind}{layout}", f"({k},{n},{matrices * shared},1)/f32"
    return spec("mul_mat", [a, b], f"({m},{n},{matrices * shared},1)/f32")


def chosen(kind: str, m: int, k: int, experts: int, used: int, tokens: int, rows: int = 1, layout: str = ""):
    inputs = [f"({k},{m},{experts},1)/{kind}{layout}", f"({k},{rows},{tokens},1)/f32", f"({used},{tokens},1,1)/i32"]
    return spec("mul_mat_id", inputs, f"({m},{used},{tokens},1)/f32")


CASES = {
    "rms_norm": (spec("rms_norm", ["(96,130,2,1)/f16"], "(96,130,2,1)/f16", eps=1e-5), 1e-7),
    "soft_max": (
        spec("soft_max", ["(96,5,4,2)/f32", SHOWN, "(4,1,1,1)/f32"], "(96,5,4,2)/f32", scale=0.3, max_bias=8.0),
        1e-7,
    ),
    "mul_mat f16": (product("f16", 600, 160, 3, shared=2, matrices=2), 1e-6),
    "mul_mat bf16": (product("bf16", 40, 520, 1), 1e-6),
    "mul_mat f16, transposed": (product("f16", 2200, 160, 3, shared=2, matrices=2, layout=":transposed"), 1e-6),
    "mul_mat bf16, transposed": (product("bf16", 600, 520, 140, layout=":transposed"), 1e-6),
    "mul_mat q8_0": (product("q8_0", 130, 160, 2), 1e-6),
    "mul_mat q4_0": (product("q4_0", 130, 160, 2), 1e-6),
    "mul_mat q4_0, several": (product("q4_0", 40, 2144, 3, shared=2, matrices=2), 1e-6),
    "mul_mat q4_1": (product("q4_1", 40, 2144, 3, shared=2, matrices=2), 1e-6),
    "mul_mat q4_K": (product("q4_K", 130, 256, 2), 1e-6),
    "mul_mat q4_K, several": (product("q4_K", 40, 2304, 3, shared=2, matrices=2), 1e-6),
    **{
        f"mul_mat {kind}, several": (product(kind, 40, 2304, 3, shared=2, matrices=2), 1e-6)
        for kind in ("q5_0", "q5_1", "q2_K", "q3_K", "q5_K")
    },
    # Unpacking its blocks takes the most memory.
    "mul_mat q5_K, long": (product("q5_K", 70, 16384, 70), 1e-6),
    "mul_mat q6_K": (product("q6_K", 130, 256, 2), 1e-6),
    "mul_mat q6_K, several": (product("q6_K", 40, 2304, 3, shared=2, matrices=2), 1e-6),
    # Tiles that are cut on both sides, matrices that share weights, and so many rows that codes are scaled.
    "mul_mat f8": (product("f16", 200, 288, 3, shared=2, matrices=2, layout=F8), 1e-6),
    "mul_mat f8, many": (product("q8_0", 700, 288, 70, layout=F8), 1e-5),
    "mul_mat f8, many and a narrow end": (product("f16", 570, 160, 32, shared=2, matrices=2, layout=F8), 1e-5),
    "mul_mat_id f32": (chosen("f32", 7, 32, 8, 3, 1), 1e-7),
    "mul_mat_id f16": (chosen("f16", 600, 160, 64, 2, 17), 1e-6),
    "mul_mat_id bf16, fewer experts": (chosen("bf16", 40, 160, 4, 2, 5, rows=2), 1e-6),
    "mul_mat_id f16, transposed": (chosen("f16", 600, 160, 64, 2, 17, layout=":transposed"), 1e-6),
    "mul_mat_id q8_0": (chosen("q8_0", 130, 160, 64, 2, 17), 1e-6),
    "mul_mat_id q4_K, fewer experts": (chosen("q4_K", 40, 256, 4, 2, 5), 1e-6),
    # The longest rows: fewer of them fit into SBUF at once.
    "mul_mat f32, long": (product("f32", 3, 16384, 400), 1e-6),
    "mul_mat q8_0, long": (product("q8_0", 70, 16384, 70), 1e-6),
    "mul_mat q4_0, long": (product("q4_0", 70, 16384, 70), 1e-6),
    "mul_mat q4_1, long": (product("q4_1", 70, 16384, 70), 1e-6),
    "mul_mat q4_K, long": (product("q4_K", 70, 16384, 70), 1e-6),
    "mul_mat q3_K, long": (product("q3_K", 70, 16384, 70), 1e-6),
    "mul_mat q6_K, long": (product("q6_K", 70, 16384, 70), 1e-6),
    "prompt": (attention("f16", 70, 300, max_bias=4.0), 1e-5),
    "few keys": (attention("bf16", 2, 100, max_bias=4.0), 1e-4),
    "few tokens": (attention("f32", 7, 384, heads=8, max_bias=4.0, logit_softcap=9.0), 1e-6),
    "long cache": (attention("f16", 1, 9000, heads=2, groups=1), 1e-5),
    "wide heads": (
        spec(
            "flash_attn_ext",
            ["(192,3,4,1)/f32", "(192,300,2,1)/f16", "(128,300,2,1)/f16", "(300,3,1,1)/f16", "(4,1,1,1)/f32"],
            "(128,4,3,1)/f32",
            scale=0.07,
        ),
        1e-5,
    ),
    "one token": (attention("f16", 1, 600, logit_softcap=5.0), 1e-5),
    "rope": (spec("rope", ["(64,4,5,1)/f32", "(5,1,1,1)/i32"], "(64,4,5,1)/f32", **LLAMA), 1e-7),
    "rope yarn": (
        spec(
            "rope",
            ["(80,3,2,1)/f16", "(2,1,1,1)/i32", "(20,1,1,1)/f32"],
            "(80,3,2,1)/f16",
            **{"n_dims": 40, "mode": 2, "ext_factor": 0.7, "n_ctx_orig": 512, "freq_scale": 0.5},
        ),
        1e-6,
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_kernel_in_nki_computes_what_the_reference_does(name):
    kernel, limit = CASES[name]
    given = {}
    if kernel.op == "mul_mat_id":
        weights, _, ids = kernel.inputs
        given["src2"] = np.random.default_rng(1).integers(0, weights.ne[2], ids.shape)
    check(kernel, limit, languages=NKI, **given)


BACKEND_OPS = 5e-4
"""test-backend-ops' limit for MUL_MAT and MUL_MAT_ID. test-backend-ops has no weights in layouts, so the cases below
repeat its shapes.
"""

FLOATS = ("f32", "f16", "bf16")
AS_F8 = ("f16", "q8_0", "q4_K")  # the layout does not depend on the type


@pytest.mark.long
@pytest.mark.parametrize("n", [*range(1, 10), 16, 32, 129])
@pytest.mark.parametrize(("layout", "kinds"), [(":transposed", FLOATS), (F8, AS_F8)])
def test_products_by_weights_in_layouts_are_within_the_limit_of_test_backend_ops(layout, kinds, n):
    """With f8_e4m3_128x128 the reference uses the weights as that layout rounds them."""
    for kind in kinds:
        for matrices in (1, 3):
            kernel = product(kind, 16, 256, n, shared=2, matrices=matrices, layout=layout)
            check(kernel, BACKEND_OPS, languages=NKI)
    check(product(kinds[0], 129, 1056, n, shared=4, matrices=2, layout=layout), BACKEND_OPS, languages=NKI)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 4, 5, 17, 32])
@pytest.mark.parametrize(("experts", "used"), [(4, 1), (4, 4), (8, 2)])
def test_products_by_experts_in_layouts_are_within_the_limit_of_test_backend_ops(experts, used, tokens):
    rng = np.random.default_rng(1)
    for kind in FLOATS:
        kernel = chosen(kind, 512, 256, experts, used, tokens, rows=used, layout=":transposed")
        numbers = np.stack([rng.permutation(experts)[:used] for _ in range(tokens)])
        check(kernel, BACKEND_OPS, languages=NKI, src2=numbers)


def test_the_hlo_of_a_kernel_in_nki_is_its_own():
    kernel, _ = CASES["rms_norm"]
    assert emit(kernel, NKI) != emit(kernel, ("jax",))
    assert emit(kernel, NKI) == emit.__wrapped__(kernel, NKI)


def emitted(kernel, targets):
    chosen = Catalog([LIBRARY]).choose(kernel, NKI, targets[0])
    assert chosen is not None
    return emission.emit_functions(kernel, {kernel.op: load_function(*chosen)}, "nki", targets)


@pytest.mark.parametrize("targets", [("trn1",), ("trn2",), ("trn1", "trn2")], ids="+".join)
@pytest.mark.parametrize(
    "name",
    [
        "mul_mat f16",
        "mul_mat q4_0",
        "mul_mat q4_1",
        "mul_mat q4_K",
        "mul_mat q5_1, several",
        "mul_mat q3_K, several",
        "mul_mat q5_K, several",
        "mul_mat q6_K",
        "mul_mat q8_0",
        "mul_mat_id bf16, fewer experts",
        "mul_mat_id q8_0",
        "prompt",
        "one token",
        "wide heads",
    ],
)
def test_a_kernel_in_nki_has_nothing_that_devices_or_their_tracer_were_seen_to_refuse(name, targets):
    notes = emitted(CASES[name][0], targets).notes["nki"]
    assert [note for note in notes if "accumulate" in note or "sums share" in note or "AWS's tracer" in note] == []


def test_every_product_of_a_kernel_in_nki_says_whether_it_adds():
    calls = [
        (path.name, node)
        for path in sorted(LIBRARY.root.glob("nki_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "nc_matmul"
    ]
    assert {name for name, _ in calls} == {"nki_attention.py", "nki_matmul.py"}
    assert [(name, call.lineno) for name, call in calls if "accumulate" not in {k.arg for k in call.keywords}] == []


def test_no_kernel_in_nki_transposes_by_dma():
    """A DMA of single elements takes 37 us for a transpose that takes the tensor engine 0.2 us."""
    texts = {path.name: path.read_text() for path in LIBRARY.root.glob("nki_*.py")}
    assert [name for name, text in texts.items() if re.search(r"\b(dma|load)_transpose", text)] == []
    assert {name for name, text in texts.items() if "nc_transpose(" in text} == {"nki_common.py"}


def moved(kernel):
    """Returns the bytes and DMA descriptors in a kernel's record."""
    (cost,) = emitted(kernel, ("trn1",)).notes["costs"]
    runs = cost["work"]["dma"]
    return sum(runs.values()), sum(n // int(run) for run, n in runs.items())


@pytest.mark.parametrize("kind", ["f16", "q4_K"])
def test_products_of_chosen_experts_move_what_these_have_however_many_there_are(kind):
    few, many, twice = (moved(chosen(kind, 40, 256, *n)) for n in ((8, 2, 4), (256, 2, 4), (256, 2, 8)))
    assert few == many
    assert [a / b for a, b in zip(twice, many, strict=True)] == pytest.approx([2, 2], rel=0.01)


def test_causal_attention_of_a_prompt_takes_a_third_less():
    """512 tokens and 512 keys: 10 of 16 products of 128 tokens and keys remain."""

    def columns(**params):
        (cost,) = emitted(attention("f16", 512, 512, heads=32, groups=8, **params), ("trn1",)).notes["costs"]
        return cost["instructions"]["tensor"]

    assert columns(causal=True) < 0.75 * columns()


def test_codes_go_to_the_tensor_engine_as_they_are_stored():
    """DMA moves one byte per weight. The vector engine processes the sums of tiles, but no weights."""
    kernel = product("q8_0", 512, 1024, 1, layout=F8)
    (cost,) = emitted(kernel, ("trn1",)).notes["costs"]
    work, weights = cost["work"], 512 * 1024
    assert weights < moved(kernel)[0] < 1.1 * weights
    elements = sum(n for kinds in (work["vector"], work["scalar"]) for n in kinds.values())
    assert elements < 0.25 * weights / 128


@pytest.mark.parametrize("rows", [32, 512])
def test_codes_for_many_rows_are_scaled_once_by_two_engines(rows):
    """Each engine scales half of them. The vector engine also copies the rows' 8 chunks from PSUM, and 512 results for
    128 rows.
    """
    kernel = product("q8_0", 512, 1024, rows, layout=F8)
    (cost,) = emitted(kernel, ("trn1",)).notes["costs"]
    half = 512 * 1024 // 128 // 2  # elements of a partition
    assert cost["work"]["scalar"] == {"one": half}
    assert cost["work"]["vector"] == {"one": half + 8 * rows + 512 * -(-rows // 128)}


@pytest.mark.parametrize(
    ("kind", "vector", "scalar"),
    [
        ("q4_0", 3, 6),
        ("q4_1", 4, 47),
        ("q5_1", 13, 47),
        ("q8_0", 1, 5),
        ("q4_K", 12, 46),
        ("q5_K", 21, 46),
        ("q6_K", 9, 6),
    ],
)
def test_vector_and_scalar_engine_share_what_unpacks_weights(kind, vector, scalar):
    """For 128 × 2,048 weights the scalar engine copies 4 banks of PSUM; its other instructions convert, copy or
    multiply.

    The vector engine also copies the rows' 16 chunks from PSUM in 4 instructions, and 256 results. No instruction reads
    two tiles in SBUF, except for the single bits of Q5_1, which take twice as long as with one tile in PSUM.
    """
    (cost,) = emitted(product(kind, 256, 2048, 1), ("trn1",)).notes["costs"]
    tiles = 2
    assert cost["instructions"]["vector"] == tiles * vector + 4 + 1
    assert cost["instructions"]["scalar"] == tiles * scalar
    assert set(cost["work"]["vector"]) == ({"one", "two"} if kind == "q5_1" else {"one"})
    assert cost["work"]["scalar"]["one"] > 0.5 * sum(cost["work"]["vector"].values())


def test_chosen_experts_are_slices_and_only_the_rows_of_tokens_a_gather():
    module = proto.parse(emitted(CASES["mul_mat_id f16"][0], ("trn1",)).hlo)
    opcodes = [i.opcode for computation in module.computations for i in computation.instructions]
    assert opcodes.count("gather") == 1
    assert "scatter" not in opcodes


@pytest.mark.parametrize(
    "kernel", [attention("f16", 1, 300), attention("f16", 70, 300), product("f16", 200, 160, 3)], ids=lambda k: k.id
)
def test_a_kernel_of_every_target_has_the_same_values(kernel):
    modules = [emitted(kernel, (target,)).hlo for target in ("trn1", "trn2")]
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape).astype(dtype) for _, dtype, shape in execute.parameters(modules[0])]
    first, second = (execute.run(module, inputs)[0] for module in modules)
    assert np.isfinite(first).all()
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("kernel", "language"),
    [
        (CASES["rms_norm"][0], "nki"),
        (spec("rms_norm", ["(20000,1,1,1)/f32"], "(20000,1,1,1)/f32", eps=1e-5), "jax"),
        (product("q8_0", 64, 64, 1), "nki"),
        (product("q4_K", 64, 256, 1), "nki"),
        (product("q5_K", 64, 256, 1), "nki"),
        (product("iq4_xs", 64, 256, 1), "jax"),
        (product("q4_K", 4096, 4096, 512, layout=F8), "nki"),
        (product("q6_K", 128256, 4096, 1, layout=F8), "jax"),
        (chosen("q8_0", 40, 256, 4, 2, 5, layout=F8), "jax"),
        (chosen("q4_K", 14336, 4096, 8, 2, 32), "nki"),
        (chosen("bf16", 768, 2048, 128, 8, 32), "nki"),
        (chosen("f16", 768, 2048, 128, 8, 33), "jax"),
        (chosen("f16", 2048, 7168, 256, 8, 32), "jax"),
        (product("f16", 64, 20000, 1), "jax"),
        (attention("f16", 512, 1024, heads=32, groups=8), "nki"),
        (attention("f16", 1, 32768, heads=32, groups=8), "nki"),
        (attention("f16", 1, 131072, heads=32, groups=8), "nki"),
        (attention("f16", 512, 4096, heads=32, groups=8), "nki"),
        (attention("f16", 512, 32768, heads=32, groups=8), "jax"),
        (attention("q8_0", 1, 64), "jax"),
    ],
)
def test_what_a_kernel_declines_is_for_the_next_language(kernel, language):
    (chosen,) = Catalog([LIBRARY]).kernels(kernel, ["nki", "jax"], ["trn1", "trn2"])
    assert chosen.language == language


@pytest.mark.long
def test_every_test_case_of_these_ops_passes_with_the_kernels_in_nki():
    here = Path(__file__).parent
    tests = [str(here / f"test_{family}.py") for family in ("norm", "softmax", "rope", "matmul", "attention")]
    environment = {**os.environ, "KERNELGEN_TEST_LANGUAGES": "nki,jax"}
    for name in ("TEST_TOTAL_SHARDS", "TEST_SHARD_INDEX", "TEST_SHARD_STATUS_FILE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", str(here.parent.parent / "pyproject.toml"), *tests],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
