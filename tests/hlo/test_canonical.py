"""The canonical form, checked on the bytes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from toys import canonical, raw, spec

from kernelgen import lowering
from kernelgen.emitters.catalog import Catalog
from kernelgen.emitters.library import builtin_library
from kernelgen.emitters.loading import load_function
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute, proto
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.spec.kernel import KernelSpec

F = "float32"
LIBRARY = builtin_library()


def attention() -> bytes:
    q, kv, mask = (TensorDesc.parse(t) for t in ("(16,5,8,1)/f32", "(16,12,2,1)/f16", "(12,5,1,1)/f16"))
    kernel = KernelSpec.make("flash_attn_ext", [q, kv, kv, mask], TensorDesc.parse("(16,8,5,1)/f32"), {"scale": 0.25})
    return lowering.emit(kernel, load_function(*Catalog([LIBRARY]).find(kernel.op)))


def by_name(module: bytes) -> dict[str, list[str]]:
    """Returns the entry's instructions: name → operand names."""
    entry = proto.entry(proto.parse(module))
    names = {i.id: i.name for i in entry.instructions}
    return {i.name: [names[o] for o in i.operand_ids] for i in entry.instructions}


def test_ids_are_dense_and_callees_come_first() -> None:
    def looped(x):  # type: ignore[no-untyped-def]
        return lax.fori_loop(0, 5, lambda _, y: y * 2 + jnp.max(y), x)

    data = canonical(looped, ((3,), F))
    module = proto.parse(data)
    instructions = [i for c in module.computations for i in c.instructions]
    assert [i.id for i in instructions] == list(range(1, len(instructions) + 1))
    order = [c.id for c in module.computations]
    assert order == list(range(1, len(order) + 1)) and module.entry_computation_id == order[-1]
    for c in module.computations:
        assert all(callee < c.id for i in c.instructions for callee in i.called_computation_ids)
    want = np.float32([1, 2, 3])
    for _ in range(5):
        want = want * 2 + want.max()
    np.testing.assert_array_equal(execute.run(data, [np.float32([1, 2, 3])])[0], want)


def test_nothing_tells_where_or_how_it_was_made() -> None:
    data = attention()
    for word in (b"/", b".py", b"jit", b"jax", b"attention", b"flash", b"xla"):
        assert word not in data
    module = proto.parse(data)
    assert (module.name, module.entry_computation_name, module.id) == ("kernel", "kernel", 0)
    assert not module.stack_frame_index and not module.frontend_attributes.map
    instructions = [i for c in module.computations for i in c.instructions]
    assert not any(i.metadata or i.backend_config or i.sharding for i in instructions)
    assert all(a.key.startswith("neff_") for i in instructions for a in i.frontend_attributes.map)


def test_names_are_the_neffs_tensors() -> None:
    module = proto.parse(attention())
    entry = proto.entry(module)
    parameters = proto.parameters(entry)
    assert [p.name for p in parameters] == ["input0", "input1", "input2", "input3"]
    assert [{a.key: a.value for a in p.frontend_attributes.map} for p in parameters] == [
        {"neff_input_names": f"input{i}"} for i in range(4)
    ]
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    assert {a.key: a.value for a in root.frontend_attributes.map} == {"neff_output_names": "output0"}
    assert list(module.host_program_shape.parameter_names) == [p.name for p in parameters]


def test_an_absent_input_keeps_the_numbers_of_the_others() -> None:
    tensors = [TensorDesc.parse(t) if t else None for t in ("(8,3,4,1)/f32", None, "(4,1,1,1)/f32")]
    kernel = KernelSpec.make("soft_max", tensors, TensorDesc.parse("(8,3,4,1)/f32"))
    module = proto.parse(lowering.emit(kernel, load_function(*Catalog([LIBRARY]).find("soft_max"))))
    assert [p.name for p in proto.parameters(proto.entry(module))] == ["input0", "input2"]


def test_an_in_place_result_is_recorded() -> None:
    data = lowering.emit(spec(["(4,1,1,1)/f32", "(4,1,1,1)/f32"], "(4,1,1,1)/f32", alias=1), lambda a, b: a + b)
    module = proto.parse(data)
    assert [p.name for p in proto.parameters(proto.entry(module))] == ["input0", "input1.must_alias_input"]
    (entry,) = module.input_output_alias.entries
    assert (list(entry.output_shape_index), entry.parameter_number, entry.kind) == ([], 1, 2)
    assert execute.run(data, [np.ones((1, 1, 1, 4), F)] * 2)[0].tolist() == [[[[2, 2, 2, 2]]]]


def test_several_results_are_a_tuple() -> None:
    data = canonicalize(raw(lambda a, b: (a + b, b), ((2,), F), ((2,), F)), ["input0", "input1"], aliases={1: 1})
    module = proto.parse(data)
    entry = proto.entry(module)
    root = entry.instructions[-1]
    assert root.opcode == "tuple" and root.id == entry.root_id
    assert {a.key: a.value for a in root.frontend_attributes.map} == {"neff_output_names": "output0,output1"}
    (alias,) = module.input_output_alias.entries
    assert (list(alias.output_shape_index), alias.parameter_number) == ([1], 1)
    # The second result is a parameter, so it is copied.
    assert by_name(data)[root.name][1].startswith("copy.")


STEP = spec(["(4,1,1,1)/f32"] * 4 + ["(7,1,1,1)/f32"], "(4,1,1,1)/f32", op="opt_step_adamw")


def test_what_an_op_changes_besides_its_result_is_a_result_of_its_own() -> None:
    data = lowering.emit(STEP, lambda w, grad, m, v, params: (w + grad, m + m, v * v))
    module = proto.parse(data)
    root = next(i for i in proto.entry(module).instructions if i.opcode == "tuple")
    assert root.frontend_attributes.map[0].value == "output0,input2.updated,input3.updated"
    pairs = [(list(e.output_shape_index), e.parameter_number) for e in module.input_output_alias.entries]
    assert pairs == [([0], 0), ([1], 2), ([2], 3)]


@pytest.mark.parametrize(
    "result, message",
    [
        (lambda w, m, v: w, "not a tuple of the result, the new input 2, the new input 3"),
        (lambda w, m, v: (w, m), "not a tuple of the result, the new input 2, the new input 3"),
        (lambda w, m, v: (w, m, v[..., :2]), r"float32\[1, 1, 1, 2\] as the new input 3"),
    ],
)
def test_a_missing_or_wrong_update_is_refused(result, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KernelgenError, match=message):
        lowering.emit(STEP, lambda w, grad, m, v, params: result(w, m, v))


@pytest.mark.parametrize("function", [lambda x: x, lambda x: lax.reshape(x, (3, 2))], ids=["itself", "reshaped"])
def test_a_parameter_returned_unchanged_is_copied(function) -> None:  # type: ignore[no-untyped-def]
    data = canonical(function, ((2, 3), F))
    entry = proto.entry(proto.parse(data))
    assert entry.instructions[-1].opcode == "copy" and entry.instructions[-1].id == entry.root_id
    x = np.arange(6, dtype=F).reshape(2, 3)
    np.testing.assert_array_equal(execute.run(data, [x])[0].reshape(-1), x.reshape(-1))


def test_unused_parameters_stay_and_dead_code_goes() -> None:
    def function(a, b, c):  # type: ignore[no-untyped-def]
        _ = jnp.exp(b)
        return a + 1

    names = by_name(canonical(function, ((2,), F), ((2,), F), ((2,), F)))
    assert list(names)[:3] == ["input0", "input1", "input2"]
    assert not any(name.startswith("exponential") for name in names)


def test_a_helper_function_leaves_no_trace() -> None:
    import jax

    @jax.jit
    def inner(x):  # type: ignore[no-untyped-def]
        return x * x

    @jax.jit
    def helper(x, y):  # type: ignore[no-untyped-def]
        return inner(x) + inner(y)

    arguments = (((3,), F), ((3,), F))
    called = raw(lambda x, y: helper(x, y), *arguments)
    assert any(i.opcode == "call" for c in proto.parse(called).computations for i in c.instructions)
    data = canonical(lambda x, y: helper(x, y), *arguments)
    assert data == canonical(lambda x, y: x * x + y * y, *arguments)
    assert len(proto.parse(data).computations) == 1
    assert execute.run(data, [np.full(3, 2, F), np.full(3, 3, F)])[0].tolist() == [13, 13, 13]


def test_the_order_of_writing_down_does_not_show() -> None:
    def one(a, b):  # type: ignore[no-untyped-def]
        x, y = jnp.exp(a), jnp.sin(b)
        return x - y

    def other(a, b):  # type: ignore[no-untyped-def]
        y = jnp.sin(b)
        x = jnp.exp(a)
        return x - y

    arguments = (((3,), F), ((3,), F))
    assert canonical(one, *arguments) == canonical(other, *arguments)
    assert canonical(one, *arguments) != canonical(lambda a, b: jnp.sin(b) - jnp.exp(a), *arguments)


def test_sorts_and_variadic_reductions_survive() -> None:
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(F)
    data = canonical(lambda a: (jnp.argmax(a, axis=1), jnp.sort(a, axis=1)), ((4, 5), F))
    index, ordered = execute.run(data, [x])
    np.testing.assert_array_equal(index, x.argmax(axis=1))
    np.testing.assert_array_equal(ordered, np.sort(x, axis=1))


def test_a_canonical_module_is_left_as_it_is() -> None:
    data = attention()
    assert canonicalize(data, [f"input{i}" for i in range(4)]) == data


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, b"nonsense", bytes(range(256))])
def test_bytes_that_are_not_a_module_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a serialized HloModuleProto"):
        canonicalize(data, [])


def test_a_name_for_each_parameter_is_needed() -> None:
    with pytest.raises(ValueError, match="has 2 parameters and 1 names were given"):
        canonicalize(raw(jnp.add, ((2,), F), ((2,), F)), ["input0"])
