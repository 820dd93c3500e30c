"""Rules for AWS's published error codes that check more than an opcode or a type: windows, indices, shapes, memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from kernelgen.hlo import lint_mx, proto
from kernelgen.hlo.linted import LintedModule, element_type, shapes, size
from kernelgen.targets import Target

Violations = Iterator[tuple[Any, str]]

MAX_GROUPS = 12
"""Maximum number of replica groups in a NEFF: `NEC_MAX_COMM_N` of AWS Neuron's nec.h."""

_WIDE = frozenset({"s32", "s64", "u32", "u64"})
_UNARY = frozenset(
    "abs ceil convert copy cosine exponential exponential-minus-one floor is-finite log log-plus-one logistic negate not"
    " round-nearest-afz round-nearest-even rsqrt sign sine sqrt cbrt tan tanh".split()
)
_BINARY = frozenset(
    "add and atan2 compare divide maximum minimum multiply or power remainder shift-left shift-right-arithmetic"
    " shift-right-logical subtract xor".split()
)


def random_algorithm(m: LintedModule, target: Target | None) -> Violations:
    for _, i in m.with_computation("rng-bit-generator"):
        if i.rng_algorithm:
            yield (
                i,
                f"the algorithm { ({1: 'three-fry', 2: 'philox'}.get(i.rng_algorithm, i.rng_algorithm)) } is not supported",
            )


def dilated_convolution(m: LintedModule, target: Target | None) -> Violations:
    for _, i in m.with_computation("convolution"):
        if m.dilated(i, "base_dilation") and m.dilated(i, "window_dilation"):
            yield i, "both the input and the kernel are dilated"


def strided_convolution(m: LintedModule, target: Target | None) -> Violations:
    for _, i in m.with_computation("convolution"):
        if m.dilated(i, "base_dilation") and m.dilated(i, "stride"):
            yield i, "the input is dilated and the stride is above 1"


def topk_key(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation("custom-call"):
        if i.custom_call_target == "AwsNeuronTopK":
            key = element_type(m.operands(computation, i)[0].shape)
            if key in ("s32", "s64"):
                yield i, f"a top-k of {key} is not supported"


def window_base_dilation(m: LintedModule, target: Target | None) -> Violations:
    return (
        (i, "base_dilation is above 1") for _, i in m.with_computation("reduce-window") if m.dilated(i, "base_dilation")
    )


def window_dilation(m: LintedModule, target: Target | None) -> Violations:
    return (
        (i, "window_dilation is above 1")
        for _, i in m.with_computation("reduce-window")
        if m.dilated(i, "window_dilation")
    )


def window_operands(m: LintedModule, target: Target | None) -> Violations:
    for _, i in m.with_computation("reduce-window"):
        if len(i.operand_ids) != 2:
            yield i, f"{len(i.operand_ids)} operands and not one input and its initial value"


def arithmetic_shift(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation("shift-right-arithmetic"):
        shifted = element_type(m.operands(computation, i)[0].shape)
        if shifted not in ("s32", "u32", "f32"):
            yield i, f"an arithmetic shift of {shifted} is not supported"


def gather_index(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation("gather"):
        yield from _beyond(m, computation, i, i.gather.start_index_map, i.gather.index_vector_dim, 1)


def scatter_index(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation("scatter"):
        yield from _beyond(
            m,
            computation,
            i,
            i.scatter.scatter_dims_to_operand_dims,
            i.scatter.index_vector_dim,
            len(i.operand_ids) // 2,
        )


def _beyond(m: LintedModule, computation: Any, i: Any, to: Any, vector: int, index: int) -> Violations:
    """Yields `i` if a column of its index is an iota that is longer than the indexed dimension."""
    operands = m.operands(computation, i)
    for column, dimension in enumerate(to):
        length = _iota_length(m, computation, operands[index], vector, column)
        size = operands[0].shape.dimensions[dimension]
        if length > size:
            yield i, f"the index counts to {length - 1}, and dimension {dimension} has {size} elements"


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


def integer_sum(opcode: str) -> Any:
    """Returns a check for collective operations that add 32- or 64-bit integers."""

    def check(m: LintedModule, target: Target | None) -> Violations:
        for _, i in m.with_computation(opcode):
            found = {element_type(s) for s in shapes(i.shape)} & _WIDE
            if found and i.called_computation_ids and m.root(i.called_computation_ids[0]).opcode == "add":
                yield i, f"a sum of {', '.join(sorted(found))} over cores is not supported"

    return check


def replica_groups(m: LintedModule, target: Target | None) -> Violations:
    found = []
    for _, i in m.with_computation():
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


def integer_power(m: LintedModule, target: Target | None) -> Violations:
    for _, i in m.with_computation("power"):
        if element_type(i.shape) in ("s64", "u64"):
            yield i, f"a power of {element_type(i.shape)} is not supported"


def shape_rules(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation():
        operands = [list(o.shape.dimensions) for o in m.operands(computation, i)]
        have = list(i.shape.dimensions)
        wanted: list[list[int]] = []
        if (i.opcode in _UNARY and len(operands) == 1) or (i.opcode in _BINARY and len(operands) == 2):
            wanted = operands
        elif i.opcode == "dot" and len(operands) == 2:
            a, b = operands
            d = i.dot
            left, right = ([a[n] for n in d.lhs_contracting], [b[n] for n in d.rhs_contracting])
            batch = [a[n] for n in d.lhs_batch]
            if left != right or batch != [b[n] for n in d.rhs_batch]:
                yield i, f"a dot of {a} and {b} that contracts {left} with {right}"
            free = [
                [size for n, size in enumerate(sizes) if n not in (*contracting, *of_batch)]
                for sizes, contracting, of_batch in (
                    (a, d.lhs_contracting, d.lhs_batch),
                    (b, d.rhs_contracting, d.rhs_batch),
                )
            ]
            wanted = [[*batch, *free[0], *free[1]]]
        elif i.opcode == "transpose":
            wanted = [[operands[0][n] for n in i.dimensions]]
        elif i.opcode == "reshape" and prod(have) != prod(operands[0]):
            wanted = operands
        for sizes in wanted:
            if sizes != have:
                yield i, f"the result is {have}, and its operands give {sizes}"
                break


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


def converted_fp8(m: LintedModule, target: Target | None) -> Violations:
    """`QuantizeMX` to float8_e4m3fn together with the flag that changes the meaning of f8e4m3fn."""
    for _, i in m.with_computation("custom-call"):
        if i.custom_call_target == lint_mx.QUANTIZE and lint_mx.dtype(i) == "float8_e4m3fn":
            yield i, "float8_e4m3fn can't be converted here"


def mx(code: str) -> Any:
    """Returns the check for one code of `lint_mx`."""

    def check(m: LintedModule, target: Target | None) -> Violations:
        return ((i, message) for found, i, message in lint_mx.violations(m) if found == code)

    return check
