"""Each rule of the lint reports a module that breaks it, and names the instruction."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from toys import canonical, raw

from kernelgen.compilers.base import refuse_unsupported
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto
from kernelgen.hlo.canonicalize import canonicalize
from kernelgen.hlo.lint import RULES, WARNING, errors, lint
from kernelgen.hlo.lint_checks import KNOWN_CUSTOM_CALLS
from kernelgen.targets import TARGETS

FLOAT, INT = "float32", "int32"
TRN1, TRN2, TRN3 = TARGETS["trn1"], TARGETS["trn2"], TARGETS["trn3"]


def edited(data: bytes, opcode: str, /, **fields: Any) -> bytes:
    """Returns a module with fields of its first instruction of an opcode replaced, for modules that JAX does not write."""
    module = proto.parse(data)
    instruction = next(i for c in module.computations for i in c.instructions if i.opcode == opcode)
    for name, value in fields.items():
        setattr(instruction, name, value)
    return proto.serialize(module)


def dynamic() -> bytes:
    module = proto.parse(canonical(jnp.exp, ((4,), FLOAT)))
    module.computations[0].instructions[1].shape.is_dynamic_dimension[:] = [True]
    return proto.serialize(module)


def dynamic_while() -> bytes:
    return canonical(
        lambda x, n: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 2), (0, x)),
        ((2,), FLOAT),
        ((), INT),
    )


def growing_while() -> bytes:
    return canonical(lambda x: lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y * 2, x), ((2,), FLOAT))


def callback() -> bytes:
    def function(x: Any) -> Any:
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((2,), FLOAT), x)

    return canonical(function, ((2,), FLOAT))


def conditional(x: Any) -> Any:
    return lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x)


def custom(target: str) -> bytes:
    """Returns a module with a custom call: a Cholesky factorization on the CPU, whose target is replaced."""
    return edited(canonical(jnp.linalg.cholesky, ((3, 3), FLOAT)), "custom-call", custom_call_target=target)


DOT = functools.partial(canonical, jnp.dot)


def in_place(edit: Callable[[Any], None]) -> bytes:
    """Returns an edited module that writes a row of its first input, a cache, in place."""

    def written(cache: Any, row: Any, at: Any) -> Any:
        return lax.dynamic_update_slice(cache, row, (at[0], np.int32(0)))

    arguments = ((16, 8), FLOAT), ((1, 8), FLOAT), ((1,), "int32")
    made = proto.parse(canonicalize(raw(written, *arguments), ["input0", "input1", "input2"], aliases={0: 0}))
    edit(made)
    return proto.serialize(made)


def shorter(module: Any) -> None:
    proto.parameters(proto.entry(module))[0].shape.dimensions[0] = 15


def elsewhere_written(module: Any) -> None:
    module.input_output_alias.entries[0].output_shape_index[:] = [3]


def elements(x: Any, i: Any, row: bool = False) -> Any:
    """Gathers elements of a table by their numbers, or its rows."""
    numbers = lax.GatherDimensionNumbers((1,) if row else (), (0,) if row else (0, 1), (0,) if row else (0, 1))
    sizes = (1, x.shape[1]) if row else (1, 1)
    return lax.gather(x, i, numbers, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


# rule, message, instruction, module, target
BROKEN = [
    ("kernelgen/id-32-bit", "does not fit 32 bits", "", lambda: raw(jnp.add, ((2,), FLOAT), ((2,), FLOAT)), None),
    (
        "kernelgen/id-32-bit",
        "instruction id -1 does not fit 32 bits",
        "",
        lambda: edited(canonical(jnp.exp, ((2,), FLOAT)), "exponential", id=-1),
        None,
    ),
    (
        "kernelgen/id-32-bit",
        "is used twice",
        "add.3 (add)",
        lambda: edited(canonical(jnp.add, ((2,), FLOAT), ((2,), FLOAT)), "add", id=2),
        None,
    ),
    (
        "kernelgen/unique-name",
        "two instructions",
        "input0 (add)",
        lambda: edited(canonical(jnp.add, ((2,), FLOAT), ((2,), FLOAT)), "add", name="input0"),
        None,
    ),
    (
        "kernelgen/alias",
        "no result is written",
        "input0.must_alias_input",
        lambda: in_place(lambda m: m.ClearField("input_output_alias")),
        None,
    ),
    ("kernelgen/alias", "has another shape or type", "input0.must_alias_input", lambda: in_place(shorter), None),
    (
        "kernelgen/alias",
        "has another shape or type",
        "input0.must_alias_input",
        lambda: in_place(elsewhere_written),
        None,
    ),
    (
        "kernelgen/i64-parameter",
        "64-bit integer parameter",
        "input0 (parameter)",
        lambda: canonical(jnp.negative, ((2,), "int64"), x64=True),
        None,
    ),
    (
        "kernelgen/empty-tensor",
        "the parameter f32[0,3] has no elements",
        "input1 (parameter)",
        lambda: canonical(lambda x, y: x + jnp.sum(y), ((2,), FLOAT), ((0, 3), FLOAT)),
        None,
    ),
    (
        "NCC_ESFH002",
        "above 2^32 - 1",
        "constant",
        lambda: canonical(lambda x: x + jnp.uint64(2**40), ((2,), "uint64"), x64=True),
        None,
    ),
    ("NCC_EMOD025", "f32[<=4] is dynamic", "exponential.2 (exponential)", dynamic, None),
    (
        "kernelgen/conditional",
        "cond is not supported",
        "(conditional)",
        lambda: canonical(conditional, ((2,), FLOAT)),
        None,
    ),
    ("kernelgen/while", "not a constant", "(while)", dynamic_while, None),
    ("kernelgen/while", "not a constant", "(while)", growing_while, None),
    (
        "kernelgen/reduce-precision",
        "not supported",
        "(reduce-precision)",
        lambda: canonical(lambda x: lax.reduce_precision(x, 5, 3), ((2,), FLOAT)),
        None,
    ),
    ("kernelgen/host", "calls back to the host", "(custom-call)", callback, None),
    (
        "kernelgen/integer-division",
        "a divide of s32 by 6284",
        "(divide)",
        lambda: canonical(lambda x: lax.div(x, jnp.int32(6284)), ((32,), INT)),
        None,
    ),
    (
        "kernelgen/integer-division",
        "a remainder of u16 by 3",
        "(remainder)",
        lambda: canonical(lambda x: lax.rem(x, jnp.array([2, 3], "uint16")), ((2,), "uint16")),
        None,
    ),
    (
        "kernelgen/integer-division",
        "by 3",
        "(remainder)",
        lambda: canonical(lambda x: x + lax.rem(lax.iota(INT, 4), jnp.int32(3)), ((4,), INT)),
        None,
    ),
    (
        "kernelgen/small-top-k",
        "the axis has 2 elements",
        "(sort)",
        lambda: canonical(jnp.sort, ((8, 2), FLOAT)),
        TRN1,
    ),
    (
        "kernelgen/small-top-k",
        "k is 2",
        "(custom-call)",
        lambda: edited(custom("AwsNeuronTopK"), "custom-call", backend_config=b"2"),
        None,
    ),
    (
        "kernelgen/element-gather",
        "16384 elements are gathered one by one",
        "(gather)",
        lambda: canonical(elements, ((64, 64), FLOAT), ((16384, 2), INT)),
        None,
    ),
    (
        "kernelgen/bf16-rounding",
        "nothing is rounded",
        "(convert)",
        lambda: canonical(lambda x: x.astype("bfloat16").astype(FLOAT) * 3, ((8,), FLOAT)),
        None,
    ),
    (
        "NCC_EBVF030",
        "about 7.0 million instructions",
        "module",
        lambda: DOT(((65536, 65536), "bfloat16"), ((65536, 8192), "bfloat16")),
        TRN1,
    ),
    (
        "kernelgen/descriptors",
        "about 30.0 million DMA descriptors",
        "module",
        lambda: canonical(lambda x, i: jnp.sum(x[i]), ((4096, 256), FLOAT), ((20_000_000,), INT)),
        TRN1,
    ),
    ("NCC_EVRF029", "sort is not supported on trn2", "(sort)", lambda: canonical(jnp.sort, ((8,), FLOAT)), TRN2),
]


@pytest.mark.parametrize("rule, message, instruction, module, target", BROKEN)
def test_a_rule_names_what_breaks_it(rule: str, message: str, instruction: str, module: Any, target: Any) -> None:
    found = [f for f in lint(module(), target) if f.rule == rule]
    assert found
    assert message in str(found[0]) and instruction in found[0].instruction
    assert found[0].hint


def test_every_rule_that_aws_publishes_no_code_for_is_broken_above() -> None:
    """tests/hlo/test_lint_published.py breaks the rules with published codes, and the rule of replica groups."""
    own = {r.name for r in RULES if r.name.startswith("kernelgen/")}
    assert own - {rule for rule, *_ in BROKEN} == {"kernelgen/replica-groups"}


def test_every_rule_says_how_it_is_known_and_what_it_refuses() -> None:
    assert all(rule.evidence and rule.what and rule.hint for rule in RULES)
    measured = {"integer-division", "small-top-k", "element-gather", "bf16-rounding"}
    assert {rule.name for rule in RULES if rule.severity == WARNING} == {
        "NCC_EBVF030",
        *(f"kernelgen/{name}" for name in ("i64-parameter", "descriptors", *measured)),
    }


def test_a_limit_that_a_flag_sets_is_not_warned_of() -> None:
    hlo = DOT(((65536, 65536), "bfloat16"), ((65536, 8192), "bfloat16"))
    assert lint(hlo, TRN1, flags=["--internal-max-instruction-limit=30000000"]) == []
    assert lint(hlo, TRN2) == [], "two cores share it"
    assert [f.rule for f in lint(hlo, TRN2, lnc=1)] == ["NCC_EBVF030"]


def test_a_caution_is_not_an_error() -> None:
    hlo = canonical(jnp.negative, ((2,), "int64"), x64=True)
    (finding,) = lint(hlo, TRN1)
    assert (finding.rule, finding.severity) == ("kernelgen/i64-parameter", WARNING)
    assert errors([finding]) == []
    (line,) = refuse_unsupported(hlo, CompileConfig.make("trn1"), "k")
    assert line.startswith(
        "kernel k for trn1: [kernelgen/i64-parameter] input0 (parameter): a 64-bit integer parameter"
    )
    assert line.endswith("(take pairs of i32 and use the lower word)")
    f64 = canonical(jnp.exp, ((2,), "float64"), x64=True)
    assert [f.severity for f in lint(f64)] and errors(lint(f64)) == lint(f64)
    with pytest.raises(KernelgenError, match="NCC_ESPP004"):
        refuse_unsupported(f64, CompileConfig.make("trn1"), "k")


def zero_id() -> bytes:
    """Returns a module with XLA's numbering: from 0, and the computation's id is not among them."""
    module = proto.parse(canonical(jnp.exp, ((2,), FLOAT)))
    (computation,) = module.computations
    for i in computation.instructions:
        i.id -= 1
        i.operand_ids[:] = [n - 1 for n in i.operand_ids]
    computation.root_id -= 1
    return proto.serialize(module)


@pytest.mark.parametrize("target", sorted(KNOWN_CUSTOM_CALLS))
def test_custom_calls_that_aws_lists_are_known(target: str) -> None:
    assert errors(lint(custom(target), TRN2)) == []


def test_the_list_of_custom_calls_is_aws_s() -> None:
    """The list has 29 entries; five of them are in public modules that were compiled. No other target is known."""
    assert len(KNOWN_CUSTOM_CALLS) == 29
    (finding,) = errors(lint(custom("AwsNeuronGelu2"), TRN2))
    assert finding.rule == "NCC_EVRF015"


@pytest.mark.parametrize(
    "module, target",
    [
        (lambda: canonical(lambda x: lax.fori_loop(0, 5, lambda _, y: y * 2, x), ((2,), FLOAT)), None),
        (lambda: canonical(lambda x, i: x.at[i].set(1), ((8,), INT), ((3,), INT)), None),
        (lambda: canonical(jnp.sort, ((8,), FLOAT)), None),  # the target is not known yet
        (lambda: canonical(jnp.argmax, ((8,), FLOAT)), None),
        (zero_id, None),
        (lambda: DOT(((2, 2), INT), ((2, 2), INT)), None),  # the target is not known yet
        (lambda: canonical(lambda x: lax.div(x, jnp.int32(4096)), ((32,), INT)), TRN1),
        (lambda: canonical(lambda x: lax.div(x, jnp.float32(3)), ((32,), FLOAT)), TRN1),
        (lambda: canonical(lambda x: x + lax.rem(lax.iota(INT, 3), jnp.int32(3)), ((3,), INT)), TRN1),
        (lambda: canonical(elements, ((64, 64), FLOAT), ((1024, 2), INT)), TRN1),
        (lambda: canonical(functools.partial(elements, row=True), ((64, 64), FLOAT), ((16384, 1), INT)), TRN1),
        (lambda: canonical(jnp.sort, ((8, 3), FLOAT)), TRN1),
        (lambda: edited(custom("AwsNeuronTopK"), "custom-call", backend_config=b"10"), TRN1),
        (lambda: canonical(lambda x: x.astype("bfloat16") * 3, ((8,), FLOAT)), TRN1),
        (lambda: canonical(lambda x: (x.astype("bfloat16") * 3).astype(FLOAT), ((8,), FLOAT)), TRN1),
    ],
)
def test_what_is_taken_is_not_complained_about(module: Any, target: Any) -> None:
    assert lint(module(), target) == []


def test_a_file_that_is_not_a_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a serialized HloModuleProto"):
        lint(b"nonsense")


def test_a_loop_that_counts_down_is_static() -> None:
    def down(x: Any) -> Any:
        return lax.while_loop(lambda s: s[0] > 0, lambda s: (s[0] - 1, s[1] * 2), (5, x))

    assert lint(canonical(down, ((2,), FLOAT))) == []
