"""The rules of the lint: what neuronx-cc refuses, the evidence, and the remedy.

Each rule is one row of `RULES`. Its name is the compiler's error code if there is one, otherwise `kernelgen/…`. A finding is an
error if AWS documents a refusal or a log shows one, and a warning if the compiler accepts the module but may not compile what was
meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelgen.hlo import lint_checks as checks
from kernelgen.hlo import lint_mistakes as mistakes
from kernelgen.hlo import lint_mx
from kernelgen.hlo import lint_published as published
from kernelgen.hlo.linted import LintedModule
from kernelgen.targets import TARGETS, Target

ERROR, WARNING = "error", "warning"
"""Severities."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of refused HLO.

    Attributes:
        name: see `Finding.rule`.
        check: yields (instruction or None for the module, message) per violation.
        hint: see `Finding.hint`.
        what: description of the refused HLO, for docs/reference/lint.md.
        per_target: whether it depends on the target or the settings; without a target such a rule is skipped.
        severity: see `Finding.severity`.
        evidence: the documentation or observation of the refusal.
        waiver: the value of --implicit-integer-downcast that makes the compiler accept it: then a finding is a warning.
    """

    name: str
    check: Callable[[LintedModule, Target | None], Iterator[tuple[Any, str]]]
    hint: str
    what: str
    per_target: bool = False
    severity: str = ERROR
    evidence: str = ""
    waiver: str = ""


_AWS = "AWS's page of the error"
_JAX = "AWS's known issues of JAX"
_XLA = "XLA's own reader"
_NEC = "AWS's header and pages of collectives"
_MEASURED = "measured on trn1 and trn2 by others, neuronx-cc 2.27"

_WITH_F8E4M3FN = " and ".join(name for name, target in TARGETS.items() if "F8E4M3FN" in target.fp8)

RULES: tuple[Rule, ...] = (
    Rule(
        "kernelgen/id-32-bit",
        checks.ids,
        "canonicalize the module: ids are dense 32-bit integers",
        "instruction ids that are negative, beyond 2³¹ − 1, or used twice; 0 is fine",
        evidence="logs of neuronx-cc 2.23 and 2.26; for an id that is used twice, " + _XLA,
    ),
    Rule(
        "kernelgen/unique-name", checks.names, "canonicalize the module", "two instructions of one name", evidence=_XLA
    ),
    Rule(
        "kernelgen/alias",
        checks.written_in_place,
        "emit the module again: canonicalization names the input and records the pair",
        "an input that is written in place, such as a cache, and whose result does not share its memory",
        evidence="the names that NEFFs of neuronx-cc have: without the pair a cache is copied in each call",
    ),
    Rule(
        "NCC_EVRF001",
        checks.topk,
        "sort and slice: that is rewritten to a native top-k (k up to 16384, float keys)",
        "`topk`",
        evidence="logs",
    ),
    Rule(
        "NCC_EVRF001",
        checks.opcodes("triangular-solve is not supported", "triangular-solve"),
        "substitute row by row in a loop of a constant number of steps",
        "`triangular-solve`",
        evidence=_AWS,
    ),
    Rule(
        "NCC_ESPP004",
        checks.types("f64", "f4e2m1fn"),
        "compute in float32",
        "64-bit floats, and 4-bit ones (`f4e2m1fn`)",
        evidence=_AWS + ", and logs",
    ),
    Rule(
        "NCC_EVRF004",
        checks.types("c64", "c128"),
        "compute real and imaginary parts",
        "complex numbers",
        evidence=_AWS,
    ),
    Rule(
        "kernelgen/i64-parameter",
        checks.i64_parameters,
        "take pairs of i32 and use the lower word",
        "64-bit integer parameters: they arrive as pairs of 32 bits, and `--native-int64` changes what they mean",
        severity=WARNING,
        evidence="2.14 compiled 360 public modules that have some, as pairs of 32 bits",
    ),
    Rule(
        "kernelgen/empty-tensor",
        checks.empty,
        "leave the parameter out",
        "parameters without elements",
        evidence="six logs of neuronx-cc 2.14",
    ),
    Rule(
        "NCC_EVRF035",
        checks.dot("s64", "u64"),
        "convert the operands to a float type",
        "a `dot` of 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="dot",
    ),
    Rule(
        "NCC_EVRF035",
        checks.dot("s32", "u32"),
        "convert the operands to float32",
        "a `dot` of 32-bit integers on trn2 and trn3",
        per_target=True,
        evidence=_AWS,
        waiver="dot",
    ),
    Rule(
        "NCC_ESFH002",
        checks.u64_constants,
        "use 32-bit constants",
        "unsigned 64-bit constants above 2³² − 1",
        evidence=_AWS,
    ),
    Rule("NCC_EMOD025", checks.dynamic, "pad to a static shape and mask", "dynamic shapes", evidence=_AWS),
    Rule(
        "kernelgen/conditional",
        checks.opcodes("cond is not supported", "conditional"),
        "compute both and select",
        "`conditional`",
        evidence=_JAX,
    ),
    Rule(
        "kernelgen/while",
        checks.loops,
        "loop a constant number of times (lax.fori_loop with constant bounds)",
        "loops whose number of iterations is not a constant",
        evidence=_JAX,
    ),
    Rule(
        "kernelgen/reduce-precision",
        checks.opcodes("reduce-precision is not supported", "reduce-precision"),
        "use astype",
        "`reduce-precision`",
        evidence=_JAX,
    ),
    Rule(
        "NCC_EVRF015",
        checks.custom_calls,
        "known: " + ", ".join(sorted(checks.KNOWN_CUSTOM_CALLS | lint_mx.CALLS)),
        "custom calls that are neither among AWS's 29 nor those of MX types",
        evidence=_AWS,
    ),
    Rule(
        "kernelgen/host",
        checks.host_ops,
        "a kernel can't call the host: remove callbacks and debug prints",
        "callbacks, infeed, outfeed, send and receive",
        evidence=_JAX,
    ),
    Rule(
        "NCC_EVRF016",
        checks.scatter_reduce,
        "scatter float values, or overwrite",
        "scatters that combine integers; NCC_EVRF060 has the same meaning",
        per_target=True,
        evidence=_AWS,
        waiver="scatter",
    ),
    Rule(
        "NCC_EVRF005", checks.types(*sorted(checks.FNUZ)), "FNUZ types exist on no target", "FNUZ types", evidence=_AWS
    ),
    Rule(
        "NCC_EVRF051",
        checks.fp8,
        f"F8E4M3FN exists on {_WITH_F8E4M3FN} only; elsewhere {checks.FP8_FLAG} takes it for F8E4M3, whose largest value is 240",
        f"`f8e4m3fn`, except on trn3 or with `{checks.FP8_FLAG}`; with this flag, `QuantizeMX` to it",
        per_target=True,
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF029",
        checks.sort,
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
        "`shift-right-arithmetic` of a type other than s32, u32 or f32",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF031",
        published.scatter_index,
        "count no further than the dimension has elements",
        "a scatter whose index is an iota longer than the dimension",
        evidence=_AWS,
    ),
    Rule(
        "NCC_EVRF056",
        published.gather_index,
        "count no further than the dimension has elements: a table of positions may be too short",
        "a gather whose index is an iota longer than the dimension",
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
        f"replica groups that do not have each rank once, or more than {published.MAX_GROUPS} different ones; "
        "a number of ranks that the target lacks",
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
        "inputs and results above a logical core's memory; NCC_EOOM002, NCC_EVRF009 and NCC_EXSP001 have the same meaning",
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
        "a gather of more than 10,000 single elements: each needs a DMA descriptor, and 500,000 take 60 ms",
        severity=WARNING,
        evidence=_MEASURED,
    ),
    Rule(
        "kernelgen/bf16-rounding",
        mistakes.rounding,
        "round by arithmetic (x * 65537, Veltkamp's split), or leave it out when the rounding is not meant",
        "f32 converted to bf16 and back: the compiler removes both conversions, so nothing is rounded",
        severity=WARNING,
        evidence=_MEASURED,
    ),
    Rule(
        "NCC_EBVF030",
        checks.instructions,
        "fewer layers or fewer tokens in one kernel",
        "more than 5 million instructions, as estimated, unless a flag sets the limit",
        per_target=True,
        severity=WARNING,
        evidence="logs, with 8.7 to 39.7 million",
    ),
    Rule(
        "kernelgen/descriptors",
        checks.descriptors,
        "fewer layers or fewer tokens in one kernel, or a NKI kernel in the place of gathers",
        "more than 16,777,200 DMA descriptors, as estimated: the program is compiled, and the runtime does not load it",
        per_target=True,
        severity=WARNING,
        evidence=_MEASURED,
    ),
)
"""Every rule, in the order in which findings are reported."""
