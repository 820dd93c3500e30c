"""Forms of HLO that neuronx-cc accepts but compiles to wrong or very slow code, as measured by others with 2.27 on trn1 and trn2.

An unequal split of the last axis is not among them: the measured mistake is in PyTorch's bridge's lowering of `torch.split`, and
slices, the only form in HLO, were exact in the same measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from kernelgen.hlo.linted import LintedModule, element_type, integers
from kernelgen.targets import Target

Violations = Iterator[tuple[Any, str]]

_INTEGERS = ("s", "u")
MANY_INDICES = 10_000
"""Elements that a gather may move one by one: each is a DMA descriptor."""


def integer_division(m: LintedModule, target: Target | None) -> Violations:
    """Integer division by a constant that is neither a power of two nor above all dividends: it uses a float32 reciprocal."""
    for computation, i in m.with_computation("divide", "remainder"):
        if element_type(i.shape)[0] not in _INTEGERS:
            continue
        dividend, divisor = (m.source(computation, o) for o in m.operands(computation, i))
        if divisor.opcode != "constant":
            continue
        others = [abs(n) for n in integers(divisor.literal) if abs(n) & (abs(n) - 1)]
        if others and not (
            dividend.opcode == "iota" and dividend.shape.dimensions[dividend.dimensions[0]] <= min(others)
        ):
            yield i, f"a {i.opcode} of {element_type(i.shape)} by {others[0]} may be off by one"


def small_topk(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation("sort", "custom-call"):
        if i.opcode == "custom-call" and i.custom_call_target != "AwsNeuronTopK":
            continue
        axis = m.operands(computation, i)[0].shape.dimensions
        size = axis[i.dimensions[0] if i.opcode == "sort" else -1] if axis else 0
        if size <= 2:
            yield i, f"the axis has {size} elements"
        elif i.opcode == "custom-call" and i.backend_config.isdigit() and int(i.backend_config) <= 2:
            yield i, f"k is {int(i.backend_config)}"


def element_gather(m: LintedModule, target: Target | None) -> Violations:
    for _, i in m.with_computation("gather"):
        count = prod(i.shape.dimensions)
        if count > MANY_INDICES and all(n == 1 for n in i.gather_slice_sizes):
            yield i, f"{count} elements are gathered one by one"


def rounding(m: LintedModule, target: Target | None) -> Violations:
    for computation, i in m.with_computation("convert"):
        (inner,) = m.operands(computation, i)
        types = [element_type(i.shape), element_type(inner.shape)]
        types += [element_type(o.shape) for o in m.operands(computation, inner)[:1] if inner.opcode == "convert"]
        if types == ["f32", "bf16", "f32"]:
            yield i, "f32 values are converted to bf16 and back: this is folded away, and nothing is rounded"
