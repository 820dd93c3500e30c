"""Finds HLO that neuronx-cc is known to refuse, before any compiler runs, by the rules of `lint_rules`.

neuronx-cc may still refuse a module without findings; docs/results/real-artifacts.md compares the rules with public modules that
were compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelgen.hlo.lint_rules import ERROR, RULES, WARNING
from kernelgen.hlo.linted import LintedModule
from kernelgen.targets import Target

_DOWNCAST = "--implicit-integer-downcast="


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
