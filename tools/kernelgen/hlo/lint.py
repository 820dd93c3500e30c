"""What neuronx-cc is known to refuse, found in the HLO before any compiler runs.

Every rule is one row of `RULES`: its name is the error code that the compiler prints where there is one, and `kernelgen/…`
otherwise. A finding is an error where AWS documents a refusal or a log shows one, and a warning where the compiler takes the module
and may not do what was meant. A module without findings may still be refused; docs/results/real-artifacts.md says how the rules
compare with public modules that were compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kernelgen.hlo import estimate as estimates
from kernelgen.hlo import lint_mistakes as mistakes
from kernelgen.hlo import lint_mx, proto
from kernelgen.hlo import lint_published as published
from kernelgen.hlo.linted import LintedModule, element_type, shapes
from kernelgen.targets import MAX_INSTRUCTIONS, TARGETS, Target

MAX_ID = 2**31 - 1

ERROR, WARNING = "error", "warning"
"""Severities."""

KNOWN_CUSTOM_CALLS = frozenset(
    {
        "AwsNeuronArgMax",
        "AwsNeuronArgMin",
        "AwsNeuronCollectiveMatmul",
        "AwsNeuronCustomNativeKernel",
        "AwsNeuronCustomOp",
        "AwsNeuronDevicePrint",
        "AwsNeuronDropoutMaskV1",
        "AwsNeuronErf",
        "AwsNeuronGelu",
        "AwsNeuronGeluApprxTanh",
        "AwsNeuronGeluBackward",
        "AwsNeuronIntMatmult",
        "AwsNeuronLNCShardingConstraint",
        "AwsNeuronModuleMarkerEnd-Backward",
        "AwsNeuronModuleMarkerEnd-Forward",
        "AwsNeuronModuleMarkerStart-Backward",
        "AwsNeuronModuleMarkerStart-Forward",
        "AwsNeuronRmsNorm",
        "AwsNeuronSilu",
        "AwsNeuronSiluBackward",
        "AwsNeuronSoftmax",
        "AwsNeuronSoftmaxBackward",
        "AwsNeuronTopK",
        "AwsNeuronTransferWithStaticRing",
        "NeuronBoundaryMarker-End",
        "NeuronBoundaryMarker-Start",
        "ResizeBilinear",
        "ResizeNearest",
        "ResizeNearestGrad",
    }
)
"""Targets of custom calls that the compiler knows by name: AWS's page of the error NCC_EVRF015 lists them."""

_INTEGERS = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "s4", "u4", "s2", "u2", "pred"})
_FNUZ = frozenset({"f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3b11fnuz"})
_TARGET_FP8 = frozenset({"f8e4m3fn"})
_HOST_OPS = frozenset({"infeed", "outfeed", "send", "send-done", "recv", "recv-done"})
FP8_FLAG = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
"""With this flag neuronx-cc takes f8e4m3fn for f8e4m3, whose largest value is 240."""

_DOWNCAST = "--implicit-integer-downcast="
_INSTRUCTION_LIMIT = "--internal-max-instruction-limit"
_CALLBACKS = ("callback", "xla_ffi_python", "xla_python")


@dataclass(frozen=True, slots=True)
class Finding:
    """One instruction that a compiler would refuse, or might not take as it is meant.

    Attributes:
        rule: the compiler's error code, or `kernelgen/<name>`.
        severity: `ERROR` or `WARNING`.
        instruction: name and opcode of the instruction, or `module`.
        message: what is wrong.
        hint: what to do instead.
    """

    rule: str
    severity: str
    instruction: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.instruction}: {self.message}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that is refused.

    Attributes:
        name: as `Finding.rule`.
        check: gives (instruction or None for the module, message) per violation.
        hint: as `Finding.hint`.
        what: what is refused, for docs/reference/lint.md.
        per_target: whether it depends on the target or the settings; such a rule is left out when no target is given.
        severity: as `Finding.severity`.
        evidence: where the refusal is documented, or was seen.
        waiver: the value of --implicit-integer-downcast with which the compiler takes this: then a finding is a warning.
    """

    name: str
    check: Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]
    hint: str
    what: str
    per_target: bool = False
    severity: str = ERROR
    evidence: str = ""
    waiver: str = ""


def _ids(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    seen: set[int] = set()
    for i in m.instructions:
        if not 0 <= i.id <= MAX_ID:
            yield i, f"instruction id {i.id} does not fit 32 bits"
        elif i.id in seen:
            yield i, f"instruction id {i.id} is used twice"
        seen.add(i.id)


def _types(*refused: str) -> Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        for i in m.instructions:
            found = {element_type(s) for s in shapes(i.shape)} & set(refused)
            if found:
                yield i, f"the type {', '.join(sorted(found))} is not supported"

    return check


def _opcodes(message: str, *refused: str) -> Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        return ((i, message) for i in m.instructions if i.opcode in refused)

    return check


def _topk(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode == "topk" or (i.opcode == "custom-call" and i.custom_call_target in ("TopK", "mhlo.topk")):
            yield i, "topk is not supported"


def _sort(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if not target.sort:
        for i in m.instructions:
            if i.opcode == "sort":
                yield i, f"sort is not supported on {target.name}"


def _i64_parameters(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in proto.parameters(proto.entry(m.message)):
        if element_type(i.shape) in ("s64", "u64"):
            yield i, "a 64-bit integer parameter is narrowed or refused, depending on the compiler's release"


def _empty(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in proto.parameters(proto.entry(m.message)):
        if 0 in i.shape.dimensions:
            yield i, f"the parameter {proto.shape_text(i.shape)} has no elements"


def _dot(*types: str) -> Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        if "s32" in types and (target is None or target.int32_dot):
            return
        for computation, i in m.with_computation():
            found = (
                {element_type(o.shape) for o in m.operands(computation, i)} & set(types) if i.opcode == "dot" else set()
            )
            if found:
                where = f" on {target.name}" if target and "s32" in types else ""
                yield i, f"a dot of {', '.join(sorted(found))} is not supported{where}"

    return check


def _u64_constants(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode == "constant" and any(v >= 2**32 for v in i.literal.u64s):
            yield i, "an unsigned 64-bit constant above 2^32 - 1 is not supported"


def _dynamic(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    if m.message.is_dynamic:
        yield None, "the module has dynamic shapes"
    for i in m.instructions:
        if any(any(s.is_dynamic_dimension) for s in shapes(i.shape)):
            yield i, f"the shape {proto.shape_text(i.shape)} is dynamic"


def _custom_calls(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode != "custom-call" or any(c in i.custom_call_target for c in _CALLBACKS):
            continue
        if i.custom_call_target not in KNOWN_CUSTOM_CALLS | lint_mx.CALLS and i.custom_call_target not in (
            "TopK",
            "mhlo.topk",
        ):
            yield i, f"the compiler knows no custom call '{i.custom_call_target}'"


def _host(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode in _HOST_OPS:
            yield i, f"{i.opcode} talks to the host"
        elif i.opcode == "custom-call" and any(c in i.custom_call_target for c in _CALLBACKS):
            yield i, f"'{i.custom_call_target}' calls back to the host"


_WITH_F8E4M3FN = " and ".join(name for name, target in TARGETS.items() if "F8E4M3FN" in target.fp8)


def _fp8(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if FP8_FLAG in m.flags:
        yield from published.converted_fp8(m, target)
        return
    allowed = {name.lower() for name in target.fp8}
    for i in m.instructions:
        found = {element_type(s) for s in shapes(i.shape)} & (_TARGET_FP8 - allowed)
        if found:
            yield i, f"the type {', '.join(sorted(found))} is not supported on {target.name}"


def _scatter_reduce(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for _, i in m.with_computation("scatter"):
        # A combiner that returns an update, one of the second half of its parameters, overwrites; any other one reduces.
        combiner = m.computations[i.called_computation_ids[0]]
        root = m.root(combiner.id)
        roots = m.operands(combiner, root) if root.opcode == "tuple" else [root]
        for shape, combined in zip(i.shape.tuple_shapes or [i.shape], roots, strict=True):
            if element_type(shape) in _INTEGERS and combined.opcode != "parameter":
                yield i, f"a scatter that combines {element_type(shape)} by {combined.opcode} is not supported"


def _while(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for computation, i in m.with_computation():
        if i.opcode == "while" and m.counting(computation, i) is None:
            yield i, "the number of iterations is not a constant"


def _names(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    seen: set[str] = set()
    for i in m.instructions:
        if i.name in seen:
            yield i, "two instructions have this name"
        seen.add(i.name)


def _written_in_place(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    entry_computation = proto.entry(m.message)
    if all(i.id != entry_computation.root_id for i in entry_computation.instructions):
        return  # its ids are wrong, which is found above
    parameters, results = proto.parameters(entry_computation), proto.result_shapes(m.message)
    shared = {}
    for entry in m.message.input_output_alias.entries:
        shared[entry.parameter_number] = entry.output_shape_index[0] if entry.output_shape_index else 0
    for number, p in enumerate(parameters):
        if number not in shared:
            if p.name.endswith(proto.MUST_ALIAS_SUFFIX):
                yield p, "no result is written to the memory of this input"
            continue
        of = results[shared[number]] if 0 <= shared[number] < len(results) else None
        if of is None or (of.element_type, list(of.dimensions)) != (p.shape.element_type, list(p.shape.dimensions)):
            yield p, f"result {shared[number]}, which is written to its memory, has another shape or type"


def _estimate(m: LintedModule, target: Target) -> estimates.Estimate:
    """Returns what a module takes on the target that it is linted for; two rules ask."""
    made: estimates.Estimate = m.estimate or estimates.estimate(m, target.name, m.lnc)
    m.estimate = made
    return made


def _instructions(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if not any(flag.startswith(_INSTRUCTION_LIMIT) for flag in m.flags):
        total = _estimate(m, target).total
        if total > MAX_INSTRUCTIONS:
            yield None, f"about {total / 1e6:.1f} million instructions"


def _descriptors(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    descriptors = _estimate(m, target).dma_descriptors
    if descriptors > estimates.MAX_DESCRIPTORS:
        yield None, f"about {descriptors / 1e6:.1f} million DMA descriptors"


_AWS = "AWS's page of the error"
_JAX = "AWS's known issues of JAX"
_XLA = "XLA's own reader"
_NEC = "AWS's header and pages of collectives"
_MEASURED = "measured on trn1 and trn2 by others, neuronx-cc 2.27"

RULES: tuple[Rule, ...] = (
    Rule(
        "kernelgen/id-32-bit",
        _ids,
        "canonicalize the module: ids are dense 32-bit integers",
        "instruction ids that are negative, beyond 2³¹ − 1, or used twice; 0 is fine",
        evidence="logs of neuronx-cc 2.23 and 2.26; of an id that is used twice " + _XLA,
    ),
    Rule("kernelgen/unique-name", _names, "canonicalize the module", "two instructions of one name", evidence=_XLA),
    Rule(
        "kernelgen/alias",
        _written_in_place,
        "emit the module again: canonicalization names the input and records the pair",
        "an input that is written in place, such as a cache, and whose result does not share its memory",
        evidence="the names that NEFFs of neuronx-cc have: without the pair a cache is copied in each call",
    ),
    Rule(
        "NCC_EVRF001",
        _topk,
        "sort and slice: that is rewritten to a native top-k (k up to 16384, float keys)",
        "`topk`",
        evidence="logs",
    ),
    Rule(
        "NCC_EVRF001",
        _opcodes("triangular-solve is not supported", "triangular-solve"),
        "substitute row by row in a loop of a constant number of steps",
        "`triangular-solve`",
        evidence=_AWS,
    ),
    Rule(
        "NCC_ESPP004",
        _types("f64", "f4e2m1fn"),
        "compute in float32",
        "64-bit floats, and 4-bit ones (`f4e2m1fn`)",
        evidence=_AWS + ", and logs",
    ),
    Rule(
        "NCC_EVRF004",
        _types("c64", "c128"),
        "compute real and imaginary parts",
        "complex numbers",
        evidence=_AWS,
    ),
    Rule(
        "kernelgen/i64-parameter",
        _i64_parameters,
        "take pairs of i32 and use the lower word",
        "64-bit integer parameters: they arrive as pairs of 32 bits, and `--native-int64` changes what they mean",
        severity=WARNING,
        evidence="2.14 compiled 360 public modules that have some, as pairs of 32 bits",
    ),
    Rule(
        "kernelgen/empty-tensor",
        _empty,
        "leave the parameter out",
        "parameters without elements",
        evidence="six logs of neuronx-cc 2.14",
    ),
    Rule(
        "NCC_EVRF035",
        _dot("s64", "u64"),
        "convert the operands to a float type",
        "a `dot` of 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="dot",
    ),
    Rule(
        "NCC_EVRF035",
        _dot("s32", "u32"),
        "convert the operands to float32",
        "a `dot` of 32-bit integers on trn2 and trn3",
        per_target=True,
        evidence=_AWS,
        waiver="dot",
    ),
    Rule(
        "NCC_ESFH002",
        _u64_constants,
        "use 32-bit constants",
        "unsigned 64-bit constants above 2³² − 1",
        evidence=_AWS,
    ),
    Rule("NCC_EMOD025", _dynamic, "pad to a static shape and mask", "dynamic shapes", evidence=_AWS),
    Rule(
        "kernelgen/conditional",
        _opcodes("cond is not supported", "conditional"),
        "compute both and select",
        "`conditional`",
        evidence=_JAX,
    ),
    Rule(
        "kernelgen/while",
        _while,
        "loop a constant number of times (lax.fori_loop with constant bounds)",
        "loops whose number of iterations is not a constant",
        evidence=_JAX,
    ),
    Rule(
        "kernelgen/reduce-precision",
        _opcodes("reduce-precision is not supported", "reduce-precision"),
        "use astype",
        "`reduce-precision`",
        evidence=_JAX,
    ),
    Rule(
        "NCC_EVRF015",
        _custom_calls,
        "known: " + ", ".join(sorted(KNOWN_CUSTOM_CALLS | lint_mx.CALLS)),
        "custom calls that are neither among AWS's 29 nor those of MX types",
        evidence=_AWS,
    ),
    Rule(
        "kernelgen/host",
        _host,
        "a kernel can't call the host: remove callbacks and debug prints",
        "callbacks, infeed, outfeed, send and receive",
        evidence=_JAX,
    ),
    Rule(
        "NCC_EVRF016",
        _scatter_reduce,
        "scatter float values, or overwrite",
        "scatters that combine integers; NCC_EVRF060 says the same",
        per_target=True,
        evidence=_AWS,
        waiver="scatter",
    ),
    Rule("NCC_EVRF005", _types(*sorted(_FNUZ)), "FNUZ types exist on no target", "FNUZ types", evidence=_AWS),
    Rule(
        "NCC_EVRF051",
        _fp8,
        f"F8E4M3FN exists on {_WITH_F8E4M3FN} only; elsewhere {FP8_FLAG} takes it for F8E4M3, whose largest value is 240",
        f"`f8e4m3fn`, except on trn3 or with `{FP8_FLAG}`; with this flag, `QuantizeMX` to it",
        per_target=True,
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF029",
        _sort,
        "count, or sort by a network of comparisons (kernels/sorting.py does both)",
        "`sort` on trn2 and trn3",
        per_target=True,
        evidence="logs for trn2 and trn3",
    ),
    Rule(
        "NCC_EVRF006",
        published.random_algorithm,
        "use the default algorithm, or compute the bits (jax.random does)",
        "`rng-bit-generator` with another algorithm than the default",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF010",
        published.dilated_convolution,
        "dilate one of them by padding with zeros",
        "a convolution whose input and kernel are both dilated",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF011",
        published.strided_convolution,
        "dilate the input by padding with zeros",
        "a convolution with a stride whose input is dilated",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF013",
        published.topk_key,
        "convert the key to a float type",
        "a top-k of s32 or s64",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF017",
        published.window_base_dilation,
        "pad with the initial value",
        "`reduce-window` with a base_dilation above 1",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF018",
        published.window_dilation,
        "take slices, and combine them",
        "`reduce-window` with a window_dilation above 1",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF019",
        published.window_operands,
        "write a reduce-window for each input",
        "`reduce-window` of several inputs",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF022",
        published.arithmetic_shift,
        "convert to int32 first",
        "`shift-right-arithmetic` of what is not s32, u32 or f32",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF031",
        published.scatter_index,
        "count no further than the dimension has elements",
        "a scatter whose index counts beyond the dimension",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF056",
        published.gather_index,
        "count no further than the dimension has elements: a table of positions may be too short",
        "a gather whose index counts beyond the dimension",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF061",
        published.integer_sum("all-reduce"),
        "convert to float32",
        "`all-reduce` that adds 32- or 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="all_reduce",
    ),
    Rule(
        "kernelgen/replica-groups",
        published.replica_groups,
        "let all collectives of a kernel be over the same groups, which have each rank once",
        f"replica groups that do not have each rank once, or more than {published.MAX_GROUPS} different ones",
        evidence=_NEC,
    ),
    Rule(
        "NCC_EVRF062",
        published.integer_power,
        "convert to int32 or float32",
        "`power` of 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="pow",
    ),
    Rule(
        "NCC_EVRF063",
        published.integer_sum("reduce-scatter"),
        "convert to float32",
        "`reduce-scatter` that adds 32- or 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="reduce_scatter",
    ),
    Rule(
        "NCC_EVRF064",
        published.shape_rules,
        "write the module with XLA, which checks shapes",
        "an elementwise operation, dot, transpose or reshape whose result does not have the shape that its operands give",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EOOM001",
        published.memory,
        "split the kernel",
        "inputs and results above a logical core's memory; NCC_EOOM002, NCC_EVRF009 and NCC_EXSP001 say the same",
        per_target=True,
        evidence=_AWS + ", and logs",
    ),
    *(
        Rule(code, published.mx(code), "see AWS's page of the error", what, evidence=_AWS)
        for code, what in lint_mx.RULES.items()
    ),
    Rule(
        "kernelgen/integer-division",
        mistakes.integer_division,
        "divide by a power of two, compare with multiples, or count with iotas of two dimensions",
        "integers divided by a constant that is not a power of two: a float32 reciprocal made 23 of 32 quotients 1 too small",
        severity=WARNING,
        evidence=_MEASURED,
    ),
    Rule(
        "kernelgen/small-top-k",
        mistakes.small_topk,
        "compare and select",
        "a sort or top-k of an axis of at most 2 elements, or a top-k with k up to 2: wrong values",
        severity=WARNING,
        evidence=_MEASURED,
    ),
    Rule(
        "kernelgen/element-gather",
        mistakes.element_gather,
        "gather whole rows",
        "a gather of more than 10,000 single elements: a DMA descriptor each, 60 ms for 500,000",
        severity=WARNING,
        evidence=_MEASURED,
    ),
    Rule(
        "kernelgen/bf16-rounding",
        mistakes.rounding,
        "round by arithmetic (x * 65537, Veltkamp's split), or leave it out when the rounding is not meant",
        "f32 converted to bf16 and back: folded away, so that nothing is rounded",
        severity=WARNING,
        evidence=_MEASURED,
    ),
    Rule(
        "NCC_EBVF030",
        _instructions,
        "fewer layers or fewer tokens in one kernel",
        "more than 5 million instructions, as estimated, unless a flag sets the limit",
        per_target=True,
        severity=WARNING,
        evidence="logs, with 8.7 to 39.7 million",
    ),
    Rule(
        "kernelgen/descriptors",
        _descriptors,
        "fewer layers or fewer tokens in one kernel, or a NKI kernel in the place of gathers",
        "more than 16,777,200 DMA descriptors, as estimated: the program is compiled, and the runtime does not load it",
        per_target=True,
        severity=WARNING,
        evidence=_MEASURED,
    ),
)
"""Every rule, in the order in which findings are reported."""


def lint(
    hlo: bytes, target: Target | None = None, *, flags: Sequence[str] = (), lnc: int | None = None
) -> list[Finding]:
    """Returns what neuronx-cc would refuse in a module, and what it might not take as it is meant.

    Args:
        hlo: serialized `HloModuleProto`.
        target: the target it is compiled for; without one only rules that hold for all targets and settings are checked.
        flags: neuronx-cc's further flags.
        lnc: physical cores of a logical one; the target's own when None.

    Raises:
        ValueError: `hlo` is not such a module.
    """
    m = LintedModule(hlo, flags, lnc)
    findings = []
    for rule in RULES:
        if rule.per_target and target is None:
            continue
        severity = WARNING if rule.waiver and _waived(rule.waiver, flags) else rule.severity
        for i, message in rule.check(m, target):
            where = "module" if i is None else f"{i.name} ({i.opcode})"
            findings.append(Finding(rule.name, severity, where, message, rule.hint))
    return findings


def _waived(waiver: str, flags: Sequence[str]) -> bool:
    """Whether flags have `--implicit-integer-downcast` with a value, which may be one of several or `all`."""
    given = " ".join(flags).replace(_DOWNCAST[:-1] + " ", _DOWNCAST).split()
    values = {v for flag in given if flag.startswith(_DOWNCAST) for v in flag.removeprefix(_DOWNCAST).split(",")}
    return bool(values & {waiver, "all"})


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that a compiler would refuse."""
    return [finding for finding in findings if finding.severity == ERROR]
