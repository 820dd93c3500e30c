"""Finds HLO that neuronx-cc is known to refuse, before any compiler runs.

neuronx-cc may still refuse a module without findings; docs/results/real-artifacts.md compares the rules with public modules that
were compiled.

Each rule is one row of `RULES`. Its name is the compiler's error code if there is one, otherwise `kernelgen/…`. A finding is an
error if AWS documents a refusal or a log shows one, and a warning if the compiler accepts the module but may not compile what was
meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernelgen.hlo import lint_checks as checks
from kernelgen.hlo import lint_mx
from kernelgen.hlo.linted import LintedModule
from kernelgen.targets import TARGETS, Target

ERROR, WARNING = "error", "warning"
"""Severities."""

_DOWNCAST = "--implicit-integer-downcast="


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of refused HLO.

    Attributes:
        name: see `Finding.rule`.
        check: a check of modules; or, with `opcodes`, of instructions, or the message for each of them.
        hint: see `Finding.hint`.
        what: description of the refused HLO, for docs/reference/lint.md.
        per_target: whether it depends on the target or the settings; without a target such a rule is skipped.
        severity: see `Finding.severity`.
        evidence: the documentation or observation of the refusal.
        opcodes: the instructions that it checks.
        types: the refused element types, in place of a check.
        waiver: the value of --implicit-integer-downcast that makes the compiler accept it: then a finding is a warning.
    """

    name: str
    check: Callable[..., Any] | str
    hint: str
    what: str
    per_target: bool = False
    severity: str = ERROR
    evidence: str = ""
    waiver: str = ""
    opcodes: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    def violations(self, m: LintedModule, target: Target | None) -> Iterator[tuple[Any, str]]:
        """Yields (instruction or None for the module, message) per violation."""
        if self.types:
            yield from (
                (i, f"the type {kind} is not supported") for kind in self.types for i in m.by_type.get(kind, ())
            )
        elif isinstance(self.check, str):
            yield from ((i, self.check) for opcode in self.opcodes for _, i in m.by_opcode.get(opcode, ()))
        elif not self.opcodes:
            yield from self.check(m, target)
        else:
            for opcode in self.opcodes:
                for computation, i in m.by_opcode.get(opcode, ()):
                    if message := self.check(m, computation, i, target):
                        yield i, message


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
        opcodes=("topk", "custom-call"),
    ),
    Rule(
        "NCC_EVRF001",
        "triangular-solve is not supported",
        "substitute row by row in a loop of a constant number of steps",
        "`triangular-solve`",
        evidence=_AWS,
        opcodes=("triangular-solve",),
    ),
    Rule(
        "NCC_ESPP004",
        "",
        "compute in float32",
        "64-bit floats, and 4-bit ones (`f4e2m1fn`)",
        evidence=_AWS + ", and logs",
        types=("f64", "f4e2m1fn"),
    ),
    Rule(
        "NCC_EVRF004",
        "",
        "compute real and imaginary parts",
        "complex numbers",
        evidence=_AWS,
        types=("c64", "c128"),
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
        checks.wide_dot,
        "convert the operands to a float type",
        "a `dot` of 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="dot",
        opcodes=("dot",),
    ),
    Rule(
        "NCC_EVRF035",
        checks.integer_dot,
        "convert the operands to float32",
        "a `dot` of 32-bit integers on trn2 and trn3",
        per_target=True,
        evidence=_AWS,
        waiver="dot",
        opcodes=("dot",),
    ),
    Rule(
        "NCC_ESFH002",
        checks.u64_constants,
        "use 32-bit constants",
        "unsigned 64-bit constants above 2³² − 1",
        evidence=_AWS,
        opcodes=("constant",),
    ),
    Rule("NCC_EMOD025", checks.dynamic, "pad to a static shape and mask", "dynamic shapes", evidence=_AWS),
    Rule(
        "kernelgen/conditional",
        "cond is not supported",
        "compute both and select",
        "`conditional`",
        evidence=_JAX,
        opcodes=("conditional",),
    ),
    Rule(
        "kernelgen/while",
        checks.loops,
        "loop a constant number of times (lax.fori_loop with constant bounds)",
        "loops whose number of iterations is not a constant",
        evidence=_JAX,
        opcodes=("while",),
    ),
    Rule(
        "kernelgen/reduce-precision",
        "reduce-precision is not supported",
        "use astype",
        "`reduce-precision`",
        evidence=_JAX,
        opcodes=("reduce-precision",),
    ),
    Rule(
        "NCC_EVRF015",
        checks.custom_calls,
        "known: " + ", ".join(sorted(checks.KNOWN_CUSTOM_CALLS | lint_mx.CALLS)),
        "custom calls that are neither among AWS's 29 nor those of MX types",
        evidence=_AWS,
        opcodes=("custom-call",),
    ),
    Rule(
        "kernelgen/host",
        checks.host_ops,
        "a kernel can't call the host: remove callbacks and debug prints",
        "callbacks, infeed, outfeed, send and receive",
        evidence=_JAX,
        opcodes=(*checks.HOST_OPS, "custom-call"),
    ),
    Rule(
        "NCC_EVRF016",
        checks.scatter_reduce,
        "scatter float values, or overwrite",
        "scatters that combine integers; NCC_EVRF060 has the same meaning",
        per_target=True,
        evidence=_AWS,
        waiver="scatter",
        opcodes=("scatter",),
    ),
    Rule(
        "NCC_EVRF005",
        "",
        "FNUZ types exist on no target",
        "FNUZ types",
        evidence=_AWS,
        types=tuple(sorted(checks.FNUZ)),
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
        opcodes=("sort",),
    ),
    Rule(
        "NCC_EVRF006",
        checks.random_algorithm,
        "use the default algorithm, or compute the bits (jax.random does)",
        "`rng-bit-generator` with another algorithm than the default",
        evidence=_AWS,
        opcodes=("rng-bit-generator",),
    ),
    Rule(
        "NCC_EVRF010",
        checks.dilated_convolution,
        "dilate one of them by padding with zeros",
        "a convolution whose input and kernel are both dilated",
        evidence=_AWS,
        opcodes=("convolution",),
    ),
    Rule(
        "NCC_EVRF011",
        checks.strided_convolution,
        "dilate the input by padding with zeros",
        "a convolution with a stride whose input is dilated",
        evidence=_AWS,
        opcodes=("convolution",),
    ),
    Rule(
        "NCC_EVRF013",
        checks.topk_key,
        "convert the key to a float type",
        "a top-k of s32 or s64",
        evidence=_AWS,
        opcodes=("custom-call",),
    ),
    Rule(
        "NCC_EVRF017",
        checks.window_base_dilation,
        "pad with the initial value",
        "`reduce-window` with a base_dilation above 1",
        evidence=_AWS,
        opcodes=("reduce-window",),
    ),
    Rule(
        "NCC_EVRF018",
        checks.window_dilation,
        "take slices, and combine them",
        "`reduce-window` with a window_dilation above 1",
        evidence=_AWS,
        opcodes=("reduce-window",),
    ),
    Rule(
        "NCC_EVRF019",
        checks.window_operands,
        "write a reduce-window for each input",
        "`reduce-window` of several inputs",
        evidence=_AWS,
        opcodes=("reduce-window",),
    ),
    Rule(
        "NCC_EVRF022",
        checks.arithmetic_shift,
        "convert to int32 first",
        "`shift-right-arithmetic` of a type other than s32, u32 or f32",
        evidence=_AWS,
        opcodes=("shift-right-arithmetic",),
    ),
    Rule(
        "NCC_EVRF031",
        checks.scatter_index,
        "count no further than the dimension has elements",
        "a scatter whose index is an iota longer than the dimension",
        evidence=_AWS,
        opcodes=("scatter",),
    ),
    Rule(
        "NCC_EVRF056",
        checks.gather_index,
        "count no further than the dimension has elements: a table of positions may be too short",
        "a gather whose index is an iota longer than the dimension",
        evidence=_AWS,
        opcodes=("gather",),
    ),
    Rule(
        "NCC_EVRF061",
        checks.integer_sum,
        "convert to float32",
        "`all-reduce` that adds 32- or 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="all_reduce",
        opcodes=("all-reduce",),
    ),
    Rule(
        "kernelgen/replica-groups",
        checks.replica_groups,
        "let all collectives of a kernel be over the same groups, which have each rank once",
        f"replica groups that do not have each rank once, or more than {checks.MAX_GROUPS} different ones; "
        "a number of ranks that the target lacks",
        evidence=_NEC,
    ),
    Rule(
        "NCC_EVRF062",
        checks.integer_power,
        "convert to int32 or float32",
        "`power` of 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="pow",
        opcodes=("power",),
    ),
    Rule(
        "NCC_EVRF063",
        checks.integer_sum,
        "convert to float32",
        "`reduce-scatter` that adds 32- or 64-bit integers",
        per_target=True,
        evidence=_AWS,
        waiver="reduce_scatter",
        opcodes=("reduce-scatter",),
    ),
    Rule(
        "NCC_EVRF064",
        checks.shape_rules,
        "write the module with XLA, which checks shapes",
        "an elementwise operation, dot, transpose or reshape whose result does not have the shape that its operands give",
        evidence=_AWS,
        opcodes=(*checks.UNARY, *checks.BINARY, "dot", "transpose", "reshape"),
    ),
    Rule(
        "NCC_EOOM001",
        checks.memory,
        "split the kernel",
        "inputs and results above a logical core's memory; NCC_EOOM002, NCC_EVRF009 and NCC_EXSP001 have the same meaning",
        per_target=True,
        evidence=_AWS + ", and logs",
    ),
    *(
        Rule(
            code,
            partial(lint_mx.violation, code),
            "see AWS's page of the error",
            what,
            evidence=_AWS,
            opcodes=("custom-call",),
        )
        for code, what in lint_mx.RULES.items()
    ),
    Rule(
        "kernelgen/integer-division",
        checks.integer_division,
        "divide by a power of two, compare with multiples, or count with iotas of two dimensions",
        "integers divided by a constant that is not a power of two: a float32 reciprocal made 23 of 32 quotients 1 too small",
        severity=WARNING,
        evidence=_MEASURED,
        opcodes=("divide", "remainder"),
    ),
    Rule(
        "kernelgen/small-top-k",
        checks.small_topk,
        "compare and select",
        "a sort or top-k of an axis of at most 2 elements, or a top-k with k up to 2: wrong values",
        severity=WARNING,
        evidence=_MEASURED,
        opcodes=("sort", "custom-call"),
    ),
    Rule(
        "kernelgen/element-gather",
        checks.element_gather,
        "gather whole rows",
        "a gather of more than 10,000 single elements: each needs a DMA descriptor, and 500,000 take 60 ms",
        severity=WARNING,
        evidence=_MEASURED,
        opcodes=("gather",),
    ),
    Rule(
        "kernelgen/bf16-rounding",
        checks.rounding,
        "round by arithmetic (x * 65537, Veltkamp's split), or leave it out when the rounding is not meant",
        "f32 converted to bf16 and back: the compiler removes both conversions, so nothing is rounded",
        severity=WARNING,
        evidence=_MEASURED,
        opcodes=("convert",),
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One instruction that a compiler would refuse, or might compile to something unintended.

    Attributes:
        rule: the compiler's error code, or `kernelgen/<name>`.
        severity: `ERROR` or `WARNING`.
        instruction: name and opcode of the instruction, or `module`.
        message: the problem.
        hint: the remedy.
    """

    rule: str
    severity: str
    instruction: str
    message: str
    hint: str = ""

    def __str__(self) -> str:
        return f"[{self.rule}] {self.instruction}: {self.message}"


def lint(
    hlo: bytes, target: Target | None = None, *, flags: Sequence[str] = (), lnc: int | None = None
) -> list[Finding]:
    """Returns the instructions that neuronx-cc would refuse in a module, or might compile to something unintended.

    Args:
        hlo: serialized `HloModuleProto`.
        target: the target of the compile; without one, only rules for all targets and settings apply.
        flags: neuronx-cc's further flags.
        lnc: physical cores of a logical one; None for the target's default.

    Raises:
        ValueError: `hlo` is not such a module.
    """
    m = LintedModule(hlo, flags, lnc)
    findings = []
    for rule in RULES:
        if rule.per_target and target is None:
            continue
        severity = WARNING if rule.waiver and _waived(rule.waiver, flags) else rule.severity
        for i, message in rule.violations(m, target):
            where = "module" if i is None else f"{i.name} ({i.opcode})"
            findings.append(Finding(rule.name, severity, where, message, rule.hint))
    return findings


def _waived(waiver: str, flags: Sequence[str]) -> bool:
    """Whether the flags have `--implicit-integer-downcast` with this value, alone, in a list, or through `all`."""
    given = " ".join(flags).replace(_DOWNCAST[:-1] + " ", _DOWNCAST).split()
    values = {v for flag in given if flag.startswith(_DOWNCAST) for v in flag.removeprefix(_DOWNCAST).split(",")}
    return bool(values & {waiver, "all"})


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings that a compiler would refuse."""
    return [finding for finding in findings if finding.severity == ERROR]
