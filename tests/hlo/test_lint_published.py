"""AWS's published error codes: a module that a code's page refuses gets that code, and a similar valid module passes."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import pytest
from modules import module, set_shape
from toys import canonical

from kernelgen.hlo import lint_mx, proto
from kernelgen.hlo.lint import ERROR, RULES, WARNING, errors, lint
from kernelgen.hlo.lint_checks import FP8_FLAG
from kernelgen.hlo.linted import LintedModule
from kernelgen.targets import TARGETS


def convolution(**window: int) -> str:
    dimension = json.dumps({"size": 3, **window}).replace(" ", "")
    return f"""
        x = f32[1,4,4,1] parameter()
        k = f32[3,3,1,1] parameter()
        y = f32[1,4,4,1] convolution(x, k) window={{"dimensions":[{dimension},{dimension}]}}
    """


def windowed(inputs: int = 1, **window: int) -> str:
    dimension = json.dumps({"size": 1, **window}).replace(" ", "")
    names = ", ".join([*(f"x{n}" for n in range(inputs)), *(f"z{n}" for n in range(inputs))])
    lines = [f"x{n} = f32[1,4,4,1] parameter()" for n in range(inputs)]
    lines += [f"z{n} = f32[] constant()" for n in range(inputs)]
    return "\n".join([*lines, f'y = f32[1,4,4,1] reduce-window({names}) window={{"dimensions":[{dimension}]}}'])


def unary(opcode: str, kind: str, result: str | None = None, fields: str = "") -> str:
    return f"x = {kind} parameter()\ny = {result or kind} {opcode}(x) {fields}"


def binary(opcode: str, kind: str, other: str | None = None) -> str:
    return f"x = {kind} parameter()\nz = {other or kind} parameter()\ny = {kind} {opcode}(x, z)"


def call(target: str, kind: str) -> str:
    return f'x = {kind} parameter()\ny = {kind} custom-call(x) custom_call_target="{target}" backend_config=10'


def gather(operand: str, count: int, computed: str = "") -> str:
    index = "clamped" if computed else "flat"
    return f"""
        x = {operand} parameter()
        i = s32[{count}] iota() dimensions=[0]
        flat = s32[{count},1] reshape(i)
        {computed and f"two = s32[{count},1] constant()"}
        {computed and f"clamped = s32[{count},1] minimum(flat, two)"}
        y = f32[{count},4] gather(x, {index}) gather={{"start_index_map":[0],"index_vector_dim":1}} gather_slice_sizes=[1,4]
    """


def pairs(order: str) -> str:
    """Returns a gather by two columns: one counts to 9, the other is a parameter."""
    return f"""
        x = f32[3,16,4] parameter()
        p = s32[10,1] parameter()
        i = s32[10,1] iota() dimensions=[0]
        both = s32[10,2] concatenate({order}) dimensions=[1]
        y = f32[10,4] gather(x, both) gather={{"start_index_map":[0,1],"index_vector_dim":1}} gather_slice_sizes=[1,1,4]
    """


def scatter(operand: str, count: int) -> str:
    numbers = '{"scatter_dims_to_operand_dims":[0],"index_vector_dim":1}'
    return f"""
        x = {operand} parameter()
        u = f32[{count},4] parameter()
        i = s32[{count}] iota() dimensions=[0]
        flat = s32[{count},1] reshape(i)
        y = {operand} scatter(x, flat, u) scatter={numbers}
    """


def scattered(kind: str) -> str:
    numbers = '{"scatter_dims_to_operand_dims":[0],"index_vector_dim":1}'
    return f"""
        x = {kind}[8] parameter()
        i = s32[3,1] parameter()
        u = {kind}[3] parameter()
        y = {kind}[8] scatter(x, i, u) scatter={numbers}
    """


def dot(kind: str, result: str = "f32[2,4]", left: str = "2,3", right: str = "3,4") -> str:
    return f"""
        x = {kind}[{left}] parameter()
        z = {kind}[{right}] parameter()
        y = {result} dot(x, z) dot={{"lhs_contracting":[1],"rhs_contracting":[0]}}
    """


def held(gib_in: int, gib_out: int, aliased: bool = False) -> bytes:
    made = module(
        unary("custom-call", f"u8[{gib_in << 30}]", f"u8[{gib_out << 30}]", 'custom_call_target="AwsNeuronErf"')
    )
    if not aliased:
        return made
    changed = proto.parse(made)
    changed.input_output_alias.entries.add(kind=proto.MUST_ALIAS)
    return proto.serialize(changed)


def quantize(
    *, given: str = "bf16[64,128]", result: str = "(u32[64,32], u8[64,4])", more: str = "", **config: Any
) -> bytes:
    settings = {"dtype": "float8_e4m3fn", "dim": -1, "block_size": 32, "scale_method": "EMAX"} | config
    text = config["text"] if "text" in config else json.dumps({k: v for k, v in settings.items() if v is not None})
    operands = "x, z" if more else "x"
    return module(
        f"""
        x = {given} parameter()
        {more}
        y = {result} custom-call({operands}) custom_call_target="QuantizeMX" backend_config={text.replace(" ", "") or '""'}
        """
    )


def scaled(
    *,
    sizes: tuple[str, str] = ("64,32", "48,32"),
    lhs: str = "u32",
    result: str = "f32[64,48]",
    text: str = "",
    drop: int = 0,
    **config: Any,
) -> bytes:
    inner = {"lhs_batch_dimensions": [], "rhs_batch_dimensions": [], "lhs_contracting_dimensions": [1]}
    inner |= {"rhs_contracting_dimensions": [1], "element_dtype": "float8_e4m3fn"} | config
    text = text or json.dumps({"scaled_dot_backend_config": inner}).replace(" ", "")
    operands = ", ".join("abcd"[: 4 - drop])
    return module(
        f"""
        a = {lhs}[{sizes[0]}] parameter()
        b = u32[{sizes[1]}] parameter()
        c = u8[64,4] parameter()
        d = u8[48,4] parameter()
        y = {result} custom-call({operands}) custom_call_target="__op$block_scaled_dot" backend_config={text}
        """
    )


SHIFT = "shift-right-arithmetic"

# code, module as text or bytes, target, whether it is refused; a tuple adds the opcode of the combiner
CASES: list[tuple[str, Any, str, bool]] = [
    ("NCC_EVRF006", "s = u64[2] parameter()\ny = u32[4] rng-bit-generator(s) rng_algorithm=1", "trn1", True),
    ("NCC_EVRF006", "s = u64[2] parameter()\ny = u32[4] rng-bit-generator(s)", "trn1", False),
    ("NCC_EVRF010", convolution(base_dilation=2, window_dilation=2), "trn1", True),
    ("NCC_EVRF010", convolution(base_dilation=2, window_dilation=1), "trn1", False),
    ("NCC_EVRF011", convolution(base_dilation=2, stride=2), "trn2", True),
    ("NCC_EVRF011", convolution(stride=2), "trn2", False),
    ("NCC_EVRF013", call("AwsNeuronTopK", "s32[4,64]"), "trn1", True),
    ("NCC_EVRF013", call("AwsNeuronTopK", "f32[4,64]"), "trn1", False),
    ("NCC_EVRF017", (windowed(base_dilation=2), "add"), "trn1", True),
    ("NCC_EVRF017", (windowed(base_dilation=1), "add"), "trn1", False),
    ("NCC_EVRF018", (windowed(window_dilation=2), "add"), "trn1", True),
    ("NCC_EVRF018", (windowed(window_dilation=1), "add"), "trn1", False),
    ("NCC_EVRF019", (windowed(2), "add"), "trn1", True),
    ("NCC_EVRF019", (windowed(1), "add"), "trn1", False),
    ("NCC_EVRF022", binary(SHIFT, "s16[8]"), "trn1", True),
    ("NCC_EVRF022", binary(SHIFT, "s32[8]"), "trn1", False),
    ("NCC_EVRF031", (scatter("f32[3,4]", 10), "parameter"), "trn1", True),
    ("NCC_EVRF031", (scatter("f32[3,4]", 3), "parameter"), "trn1", False),
    ("NCC_EVRF056", gather("f32[3,4]", 10), "trn1", True),
    ("NCC_EVRF056", gather("f32[3,4]", 10, "min"), "trn1", False),
    ("NCC_EVRF056", pairs("i, p"), "trn1", True),
    ("NCC_EVRF056", pairs("p, i"), "trn1", False),
    ("NCC_EVRF061", (unary("all-reduce", "s32[8]"), "add"), "trn1", True),
    ("NCC_EVRF061", (unary("all-reduce", "f32[8]"), "add"), "trn1", False),
    ("NCC_EVRF063", (unary("reduce-scatter", "s32[8]"), "add"), "trn1", True),
    ("NCC_EVRF063", (unary("reduce-scatter", "f32[8]"), "add"), "trn1", False),
    ("NCC_EVRF062", binary("power", "s64[8]"), "trn1", True),
    ("NCC_EVRF062", binary("power", "s32[8]"), "trn1", False),
    ("NCC_EVRF064", binary("add", "f32[8]", "f32[4]"), "trn1", True),
    ("NCC_EVRF064", binary("add", "f32[8]"), "trn1", False),
    ("NCC_EVRF064", dot("f32", "f32[2,5]"), "trn1", True),
    ("NCC_EVRF064", unary("transpose", "f32[2,3]", "f32[2,3]", "dimensions=[1,0]"), "trn1", True),
    ("NCC_EVRF064", unary("transpose", "f32[2,3]", "f32[3,2]", "dimensions=[1,0]"), "trn1", False),
    ("NCC_EVRF064", unary("reshape", "f32[2,3]", "f32[7]"), "trn1", True),
    ("NCC_EVRF064", unary("reshape", "f32[2,3]", "f32[6]"), "trn1", False),
    ("NCC_ESPP004", unary("convert", "f32[8]", "f4e2m1fn[8]"), "trn3", True),
    ("NCC_ESPP004", unary("convert", "f32[8]", "f64[8]"), "trn1", True),
    ("NCC_ESPP004", unary("convert", "f32[8]", "bf16[8]"), "trn1", False),
    ("NCC_EOOM001", held(128, 1), "trn2", True),
    ("NCC_EOOM001", held(9, 9), "trn1", True),
    ("NCC_EOOM001", held(9, 9), "trn2", False),
    ("NCC_EOOM001", held(9, 9, aliased=True), "trn1", False),
    ("NCC_EVRF001", unary("triangular-solve", "f32[4,4]"), "trn1", True),
    ("NCC_EVRF001", dot("f32"), "trn1", False),
    ("NCC_EVRF004", unary("custom-call", "c64[4]", None, 'custom_call_target="AwsNeuronErf"'), "trn1", True),
    ("NCC_EVRF004", unary("negate", "f32[4]"), "trn1", False),
    *(
        ("NCC_EVRF005", unary("convert", "f32[4]", f"{t}[4]"), "trn3", True)
        for t in ("f8e4m3fnuz", "f8e4m3b11fnuz", "f8e5m2fnuz")
    ),
    ("NCC_EVRF005", unary("convert", "f32[4]", "f16[4]"), "trn3", False),
    ("NCC_EVRF051", unary("convert", "f8e4m3fn[4]", "f32[4]"), "trn2", True),
    ("NCC_EVRF051", unary("convert", "f8e4m3fn[4]", "f32[4]"), "trn3", False),
    ("NCC_EVRF015", call("UNRECOGNIZED_TARGET", "f32[4]"), "trn1", True),
    ("NCC_EVRF015", call("AwsNeuronSilu", "f32[4]"), "trn1", False),
    *(("NCC_EVRF016", (scattered("s32"), c), "trn1", True) for c in ("add", "multiply", "minimum", "maximum")),
    ("NCC_EVRF016", (scattered("pred"), "or"), "trn1", True),
    ("NCC_EVRF016", (scattered("f32"), "add"), "trn1", False),
    ("NCC_EVRF016", (scattered("s32"), "parameter"), "trn1", False),
    ("NCC_EVRF035", dot("s32", "s32[2,4]"), "trn2", True),
    ("NCC_EVRF035", dot("s64", "s64[2,4]"), "trn1", True),
    ("NCC_EVRF035", dot("s32", "s32[2,4]"), "trn1", False),
    ("NCC_EMOD025", unary("negate", "f32[4]"), "trn1", False),
    # MX: each case differs from a valid one in one thing
    *((code, quantize(), "trn3", False) for code in lint_mx.RULES),
    *((code, scaled(), "trn3", False) for code in ("NCC_EVRF015", *lint_mx.RULES)),
    ("NCC_EVRF015", quantize(), "trn3", False),
    ("NCC_EVRF036", quantize(text="{"), "trn3", True),
    ("NCC_EVRF036", quantize(block_size=None, scale_method=None), "trn3", False),
    ("NCC_EVRF037", quantize(more="z = bf16[64,128] parameter()"), "trn3", True),
    ("NCC_EVRF038", quantize(dim=None, given="bf16[2,64,128]", result="(u32[2,64,32], u8[2,64,4])"), "trn3", True),
    ("NCC_EVRF038", quantize(dim=2), "trn3", True),
    ("NCC_EVRF038", quantize(dim=-2, result="(u32[16,128], u8[2,128])"), "trn3", False),
    ("NCC_EVRF039", quantize(block_size=16), "trn3", True),
    ("NCC_EVRF040", quantize(scale_method="MAX"), "trn3", True),
    ("NCC_EVRF041", quantize(given="f32[64,128]"), "trn3", True),
    ("NCC_EVRF041", quantize(given="f16[64,128]"), "trn3", False),
    ("NCC_EVRF042", quantize(dtype=None), "trn3", True),
    ("NCC_EVRF042", quantize(dtype="float8_e5m2"), "trn3", False),
    ("NCC_EVRF042", quantize(result="(u8[64,32], u8[64,4])"), "trn3", True),
    ("NCC_EVRF057", quantize(result="(u32[64,32], u8[64,4], u8[1])"), "trn3", True),
    ("NCC_EVRF058", quantize(given="bf16[64,126]"), "trn3", True),
    ("NCC_EVRF043", scaled(drop=1), "trn3", True),
    ("NCC_EVRF044", scaled(lhs="u8"), "trn3", True),
    ("NCC_EVRF045", scaled(result="f16[64,48]"), "trn3", True),
    ("NCC_EVRF045", scaled(result="bf16[64,48]"), "trn3", False),
    ("NCC_EVRF046", scaled(sizes=("64", "48,32")), "trn3", True),
    ("NCC_EVRF047", scaled(sizes=("64,32", "48")), "trn3", True),
    ("NCC_EVRF048", scaled(sizes=("2,32", "3,32"), lhs_batch_dimensions=[0], rhs_batch_dimensions=[0]), "trn3", True),
    ("NCC_EVRF048", scaled(sizes=("2,32", "2,32"), lhs_batch_dimensions=[0], rhs_batch_dimensions=[0]), "trn3", False),
    ("NCC_EVRF049", scaled(text="{"), "trn3", True),
    ("NCC_EVRF049", scaled(text="None"), "trn3", False),
    ("NCC_EVRF050", scaled(sizes=("64,32", "48,16")), "trn3", True),
    ("NCC_EVRF053", scaled(sizes=("64,32", "32,32"), lhs_batch_dimensions=[1], rhs_batch_dimensions=[0]), "trn3", True),
    ("NCC_EVRF054", scaled(lhs_batch_dimensions=[2], rhs_batch_dimensions=[0]), "trn3", True),
    ("NCC_EVRF055", scaled(lhs_contracting_dimensions=[2]), "trn3", True),
]


def made(source: Any) -> bytes:
    if isinstance(source, bytes):
        return source
    return module(*source) if isinstance(source, tuple) else module(source)


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_what_aws_refuses_is_refused_by_its_code_and_its_neighbour_passes(number: int) -> None:
    code, source, target, refused = CASES[number]
    found = errors(lint(made(source), TARGETS[target]))
    assert {f.rule for f in found} == ({code} if refused else set())


def test_every_published_code_has_a_case() -> None:
    """Except for the codes that tests/hlo/test_lint.py breaks."""
    refused = {code for code, _, _, refused in CASES if refused}
    others = {"NCC_EBVF030", "NCC_ESFH002", "NCC_EMOD025", "NCC_EVRF029"}
    assert {r.name for r in RULES if r.name.startswith("NCC_")} == refused | others


def reductions(*groups: list[list[int]], field: str = "device_list") -> bytes:
    """Returns a module with a sum over each of these replica groups."""
    parsed = proto.parse(
        module(
            "\n".join(["x = f32[8] parameter()", *(f"y{n} = f32[8] all-reduce(x)" for n in range(len(groups)))]), "add"
        ),
        LintedModule.MESSAGE,
    )
    sums = [i for i in parsed.computations[0].instructions if i.opcode == "all-reduce"]
    for i, ranks in zip(sums, groups, strict=True):
        for group in ranks:
            (i.device_list.groups if field == "device_list" else i.replica_groups).add(ids=group)
    return proto.serialize(parsed)


PAIRS = [[[0, n], [m for m in range(1, 16) if m != n]] for n in range(1, 16)]


@pytest.mark.parametrize("field", ["device_list", "replica_groups"])
@pytest.mark.parametrize(
    "groups, said",
    [
        ([[[0, 1, 2, 3]], [[0, 1, 2, 3]], [[0, 1], [2, 3]]], ""),
        ([[[0, 1, 1]]], "do not have each of 2 ranks once"),
        ([[[0, 2]]], "do not have each of 3 ranks once"),
        ([[[0, 1, 2, 3]], [[0, 1]]], "do not have each of 4 ranks once"),
        (PAIRS[:12], ""),
        (PAIRS[:13], "13 different replica groups, and a NEFF has 12 at most"),
    ],
)
def test_replica_groups_have_each_rank_once_and_are_few(groups: list[Any], said: str, field: str) -> None:
    found = [f for f in errors(lint(reductions(*groups, field=field))) if f.rule == "kernelgen/replica-groups"]
    assert len(found) == bool(said)
    assert all(said in f.message for f in found)


def test_replica_groups_have_a_number_of_ranks_of_the_target() -> None:
    four = reductions([[0, 1], [2, 3]])
    (finding,) = [f for f in errors(lint(four, TARGETS["trn1"])) if f.rule == "kernelgen/replica-groups"]
    assert "trn1 has collectives over 1, 2, 8, 16 or 32 cores, not 4" in finding.message
    assert not [f for f in errors(lint(four, TARGETS["inf2"])) if f.rule == "kernelgen/replica-groups"]


def test_a_u64_constant_is_refused_by_its_size() -> None:
    def plus(n: int) -> bytes:
        return canonical(lambda x: x + jnp.array([1, n], "uint64"), ((2,), "uint64"), x64=True)

    assert {f.rule for f in errors(lint(plus(5_000_000_000), TARGETS["trn1"]))} == {"NCC_ESFH002"}
    assert errors(lint(plus(2**32 - 1), TARGETS["trn1"])) == []


def test_a_variadic_scatter_is_looked_into() -> None:
    text = """
        x = f32[8] parameter()
        y = s32[8] parameter()
        i = s32[3,1] parameter()
        u = f32[3] parameter()
        v = s32[3] parameter()
        r = (f32[8], s32[8]) scatter(x, y, i, u, v) scatter={"scatter_dims_to_operand_dims":[0],"index_vector_dim":1}
    """
    assert {f.rule for f in errors(lint(tuple_scatter(text, "add"), TARGETS["trn1"]))} == {"NCC_EVRF016"}
    assert errors(lint(tuple_scatter(text, "parameter"), TARGETS["trn1"])) == []


def tuple_scatter(text: str, combiner: str) -> bytes:
    """Returns a scatter of an f32 and an s32 tensor that adds the first and combines the second."""
    parsed = proto.parse(module(text), LintedModule.MESSAGE)
    parsed.computations[0].instructions[-1].called_computation_ids.append(2)
    called = parsed.computations.add(name="combine", id=2, root_id=107)
    for n, kind in enumerate(("f32[]", "s32[]", "f32[]", "s32[]")):
        set_shape(called.instructions.add(name=f"p{n}", opcode="parameter", id=101 + n, parameter_number=n).shape, kind)
    set_shape(called.instructions.add(name="sum", opcode="add", id=105, operand_ids=[101, 103]).shape, "f32[]")
    second = 104
    if combiner != "parameter":
        second = 106
        set_shape(called.instructions.add(name="more", opcode=combiner, id=106, operand_ids=[102, 104]).shape, "s32[]")
    root = called.instructions.add(name="pair", opcode="tuple", id=107, operand_ids=[105, second])
    set_shape(root.shape, "(f32[], s32[])")
    return proto.serialize(parsed)


DOWNCAST = "--implicit-integer-downcast="


@pytest.mark.parametrize(
    "source, code, value",
    [
        ((unary("all-reduce", "s32[8]"), "add"), "NCC_EVRF061", "all_reduce"),
        ((unary("reduce-scatter", "s32[8]"), "add"), "NCC_EVRF063", "reduce_scatter"),
        (binary("power", "s64[8]"), "NCC_EVRF062", "pow"),
        ((scattered("s32"), "add"), "NCC_EVRF016", "scatter"),
        (dot("s64", "s64[2,4]"), "NCC_EVRF035", "dot"),
    ],
)
def test_a_flag_makes_warnings_of_integers_that_are_narrowed(source: Any, code: str, value: str) -> None:
    hlo = made(source)

    def said(*flags: str) -> set[tuple[str, str]]:
        return {(f.rule, f.severity) for f in lint(hlo, TARGETS["trn1"], flags=flags) if f.rule == code}

    assert said() == said(DOWNCAST + "other") == {(code, ERROR)}
    for flags in ((DOWNCAST + value,), (DOWNCAST + f"other,{value}",), (DOWNCAST[:-1], value), (DOWNCAST + "all",)):
        assert said(*flags) == {(code, WARNING)}
    assert errors(lint(hlo)) == [], "when a kernel is emitted, its flags are not known"


def test_a_flag_lets_f8e4m3fn_pass_but_not_where_it_is_quantized_to() -> None:
    fp8 = module(unary("convert", "f8e4m3fn[4]", "f32[4]"))
    assert errors(lint(fp8, TARGETS["trn2"], flags=[FP8_FLAG])) == []
    assert {f.rule for f in lint(quantize(), TARGETS["trn2"], flags=[FP8_FLAG])} == {"NCC_EVRF051"}
    assert lint(quantize(dtype="float8_e5m2"), TARGETS["trn2"], flags=[FP8_FLAG]) == []


def test_memory_is_that_of_the_logical_core() -> None:
    hlo = held(9, 9)
    assert errors(lint(hlo, TARGETS["trn2"], lnc=2)) == []
    (finding,) = errors(lint(hlo, TARGETS["trn2"], lnc=1))
    assert finding.message == "inputs and results have 18.0 GiB, and a core of trn2 has 12 GiB"
