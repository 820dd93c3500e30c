"""What neuronx-cc is known to refuse, found in the HLO before any compiler runs.

Every rule is one row of `RULES`: its name is the error code that the compiler prints where there is one, and `kernelgen/…`
otherwise. A finding is an error where AWS documents a refusal or a log shows one, and a warning where the compiler takes the module
and may not do what was meant. A module that is clean here may still be refused; docs/compilers.md says how the rules compare with
public modules that were compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.hlo import proto
from kernelgen.targets import TARGETS, Target

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
        per_target: whether it depends on the target; such a rule is left out when no target is given.
        severity: as `Finding.severity`.
        evidence: where the refusal is documented, or was seen.
    """

    name: str
    check: Callable[[_LintedModule, Target | None], Iterator[tuple[Any, str]]]
    hint: str
    per_target: bool = False
    severity: str = ERROR
    evidence: str = ""


class _LintedModule:
    """A parsed module with what the rules ask for."""

    def __init__(self, hlo: bytes) -> None:
        self.message = proto.parse(hlo)
        self.computations = proto.computations(self.message)
        self.instructions = [i for c in self.message.computations for i in c.instructions]
        self.by_id = {(c.id, i.id): i for c in self.message.computations for i in c.instructions}

    def operands(self, computation: Any, i: Any) -> list[Any]:
        return [self.by_id[computation.id, n] for n in i.operand_ids]

    def with_computation(self) -> Iterator[tuple[Any, Any]]:
        for computation in self.message.computations:
            for i in computation.instructions:
                yield computation, i


def _type(shape: Any) -> str:
    return proto.ELEMENT_TYPES.get(shape.element_type, f"type{shape.element_type}")


def _shapes(shape: Any) -> Iterator[Any]:
    yield shape
    for inner in shape.tuple_shapes:
        yield from _shapes(inner)


def _ids(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    seen: set[int] = set()
    for i in m.instructions:
        if not 0 <= i.id <= MAX_ID:
            yield i, f"instruction id {i.id} does not fit 32 bits"
        elif i.id in seen:
            yield i, f"instruction id {i.id} is used twice"
        seen.add(i.id)


def _types(*refused: str) -> Callable[[_LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        for i in m.instructions:
            found = {_type(s) for s in _shapes(i.shape)} & set(refused)
            if found:
                yield i, f"the type {', '.join(sorted(found))} is not supported"

    return check


def _opcodes(message: str, *refused: str) -> Callable[[_LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        return ((i, message) for i in m.instructions if i.opcode in refused)

    return check


def _topk(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode == "topk" or (i.opcode == "custom-call" and i.custom_call_target in ("TopK", "mhlo.topk")):
            yield i, "topk is not supported"


def _sort(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if not target.sort:
        for i in m.instructions:
            if i.opcode == "sort":
                yield i, f"sort is not supported on {target.name}"


def _i64_parameters(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in proto.parameters(proto.entry(m.message)):
        if _type(i.shape) in ("s64", "u64"):
            yield i, "a 64-bit integer parameter is narrowed or refused, depending on the compiler's release"


def _empty(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in proto.parameters(proto.entry(m.message)):
        if 0 in i.shape.dimensions:
            yield i, f"the parameter {proto.shape_text(i.shape)} has no elements"


def _dot(*types: str) -> Callable[[_LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        if "s32" in types and (target is None or target.int32_dot):
            return
        for computation, i in m.with_computation():
            found = {_type(o.shape) for o in m.operands(computation, i)} & set(types) if i.opcode == "dot" else set()
            if found:
                where = f" on {target.name}" if target and "s32" in types else ""
                yield i, f"a dot of {', '.join(sorted(found))} is not supported{where}"

    return check


def _u64_constants(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode == "constant" and any(v >= 2**32 for v in i.literal.u64s):
            yield i, "an unsigned 64-bit constant above 2^32 - 1 is not supported"


def _dynamic(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    if m.message.is_dynamic:
        yield None, "the module has dynamic shapes"
    for i in m.instructions:
        if any(any(s.is_dynamic_dimension) for s in _shapes(i.shape)):
            yield i, f"the shape {proto.shape_text(i.shape)} is dynamic"


def _custom_calls(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode != "custom-call" or any(c in i.custom_call_target for c in _CALLBACKS):
            continue
        if i.custom_call_target not in KNOWN_CUSTOM_CALLS and i.custom_call_target not in ("TopK", "mhlo.topk"):
            yield i, f"the compiler knows no custom call '{i.custom_call_target}'"


def _host(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode in _HOST_OPS:
            yield i, f"{i.opcode} talks to the host"
        elif i.opcode == "custom-call" and any(c in i.custom_call_target for c in _CALLBACKS):
            yield i, f"'{i.custom_call_target}' calls back to the host"


_WITH_F8E4M3FN = " and ".join(name for name, target in TARGETS.items() if "F8E4M3FN" in target.fp8)


def _fp8(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    allowed = {name.lower() for name in target.fp8}
    for i in m.instructions:
        found = {_type(s) for s in _shapes(i.shape)} & (_TARGET_FP8 - allowed)
        if found:
            yield i, f"the type {', '.join(sorted(found))} is not supported on {target.name}"


def _scatter_reduce(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode != "scatter" or _type(i.shape) not in _INTEGERS:
            continue
        # A combiner that returns its second parameter overwrites; any other one reduces.
        combiner = m.computations[i.called_computation_ids[0]]
        root = m.by_id[combiner.id, combiner.root_id]
        if root.opcode != "parameter":
            yield i, f"a scatter that combines {_type(i.shape)} by {root.opcode} is not supported"


def _while(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for computation, i in m.with_computation():
        if i.opcode == "while" and not _static(m, computation, i):
            yield i, "the number of iterations is not a constant"


def _static(m: _LintedModule, computation: Any, loop: Any) -> bool:
    """Whether a while loop counts a tuple element from a constant, by a constant, to a constant."""
    condition, body = (m.computations[n] for n in _condition_and_body(m, loop))
    test = m.by_id[condition.id, condition.root_id]
    if test.opcode != "compare":
        return False
    counter, limit = m.operands(condition, test)
    if (counter.opcode, limit.opcode) != ("get-tuple-element", "constant"):
        return False
    index = counter.tuple_index
    start = m.operands(computation, loop)[0]
    if start.opcode != "tuple" or m.operands(computation, start)[index].opcode != "constant":
        return False
    result = m.by_id[body.id, body.root_id]
    if result.opcode != "tuple":
        return False
    step = m.operands(body, result)[index]
    if step.opcode not in ("add", "subtract"):
        return False
    kinds = [(o.opcode, o.tuple_index) for o in m.operands(body, step)]
    return ("get-tuple-element", index) in kinds and any(kind == "constant" for kind, _ in kinds)


def _condition_and_body(m: _LintedModule, loop: Any) -> tuple[int, int]:
    """Returns the ids of a loop's (condition, body); XLA lists the body first."""
    body, condition = loop.called_computation_ids
    root = m.by_id[condition, m.computations[condition].root_id]
    return (condition, body) if _type(root.shape) == "pred" else (body, condition)


def _names(m: _LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    seen: set[str] = set()
    for i in m.instructions:
        if i.name in seen:
            yield i, "two instructions have this name"
        seen.add(i.name)


_AWS = "AWS's page of the error"
_JAX = "AWS's known issues of JAX"
_XLA = "XLA's own reader"

RULES: tuple[Rule, ...] = (
    Rule(
        "kernelgen/id-32-bit",
        _ids,
        "canonicalize the module: ids are dense 32-bit integers",
        evidence="logs of neuronx-cc 2.23 and 2.26; of an id that is used twice " + _XLA,
    ),
    Rule("kernelgen/unique-name", _names, "canonicalize the module", evidence=_XLA),
    Rule(
        "NCC_EVRF001",
        _topk,
        "sort and slice: that is rewritten to a native top-k (k up to 16384, float keys)",
        evidence="logs",
    ),
    Rule(
        "NCC_EVRF001",
        _opcodes("triangular-solve is not supported", "triangular-solve"),
        "substitute row by row in a loop of a constant number of steps",
        evidence=_AWS,
    ),
    Rule("NCC_ESPP004", _types("f64"), "compute in float32", evidence=_AWS + ", and logs"),
    Rule("NCC_EVRF004", _types("c64", "c128"), "compute real and imaginary parts", evidence=_AWS),
    Rule(
        "kernelgen/i64-parameter",
        _i64_parameters,
        "take pairs of i32 and use the lower word",
        severity=WARNING,
        evidence="2.14 compiled 360 public modules that have some, as pairs of 32 bits",
    ),
    Rule("kernelgen/empty-tensor", _empty, "leave the parameter out", evidence="six logs of neuronx-cc 2.14"),
    Rule("NCC_EVRF035", _dot("s64", "u64"), "convert the operands to a float type", evidence=_AWS),
    Rule("ESFH002", _u64_constants, "use 32-bit constants", evidence=_AWS),
    Rule("NCC_EMOD025", _dynamic, "pad to a static shape and mask", evidence=_AWS),
    Rule(
        "kernelgen/conditional",
        _opcodes("cond is not supported", "conditional"),
        "compute both and select",
        evidence=_JAX,
    ),
    Rule(
        "kernelgen/while",
        _while,
        "loop a constant number of times (lax.fori_loop with constant bounds)",
        evidence=_JAX,
    ),
    Rule(
        "kernelgen/reduce-precision",
        _opcodes("reduce-precision is not supported", "reduce-precision"),
        "use astype",
        evidence=_JAX,
    ),
    Rule("NCC_EVRF015", _custom_calls, "known: " + ", ".join(sorted(KNOWN_CUSTOM_CALLS)), evidence=_AWS),
    Rule("kernelgen/host", _host, "a kernel can't call the host: remove callbacks and debug prints", evidence=_JAX),
    Rule("NCC_EVRF016", _scatter_reduce, "scatter float values, or overwrite", evidence=_AWS),
    Rule("NCC_EVRF005", _types(*sorted(_FNUZ)), "FNUZ types exist on no target", evidence=_AWS),
    Rule("NCC_EVRF051", _fp8, f"F8E4M3FN exists on {_WITH_F8E4M3FN} only", per_target=True, evidence=_AWS),
    Rule(
        "NCC_EVRF029",
        _sort,
        "count, or sort by a network of comparisons (kernels/sorting.py does both)",
        per_target=True,
        evidence="logs for trn2 and trn3",
    ),
    Rule(
        "NCC_EVRF035",
        _dot("s32", "u32"),
        "convert the operands to float32",
        per_target=True,
        evidence=_AWS,
    ),
)
"""Every rule, in the order in which findings are reported."""


def lint(hlo: bytes, target: Target | None = None) -> list[Finding]:
    """Returns what neuronx-cc would refuse in a module, and what it might not take as it is meant.

    Args:
        hlo: serialized `HloModuleProto`.
        target: the target it is compiled for; without one only rules that hold for all targets are checked.

    Raises:
        ValueError: `hlo` is not such a module.
    """
    m = _LintedModule(hlo)
    findings = []
    for rule in RULES:
        if rule.per_target and target is None:
            continue
        for i, message in rule.check(m, target):
            where = "module" if i is None else f"{i.name} ({i.opcode})"
            findings.append(Finding(rule.name, rule.severity, where, message, rule.hint))
    return findings


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that a compiler would refuse."""
    return [finding for finding in findings if finding.severity == ERROR]
