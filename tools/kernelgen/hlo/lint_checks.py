"""The checks of `lint_rules`; `lint_published`, `lint_mx` and `lint_mistakes` have more.

A check yields (instruction, or None for the module, and a message) for each violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kernelgen.hlo import estimate as estimates
from kernelgen.hlo import lint_mx, proto
from kernelgen.hlo import lint_published as published
from kernelgen.hlo.linted import LintedModule, element_type, shapes
from kernelgen.targets import MAX_INSTRUCTIONS, Target

MAX_ID = 2**31 - 1

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
"""Targets of custom calls that the compiler supports: AWS's page of the error NCC_EVRF015 lists them."""

_INTEGERS = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "s4", "u4", "s2", "u2", "pred"})
FNUZ = frozenset({"f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3b11fnuz"})
_TARGET_FP8 = frozenset({"f8e4m3fn"})
_HOST_OPS = frozenset({"infeed", "outfeed", "send", "send-done", "recv", "recv-done"})
FP8_FLAG = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
"""With this flag neuronx-cc treats f8e4m3fn as f8e4m3, whose largest value is 240."""

_INSTRUCTION_LIMIT = "--internal-max-instruction-limit"
_CALLBACKS = ("callback", "xla_ffi_python", "xla_python")


def ids(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    seen: set[int] = set()
    for i in m.instructions:
        if not 0 <= i.id <= MAX_ID:
            yield i, f"instruction id {i.id} does not fit 32 bits"
        elif i.id in seen:
            yield i, f"instruction id {i.id} is used twice"
        seen.add(i.id)


def types(*refused: str) -> Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        for i in m.instructions:
            found = {element_type(s) for s in shapes(i.shape)} & set(refused)
            if found:
                yield i, f"the type {', '.join(sorted(found))} is not supported"

    return check


def opcodes(message: str, *refused: str) -> Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]:
    def check(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        return ((i, message) for i in m.instructions if i.opcode in refused)

    return check


def topk(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode == "topk" or (i.opcode == "custom-call" and i.custom_call_target in ("TopK", "mhlo.topk")):
            yield i, "topk is not supported"


def sort(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if not target.sort:
        for i in m.instructions:
            if i.opcode == "sort":
                yield i, f"sort is not supported on {target.name}"


def i64_parameters(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in proto.parameters(proto.entry(m.message)):
        if element_type(i.shape) in ("s64", "u64"):
            yield i, "a 64-bit integer parameter is narrowed or refused, depending on the compiler's release"


def empty(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in proto.parameters(proto.entry(m.message)):
        if 0 in i.shape.dimensions:
            yield i, f"the parameter {proto.shape_text(i.shape)} has no elements"


def dot(*types: str) -> Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]:
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


def u64_constants(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode == "constant" and any(v >= 2**32 for v in i.literal.u64s):
            yield i, "an unsigned 64-bit constant above 2^32 - 1 is not supported"


def dynamic(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    if m.message.is_dynamic:
        yield None, "the module has dynamic shapes"
    for i in m.instructions:
        if any(any(s.is_dynamic_dimension) for s in shapes(i.shape)):
            yield i, f"the shape {proto.shape_text(i.shape)} is dynamic"


def custom_calls(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode != "custom-call" or any(c in i.custom_call_target for c in _CALLBACKS):
            continue
        if i.custom_call_target not in KNOWN_CUSTOM_CALLS | lint_mx.CALLS and i.custom_call_target not in (
            "TopK",
            "mhlo.topk",
        ):
            yield i, f"the compiler does not support the custom call '{i.custom_call_target}'"


def host_ops(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for i in m.instructions:
        if i.opcode in _HOST_OPS:
            yield i, f"{i.opcode} communicates with the host"
        elif i.opcode == "custom-call" and any(c in i.custom_call_target for c in _CALLBACKS):
            yield i, f"'{i.custom_call_target}' calls back to the host"


def fp8(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if FP8_FLAG in m.flags:
        yield from published.converted_fp8(m, target)
        return
    allowed = {name.lower() for name in target.fp8}
    for i in m.instructions:
        found = {element_type(s) for s in shapes(i.shape)} & (_TARGET_FP8 - allowed)
        if found:
            yield i, f"the type {', '.join(sorted(found))} is not supported on {target.name}"


def scatter_reduce(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for _, i in m.with_computation("scatter"):
        # A combiner that returns an update (a parameter of its second half) overwrites; any other combiner reduces.
        combiner = m.computations[i.called_computation_ids[0]]
        root = m.root(combiner.id)
        roots = m.operands(combiner, root) if root.opcode == "tuple" else [root]
        for shape, combined in zip(i.shape.tuple_shapes or [i.shape], roots, strict=True):
            if element_type(shape) in _INTEGERS and combined.opcode != "parameter":
                yield i, f"a scatter that combines {element_type(shape)} by {combined.opcode} is not supported"


def loops(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    for computation, i in m.with_computation():
        if i.opcode == "while" and m.counting(computation, i) is None:
            yield i, "the number of iterations is not a constant"


def names(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    seen: set[str] = set()
    for i in m.instructions:
        if i.name in seen:
            yield i, "two instructions have this name"
        seen.add(i.name)


def written_in_place(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    entry_computation = proto.entry(m.message)
    if all(i.id != entry_computation.root_id for i in entry_computation.instructions):
        return  # its ids are wrong, which another check reports
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
    """Returns the module's estimate for the lint's target; cached, since two rules need it."""
    made: estimates.Estimate = m.estimate or estimates.estimate(m, target.name, m.lnc)
    m.estimate = made
    return made


def instructions(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    if not any(flag.startswith(_INSTRUCTION_LIMIT) for flag in m.flags):
        total = _estimate(m, target).total
        if total > MAX_INSTRUCTIONS:
            yield None, f"about {total / 1e6:.1f} million instructions"


def descriptors(m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
    assert target is not None
    descriptors = _estimate(m, target).dma_descriptors
    if descriptors > estimates.MAX_DESCRIPTORS:
        yield None, f"about {descriptors / 1e6:.1f} million DMA descriptors"
