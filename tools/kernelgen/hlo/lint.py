"""What neuronx-cc is known to refuse, found in the HLO before any compiler runs, by the rules of `lint_rules`.

A module without findings may still be refused; docs/results/real-artifacts.md says how the rules compare with public
modules that were compiled.
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
