"""The checks of `lint`.

A check of instructions returns a message for a violation, else an empty text. A check of modules yields (instruction, or None for
the module, and a message) for each violation. `lint_mx` has the checks of microscaling types.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from math import prod
from typing import Any

from kernelgen.hlo import estimate as estimates
from kernelgen.hlo import lint_mx, proto
from kernelgen.hlo.linted import LintedModule, element_type, integers, shapes, size
from kernelgen.targets import MAX_INSTRUCTIONS, Target

Violations = Iterator[tuple[Any, str]]

MAX_GROUPS = 12
"""Maximum number of replica groups in a NEFF: `NEC_MAX_COMM_N` of AWS Neuron's nec.h."""
MANY_INDICES = 10_000
"""Elements that a gather may move one by one: each is a DMA descriptor."""

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

FNUZ = frozenset({"f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3b11fnuz"})
FP8_FLAG = "--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
"""With this flag neuronx-cc treats f8e4m3fn as f8e4m3, whose largest value is 240."""
HOST_OPS = ("infeed", "outfeed", "send", "send-done", "recv", "recv-done")

_INTEGERS = frozenset({"s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "s4", "u4", "s2", "u2", "pred"})
_TOPK = ("TopK", "mhlo.topk")
_INSTRUCTION_LIMIT = "--internal-max-instruction-limit"
_CALLBACKS = ("callback", "xla_ffi_python", "xla_python")
_WIDE = frozenset({"s32", "s64", "u32", "u64"})

UNARY = tuple(
    "abs ceil convert copy cosine exponential exponential-minus-one floor is-finite log log-plus-one logistic negate not"
    " round-nearest-afz round-nearest-even rsqrt sign sine sqrt cbrt tan tanh".split()
)
BINARY = tuple(
    "add and atan2 compare divide maximum minimum multiply or power remainder shift-left shift-right-arithmetic"
    " shift-right-logical subtract xor".split()
)


# --- instructions -----------------------------------------------------------------------------------------------------


def topk(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return "topk is not supported" if i.opcode == "topk" or i.custom_call_target in _TOPK else ""


def sort(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return "" if target is None or target.sort else f"sort is not supported on {target.name}"


def wide_dot(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return _dot(m, computation, i, {"s64", "u64"})


def integer_dot(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    if target is None or target.int32_dot:
        return ""
    message = _dot(m, computation, i, {"s32", "u32"})
    return f"{message} on {target.name}" if message else ""


def _dot(m: LintedModule, computation: Any, i: Any, refused: Set[str]) -> str:
    types = {element_type(o.shape) for o in m.operands(computation, i)} & refused
    return f"a dot of {', '.join(sorted(types))} is not supported" if types else ""


def u64_constants(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    is_wide = any(v >= 2**32 for v in i.literal.u64s)
    return "an unsigned 64-bit constant above 2^32 - 1 is not supported" if is_wide else ""


def custom_calls(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    name = i.custom_call_target
    known = name in KNOWN_CUSTOM_CALLS | lint_mx.CALLS or name in _TOPK or any(c in name for c in _CALLBACKS)
    return "" if known else f"the compiler does not support the custom call '{name}'"


def host_ops(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    if i.opcode != "custom-call":
        return f"{i.opcode} communicates with the host"
    name = i.custom_call_target
    return f"'{name}' calls back to the host" if any(c in name for c in _CALLBACKS) else ""


def scatter_reduce(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    # A combiner that returns an update (a parameter of its second half) overwrites; any other combiner reduces.
    combiner = m.computations[i.called_computation_ids[0]]
    root = m.root(combiner.id)
    roots = m.operands(combiner, root) if root.opcode == "tuple" else [root]
    for shape, combined in zip(i.shape.tuple_shapes or [i.shape], roots, strict=True):
        if element_type(shape) in _INTEGERS and combined.opcode != "parameter":
            return f"a scatter that combines {element_type(shape)} by {combined.opcode} is not supported"
    return ""


def loops(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return "the number of iterations is not a constant" if m.counting(computation, i) is None else ""


def random_algorithm(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    name = {1: "three-fry", 2: "philox"}.get(i.rng_algorithm, i.rng_algorithm)
    return f"the algorithm {name} is not supported" if i.rng_algorithm else ""


def dilated_convolution(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    is_wrong = m.dilated(i, "base_dilation") and m.dilated(i, "window_dilation")
    return "both the input and the kernel are dilated" if is_wrong else ""


def strided_convolution(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    is_wrong = m.dilated(i, "base_dilation") and m.dilated(i, "stride")
    return "the input is dilated and the stride is above 1" if is_wrong else ""


def topk_key(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    if i.custom_call_target != "AwsNeuronTopK":
        return ""
    key = element_type(m.operands(computation, i)[0].shape)
    return f"a top-k of {key} is not supported" if key in ("s32", "s64") else ""


def window_base_dilation(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return "base_dilation is above 1" if m.dilated(i, "base_dilation") else ""


def window_dilation(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return "window_dilation is above 1" if m.dilated(i, "window_dilation") else ""


def window_operands(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    n = len(i.operand_ids)
    return f"{n} operands and not one input and its initial value" if n != 2 else ""


def arithmetic_shift(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    shifted = element_type(m.operands(computation, i)[0].shape)
    return "" if shifted in ("s32", "u32", "f32") else f"an arithmetic shift of {shifted} is not supported"


def gather_index(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    return _beyond(m, computation, i, i.gather.start_index_map, i.gather.index_vector_dim, 1)


def scatter_index(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    to, vector = i.scatter.scatter_dims_to_operand_dims, i.scatter.index_vector_dim
    return _beyond(m, computation, i, to, vector, len(i.operand_ids) // 2)


def _beyond(m: LintedModule, computation: Any, i: Any, to: Any, vector: int, index: int) -> str:
    """Returns a message if a column of an index is an iota that is longer than the indexed dimension."""
    operands = m.operands(computation, i)
    for column, dimension in enumerate(to):
        length = _iota_length(m, computation, operands[index], vector, column)
        size = operands[0].shape.dimensions[dimension]
        if length > size:
            return f"the index counts to {length - 1}, and dimension {dimension} has {size} elements"
    return ""


def _iota_length(m: LintedModule, computation: Any, i: Any, vector: int, column: int) -> int:
    """Returns the length of the iota that is a column of an index; 0 if the column is not an iota, or is computed."""
    columns = i.shape.dimensions[vector] if vector < len(i.shape.dimensions) else 1
    while i.opcode == "concatenate" and columns > 1:
        if list(i.dimensions) != [vector]:
            return 0
        for part in m.operands(computation, i):
            width = part.shape.dimensions[vector]
            if column < width:
                i, columns = part, width
                break
            column -= width
    if columns > 1:
        return 0
    i = m.source(computation, i)
    return int(i.shape.dimensions[i.dimensions[0]]) if i.opcode == "iota" else 0


def integer_sum(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    types = {element_type(s) for s in shapes(i.shape)} & _WIDE
    if types and i.called_computation_ids and m.root(i.called_computation_ids[0]).opcode == "add":
        return f"a sum of {', '.join(sorted(types))} over cores is not supported"
    return ""


def integer_power(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    kind = element_type(i.shape)
    return f"a power of {kind} is not supported" if kind in ("s64", "u64") else ""


def shape_rules(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    operands = [list(o.shape.dimensions) for o in m.operands(computation, i)]
    have = list(i.shape.dimensions)
    expected: list[list[int]] = []
    if len(operands) == (2 if i.opcode in BINARY else 1 if i.opcode in UNARY else 0):
        expected = operands
    elif i.opcode == "dot" and len(operands) == 2:
        a, b = operands
        d = i.dot
        left, right = ([a[n] for n in d.lhs_contracting], [b[n] for n in d.rhs_contracting])
        batch = [a[n] for n in d.lhs_batch]
        if left != right or batch != [b[n] for n in d.rhs_batch]:
            return f"a dot of {a} and {b} that contracts {left} with {right}"
        free = [
            [size for n, size in enumerate(sizes) if n not in (*contracting, *of_batch)]
            for sizes, contracting, of_batch in (
                (a, d.lhs_contracting, d.lhs_batch),
                (b, d.rhs_contracting, d.rhs_batch),
            )
        ]
        expected = [[*batch, *free[0], *free[1]]]
    elif i.opcode == "transpose":
        expected = [[operands[0][n] for n in i.dimensions]]
    elif i.opcode == "reshape" and prod(have) != prod(operands[0]):
        expected = operands
    wrong = next((sizes for sizes in expected if sizes != have), None)
    return "" if wrong is None else f"the result is {have}, and its operands give {wrong}"


def integer_division(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    """Integer division by a constant that is neither a power of two nor above all dividends: it uses a float32 reciprocal."""
    if element_type(i.shape)[0] not in "su":
        return ""
    dividend, divisor = (m.source(computation, o) for o in m.operands(computation, i))
    if divisor.opcode != "constant":
        return ""
    others = [abs(n) for n in integers(divisor.literal) if abs(n) & (abs(n) - 1)]
    is_small = dividend.opcode == "iota" and others and dividend.shape.dimensions[dividend.dimensions[0]] <= min(others)
    if not others or is_small:
        return ""
    return f"a {i.opcode} of {element_type(i.shape)} by {others[0]} may be off by one"


def small_topk(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    if i.opcode == "custom-call" and i.custom_call_target != "AwsNeuronTopK":
        return ""
    axis = m.operands(computation, i)[0].shape.dimensions
    size = axis[i.dimensions[0] if i.opcode == "sort" else -1] if axis else 0
    if size <= 2:
        return f"the axis has {size} elements"
    is_small = i.opcode == "custom-call" and i.backend_config.isdigit() and int(i.backend_config) <= 2
    return f"k is {int(i.backend_config)}" if is_small else ""


def element_gather(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    count = prod(i.shape.dimensions)
    is_slow = count > MANY_INDICES and all(n == 1 for n in i.gather_slice_sizes)
    return f"{count} elements are gathered one by one" if is_slow else ""


def rounding(m: LintedModule, computation: Any, i: Any, target: Target | None) -> str:
    (inner,) = m.operands(computation, i)
    types = [element_type(i.shape), element_type(inner.shape)]
    types += [element_type(o.shape) for o in m.operands(computation, inner)[:1] if inner.opcode == "convert"]
    if types == ["f32", "bf16", "f32"]:
        return "f32 values are converted to bf16 and back: this is folded away, and nothing is rounded"
    return ""


# --- modules ----------------------------------------------------------------------------------------------------------


def ids(m: LintedModule, target: Target | None) -> Violations:
    seen: set[int] = set()
    for i in m.instructions:
        if not 0 <= i.id <= MAX_ID:
            yield i, f"instruction id {i.id} does not fit 32 bits"
        elif i.id in seen:
            yield i, f"instruction id {i.id} is used twice"
        seen.add(i.id)


def names(m: LintedModule, target: Target | None) -> Violations:
    seen: set[str] = set()
    for i in m.instructions:
        if i.name in seen:
            yield i, "two instructions have this name"
        seen.add(i.name)


def dynamic(m: LintedModule, target: Target | None) -> Violations:
    if m.message.is_dynamic:
        yield None, "the module has dynamic shapes"
    for i in m.instructions:
        if any(any(s.is_dynamic_dimension) for s in shapes(i.shape)):
            yield i, f"the shape {proto.shape_text(i.shape)} is dynamic"


def i64_parameters(m: LintedModule, target: Target | None) -> Violations:
    for i in proto.parameters(proto.entry(m.message)):
        if element_type(i.shape) in ("s64", "u64"):
            yield i, "a 64-bit integer parameter is narrowed or refused, depending on the compiler's release"


def empty(m: LintedModule, target: Target | None) -> Violations:
    for i in proto.parameters(proto.entry(m.message)):
        if 0 in i.shape.dimensions:
            yield i, f"the parameter {proto.shape_text(i.shape)} has no elements"


def fp8(m: LintedModule, target: Target | None) -> Violations:
    assert target is not None
    if FP8_FLAG in m.flags:
        # `QuantizeMX` to float8_e4m3fn together with the flag that changes the meaning of f8e4m3fn.
        for _, i in m.by_opcode.get("custom-call", ()):
            if i.custom_call_target == lint_mx.QUANTIZE and lint_mx.dtype(i) == "float8_e4m3fn":
                yield i, "float8_e4m3fn can't be converted here"
    elif "F8E4M3FN" not in target.fp8:
        for i in m.by_type.get("f8e4m3fn", ()):
            yield i, f"the type f8e4m3fn is not supported on {target.name}"


def written_in_place(m: LintedModule, target: Target | None) -> Violations:
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


def replica_groups(m: LintedModule, target: Target | None) -> Violations:
    found = []
    for i in m.instructions:
        groups = tuple(tuple(group.ids) for group in i.device_list.groups or i.replica_groups)
        if groups:
            found.append((i, groups))
    ranks = 1 + max((rank for _, groups in found for group in groups for rank in group), default=-1)
    if target is not None and found and (why := target.rank_error(ranks)):
        yield found[0][0], why
    for i, groups in found:
        if sorted(rank for group in groups for rank in group) != list(range(ranks)):
            yield i, f"its replica groups do not have each of {ranks} ranks once"
    different = len({groups for _, groups in found})
    if different > MAX_GROUPS:
        yield None, f"{different} different replica groups, and a NEFF has {MAX_GROUPS} at most"


def memory(m: LintedModule, target: Target | None) -> Violations:
    assert target is not None
    entry = proto.entry(m.message)
    results = proto.result_shapes(m.message)
    shared = {
        entry.output_shape_index[0] if entry.output_shape_index else 0 for entry in m.message.input_output_alias.entries
    }
    resident = [p.shape for p in proto.parameters(entry)] + [s for n, s in enumerate(results) if n not in shared]
    needed, limit = sum(map(size, resident)), (target.memory_gib * (m.lnc or target.lnc)) << 30
    if needed > limit:
        yield (
            None,
            f"inputs and results have {needed / 2**30:.1f} GiB, and a core of {target.name} has {limit >> 30} GiB",
        )


def _estimate(m: LintedModule, target: Target) -> estimates.Estimate:
    """Returns the module's estimate for the lint's target; cached, since two rules need it."""
    made: estimates.Estimate = m.estimate or estimates.estimate(m, target.name, m.lnc)
    m.estimate = made
    return made


def instructions(m: LintedModule, target: Target | None) -> Violations:
    assert target is not None
    if not any(flag.startswith(_INSTRUCTION_LIMIT) for flag in m.flags):
        total = _estimate(m, target).total
        if total > MAX_INSTRUCTIONS:
            yield None, f"about {total / 1e6:.1f} million instructions"


def descriptors(m: LintedModule, target: Target | None) -> Violations:
    assert target is not None
    descriptors = _estimate(m, target).dma_descriptors
    if descriptors > estimates.MAX_DESCRIPTORS:
        yield None, f"about {descriptors / 1e6:.1f} million DMA descriptors"
