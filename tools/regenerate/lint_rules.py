"""The table of the lint's rules in docs/reference/lint.md."""

from __future__ import annotations

from kernelgen.hlo.lint import RULES

HEAD = "| rule | what | severity | known from |\n|---|---|---|---|\n"


def render(text: str) -> str:
    """Returns the page with the current rules; rules of one name share a row."""
    before, _, rest = text.partition(HEAD)
    after = rest[rest.index("\n\n") :]
    rows = []
    for name in dict.fromkeys(rule.name for rule in RULES):
        rules = [rule for rule in RULES if rule.name == name]
        what, evidence = (
            "; ".join(dict.fromkeys(texts)) for texts in zip(*((r.what, r.evidence) for r in rules), strict=True)
        )
        rows.append(f"| `{name}` | {what} | {rules[0].severity} | {evidence} |")
    return before + HEAD + "\n".join(rows) + after
