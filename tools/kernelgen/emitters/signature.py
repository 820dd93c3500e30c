"""Checks that an emitter's signature matches ggml's op: its inputs, and every parameter."""

from __future__ import annotations

from kernelgen.emitters.registration import Registration
from kernelgen.errors import did_you_mean
from kernelgen.ggml import ops as ggml_ops


def check(r: Registration) -> list[str]:
    """Returns the differences between an emitter's signature and ggml's op; a custom op has no definition to differ from."""
    op = ggml_ops.op(r.op)
    if op.custom:
        return []
    problems = []
    if op.inputs and (len(r.inputs) != len(op.inputs) or r.required != op.required):
        want = ", ".join([*op.inputs[: op.required], *(f"{name}=None" for name in op.inputs[op.required :])])
        have = ", ".join([*r.inputs[: r.required], *(f"{name}=None" for name in r.inputs[r.required :])])
        problems.append(f"ggml's {r.op} has the inputs ({want}); emitter '{r.function}' takes ({have})")
    for p in r.params:
        known = op.by_name.get(p.name)
        word = p.name.removeprefix("word")
        if known is None and not (p.name.startswith("word") and word.isdecimal() and int(word) < ggml_ops.N_WORDS):
            names = ", ".join(op.by_name) or "none"
            near = did_you_mean(p.name, op.by_name)
            problems.append(f"ggml's {r.op} has no parameter '{p.name}'{near} (it has: {names})")
        elif known is not None and known.kind is not p.kind:
            problems.append(f"parameter '{p.name}' of ggml's {r.op} is {known.kind.__name__}, not {p.kind.__name__}")
    # An emitter would silently ignore a parameter that it does not declare.
    missing = [name for name in op.by_name if name not in {p.name for p in r.params}]
    if missing:
        problems.append(f"emitter '{r.function}' lacks parameters of ggml's {r.op}: {', '.join(missing)}")
    return problems
