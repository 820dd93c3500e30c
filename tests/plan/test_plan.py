"""The identity of a kernel: equal descriptions have one id, and different ones have different ids."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.ggml import ops
from kernelgen.ggml.tensor import TensorDesc, dense_strides
from kernelgen.ggml.types import TYPES
from kernelgen.plan import Kernel, Plan, Request
from kernelgen.spec.kernel import MAX_ID, GraphSpec, KernelSpec, UnnumberedNode, UnnumberedTensor, spec_from_ggml
from kernelgen.targets import TARGETS

F32 = st.floats(width=32, allow_nan=False)
ELEMENTWISE = (("kernelgen", "elementwise"),)
NE = st.tuples(*[st.integers(1, 64)] * 4)


def add(ne: tuple[int, int, int, int] = (4, 3, 2, 1)) -> KernelSpec:
    tensor = TensorDesc.make(ne, "f32")
    return KernelSpec.make("add", [tensor, tensor], tensor)


@given(F32, st.floats(-0.4, 0.4))
def test_doubles_that_round_to_the_same_binary32_are_the_same_parameter(value: float, ulps: float) -> None:
    beside = value + ulps * math.ulp(value)
    bits = struct.pack("<f", value)
    try:
        same = struct.pack("<f", beside) == bits
    except OverflowError:
        same = False
    if same:
        assert ops.f32_shortest(beside) == ops.f32_shortest(value)
    assert struct.pack("<f", ops.f32_shortest(value)) == bits


def test_a_parameter_is_written_with_the_fewest_digits() -> None:
    assert ops.f32_shortest(9.999999747378752e-06) == 1e-05
    assert ops.f32_shortest(0.08838834764831845) == ops.f32_shortest(0.0883883461356163)


@given(st.sampled_from(sorted(ops.OPS)), st.data())
def test_op_params_survive_the_way_through_ggmls_words(name: str, data: st.DataObject) -> None:
    op = ops.OPS[name]
    kinds = {int: st.integers(-(2**31), 2**31 - 1), float: F32, bool: st.booleans()}
    params = op.with_defaults({p.name: data.draw(kinds[p.kind]) for p in op.params})
    assert op.decode(op.encode(params)) == params


def test_a_word_that_has_no_name_is_kept() -> None:
    words = [0] * 16
    words[9] = 7
    assert ops.OPS["flash_attn_ext"].decode(words)["word9"] == 7
    with_it, without = (
        KernelSpec.make("mul_mat", [], TensorDesc.make((1, 1, 1, 1), "f32"), params) for params in ({"word9": 3}, {})
    )
    assert with_it.id != without.id
    assert with_it.op_params[9] == 3


def test_a_custom_op_keeps_its_parameters_and_has_no_words() -> None:
    tensor = TensorDesc.make((4, 3, 1, 1), "f32")
    spec = KernelSpec.make("my_bias", [tensor, None], tensor, {"n": 0, "c": 0.1, "exact": False})
    assert spec.params == (("c", 0.1), ("exact", False), ("n", 0))
    assert spec.id == "my_bias-4x3-f32-91220da0a727"
    assert (spec.op_params, spec.alias, spec.updates) == ((0,) * 16, None, ())


@given(NE, st.sampled_from([t for t, v in TYPES.items() if not v.quantized]))
def test_dense_strides_are_not_written(ne: tuple[int, int, int, int], dtype: str) -> None:
    tensor = TensorDesc.make(ne, dtype, dense_strides(ne, dtype))
    assert tensor.contiguous and str(tensor).count("/") == 1
    assert TensorDesc.parse(str(tensor)) == tensor
    assert tensor.storage_bytes == tensor.elements * TYPES[dtype].size


@given(NE, st.permutations([0, 1, 2, 3]))
def test_permuted_views_read_back_and_cover_their_storage(ne: tuple[int, ...], order: list[int]) -> None:
    dense = dense_strides(ne, "f16")  # type: ignore[arg-type]
    view = TensorDesc.make([ne[i] for i in order], "f16", [dense[i] for i in order])
    assert TensorDesc.parse(str(view)) == view
    assert view.storage_bytes == 2 * math.prod(ne)


def test_the_stride_of_a_dimension_of_one_element_means_nothing() -> None:
    one = TensorDesc.make((128, 1, 32, 1), "f32", (4, 16384, 512, 16384))
    other = TensorDesc.make((128, 1, 32, 1), "f32")
    assert one == other and str(one) == "(128,1,32,1)/f32"
    assert TensorDesc.make((128, 1, 32, 1), "f32", (4, 3, 512, -1)) == other


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(4,4,4)/f32", "expected"),
        ("(4,4,4,0)/f32", "positive"),
        ("(4,4,4,-1)/f32", "positive"),
        ("(4,4,4,4)/f33", "unknown dtype 'f33'"),
        ("(31,4,4,4)/q4_0", "multiple of its block size 32"),
        ("(4,4,4,4)/f32/(2,16,64,256)", "multiples of 4"),
        ("(9223372036854775807,9,1,1)/f32", "larger than"),
        ("(64,2,1,1)/q4_0/(20,40,80,80)", "nb0 is 18"),
    ],
)
def test_a_text_that_is_not_a_tensor_is_an_error_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorDesc.parse(text)


def test_ids_are_short_and_readable() -> None:
    spec = add((123456789, 123456789, 1, 3))
    assert spec.id.startswith("add-123456789x123456789x1x3-f32-") and len(spec.id) <= MAX_ID
    long = KernelSpec.make("x" * 80, [], TensorDesc.make((1, 1, 1, 1), "f32"))
    assert len(long.id) == MAX_ID


def test_defaults_and_trailing_absent_inputs_make_no_difference() -> None:
    x = TensorDesc.make((8, 4, 1, 1), "f32")
    plain = KernelSpec.make("soft_max", [x], x)
    assert plain == KernelSpec.make("soft_max", [x, None, None], x, {"scale": 1.0, "max_bias": 0.0})
    assert plain.id != KernelSpec.make("soft_max", [x, None, x], x).id


def test_ops_that_ggml_defines_in_place_alias_by_themselves() -> None:
    cache = TensorDesc.make((8, 16, 1, 1), "f16")
    row, index = TensorDesc.make((8, 1, 1, 1), "f32"), TensorDesc.make((1, 1, 1, 1), "i64")
    assert KernelSpec.make("set_rows", [row, index, cache], cache).alias == 2


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_a_plan_does_not_depend_on_the_order_or_the_repetition_of_kernels(sizes: list[int]) -> None:
    def plan(order: list[int]) -> str:
        kernels = tuple(Kernel(add((n, 1, 1, 1)), ELEMENTWISE) for n in order)
        return Plan.merge([Request("m", kernels, (CompileConfig.make("trn1"),))]).to_json()

    assert plan(sizes) == plan(sorted(set(sizes), reverse=True))


def test_manifests_share_kernels_and_compiles_and_the_larger_need_wins() -> None:
    both, own = Kernel(add((1, 1, 1, 1)), ELEMENTWISE), Kernel(add((2, 1, 1, 1)), ELEMENTWISE)
    config = CompileConfig.make("trn1")
    plan = Plan.merge(
        [
            Request("a", (both,), (config,), memory_mb=1000, cpus=3),
            Request("b", (both, own), (config, CompileConfig.make("trn1", optlevel=1)), memory_mb=2000),
        ]
    )
    assert len(plan.kernels) == 2
    shared = next(n for n in plan.neffs if n.kernel == both.spec.id and n.config == "trn1")
    assert (shared.memory_mb, shared.cpus) == (2000, 3)
    assert Plan.from_json(plan.to_json()) == plan


def test_a_compile_of_many_layers_is_counted_for_more_memory() -> None:
    def kernel(layers: int, dtype: str) -> Kernel:
        weights, x = TensorDesc.make((4096, 14336, 1, 1), dtype), TensorDesc.make((4096, 1, 1, 1), "f32")
        made = TensorDesc.make((14336, 1, 1, 1), "f32")
        nodes = [
            UnnumberedNode(
                "mul_mat", (UnnumberedTensor(f"w{n}", 0, weights), UnnumberedTensor("x", 0, x)), made, {}, escapes=True
            )
            for n in range(layers)
        ]
        return Kernel(GraphSpec.make(nodes), (("kernelgen", "matmul"),))

    def memory(layers: int, dtype: str = "f16", model_type: str = "generic", memory_mb: int | None = None) -> int:
        config = CompileConfig.make("trn1", model_type=model_type)
        request = Request("m", (kernel(layers, dtype),), (config,), memory_mb=memory_mb)
        (neff,) = Plan.merge([request]).neffs
        return neff.memory_mb

    assert memory(1) == memory(3, model_type="transformer") == TARGETS["trn1"].memory_per_compile_mb
    # 3584 tiles of weights, 2 instructions for each, and 896 products: 1.5 times that, and 20 KiB for each.
    assert memory(100) == 1024 + int(100 * (2 * 3584 + 896) * 1.5 * 20 / 1024)
    assert memory(100, model_type="transformer") == 1024 + int(100 * (2 * 3584 + 896) * 1.5 * 12 / 1024)
    assert memory(100, "q4_K") > 1.9 * memory(100)
    assert memory(100, memory_mb=2000) == 2000


def test_settings_other_than_the_defaults_have_a_key_of_their_own() -> None:
    assert CompileConfig.make("trn2").key == "trn2"
    assert CompileConfig.make("trn2", lnc=1).key not in ("trn2", CompileConfig.make("trn2", optlevel=1).key)


def test_settings_that_collided_in_24_bits_are_distinguished() -> None:
    first, second = (CompileConfig.make("trn1", extra_flags=(f"--verbose=x{n}",)) for n in (1806, 2489))
    assert first.key != second.key and len(first.key) == len("trn1-") + 12
    plan = Plan.merge([Request(name, (Kernel(add(), ELEMENTWISE),), (c,)) for name, c in (("a", first), ("b", second))])
    assert len(plan.configs) == len(plan.neffs) == len(plan.bundles) == 2


def test_unequal_things_of_one_id_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    other = add((8, 1, 1, 1))
    object.__setattr__(other, "id", add().id)
    with pytest.raises(KernelgenError, match=f"two kernel.* that are not equal have the id {add().id}"):
        Plan.merge(
            [Request("a", (Kernel(add(), ELEMENTWISE), Kernel(other, ELEMENTWISE)), (CompileConfig.make("trn1"),))]
        )
    monkeypatch.setattr(CompileConfig, "key", "trn1-0")
    configs = CompileConfig.make("trn1"), CompileConfig.make("trn1", optlevel=1)
    with pytest.raises(KernelgenError, match="two settings that are not equal have the id trn1-0"):
        Plan.merge([Request(name, (Kernel(add(), ELEMENTWISE),), (c,)) for name, c in zip("ab", configs, strict=True)])


@pytest.mark.parametrize("name", ['q"uote', "back\\slash", "line\nbreak", "ä"])
def test_any_name_of_a_library_is_valid_json(name: str) -> None:
    plan = Plan.merge([Request("a", (Kernel(add(), ((name, name),)),), (CompileConfig.make("trn1"),))])
    assert Plan.from_json(plan.to_json()) == plan


def test_a_graph_node_in_ggmls_numbers_is_the_kernel_of_the_same_description() -> None:
    words = [925353388] + [0] * 15
    node = spec_from_ggml(25, words, [(0, (4096, 512, 1, 1), (4, 16384, 8388608, 8388608))], (0, (4096, 512, 1, 1)))
    x = TensorDesc.parse("(4096,512,1,1)/f32")
    assert node == KernelSpec.make("rms_norm", [x], x, {"eps": 1e-5})


def test_every_infinity_and_nan_has_json() -> None:
    x = TensorDesc.make((4, 1, 1, 1), "f32")
    spec = KernelSpec.make("clamp", [x], x, {"min": -math.inf, "max": math.inf})
    assert KernelSpec.from_json(json.loads(spec.json)) == spec


def test_ids_are_the_same_in_processes_with_other_hash_seeds() -> None:
    code = "from kernelgen.ggml.tensor import *; from kernelgen.spec.kernel import *; t = TensorDesc.make((4, 3, 2, 1), 'f32'); print(KernelSpec.make('add', [t, t], t).id)"
    ids = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "77")
    }
    assert ids == {add().id}
