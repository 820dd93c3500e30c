"""Writes derived kernels as the text of a manifest, which people can read, edit and check in."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelgen.ggml.ops import ParamValue
from kernelgen.model.derived import Derived, DerivedKernel
from kernelgen.model.formulas import Formula
from kernelgen.model.groups import GraphEntry, NodeFormula, Reference
from kernelgen.model.kernel_formulas import TensorFormula
from kernelgen.model.sizes import NAMES

_WIDTH = 150
_LONG = 200
"""An entry of this many lines or more is repeated by YAML's merge key."""
_YAML_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
"""Words that YAML 1.1 or 1.2 reads as something else than text."""
_MODEL_TYPE = "transformer"
"""`--model-type` of graph kernels: with neuronx-cc 2.27 on trn1, layers had 15 to 35 times fewer runs of spills, compiled in a
quarter less time and ran in a tenth less than with `generic`."""


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """The part of a manifest before the kernels.

    Attributes:
        name: the manifest's name.
        targets: the targets to build for.
        description: a text for readers.
        comment: lines that name the manifest's sources.
        weights: the requested layouts of weights, for all targets or for each; a layout of some weights is a mapping in YAML.
        lnc: physical cores of a logical core; None for each target's default.
    """

    name: str
    targets: Sequence[str]
    description: str
    comment: Sequence[str]
    weights: Sequence[str] | Mapping[str, Sequence[str]] = ()
    lnc: int | None = None


def text(head: ManifestHead, derived: Derived) -> str:
    """Returns the manifest's text."""
    entries = [entry for entry in derived.entries if entry.reason is None]
    graphs = [entry for entry in derived.graphs if entry.reason is None]
    shared = _shared([*entries, *graphs])
    where = _conditions(shared)
    name = _quoted(head.name) if head.name in _YAML_WORDS else head.name
    lines = [f"# {line}".rstrip() for line in head.comment]
    lines += ["format: 1", f"name: {name}", f"targets: [{', '.join(head.targets)}]"]
    lines.append(f"description: {_quoted(head.description)}")
    lines += [] if head.lnc is None else [f"compiler: {{lnc: {head.lnc}}}"]
    lines += _weights(head.weights)
    if shared:
        lines += ["", "sizes:"]
        for name, values in shared.items():
            lines += _wrapped(f"  {name}: [", values)
    if where:
        lines.append(f"where: [{', '.join(where)}]")
    if graphs:
        lines += ["", "graphs:"]
        for graph in graphs:
            lines += _graph(graph, shared, where)
    lines += ["", "kernels:"]
    for entry in entries:
        lines += _entry(entry, shared, where)
    refused = [entry for entry in derived.entries if entry.reason is not None]
    if refused:
        lines += ["", "# No kernel can be built for these; they run on the CPU."]
        for entry in refused:
            lines.append(f"# {entry.name}: {entry.reason}")
            lines.append(f"#   {_describe(entry)}")
    apart = [entry for entry in derived.graphs if entry.reason is not None]
    if apart:
        lines += ["", "# These are not graph kernels, since one of their nodes has no kernel."]
        lines += [f"# {entry.name}, {len(entry.kernel.nodes)} nodes: {entry.reason}" for entry in apart]
    return "\n".join(lines) + "\n"


def _weights(weights: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    if isinstance(weights, Mapping):
        first, *rest = weights.values()
        if any(other != first for other in rest):
            lists = (f"  {target}: [{', '.join(layouts)}]" for target, layouts in weights.items())
            return ["weights:", *(line for text in lists for line in _broken(text))]
        weights = first
    return _broken(f"weights: [{', '.join(weights)}]") if weights else []


def _broken(text: str) -> list[str]:
    """Wraps a long line; items of the innermost list begin at one column."""
    return textwrap.wrap(
        text,
        _WIDTH,
        subsequent_indent=" " * (text.rfind("[") + 1 or 4),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shared(entries: Sequence[DerivedKernel | GraphEntry]) -> dict[str, list[int]]:
    """Returns the sizes on which kernels depend, and all their values."""
    found: dict[str, set[int]] = {}
    for entry in entries:
        for name in entry.kernel.names:
            found.setdefault(name, set()).update(point[name] for point in entry.points)
    return {name: sorted(found[name]) for name in NAMES if name in found}


def _conditions(shared: Mapping[str, Sequence[int]]) -> list[str]:
    """Returns the conditions that all calls fulfil."""
    pairs = (
        ("n_outputs", "n_tokens"),
        ("n_tokens", "n_kv"),
        ("n_tokens", "n_kv_swa"),
        ("n_tokens", "n_ctx"),
        ("n_kv", "n_ctx"),
        ("n_kv_swa", "n_ctx"),
    )
    return [f"{a} <= {b}" for a, b in pairs if a in shared and b in shared and shared[a][-1] > shared[b][0]]


def _entry(entry: DerivedKernel, shared: Mapping[str, Sequence[int]], where: Sequence[str]) -> list[str]:
    kernel = entry.kernel
    lines = [f"  - op: {kernel.op}{_comment(entry)}"]
    inputs = ["null" if t is None else f'"{_tensor(t)}"' for t in kernel.inputs]
    line = f"    inputs: [{', '.join(inputs)}]"
    if len(line) <= _WIDTH:
        lines.append(line)
    else:
        lines.append("    inputs:")
        lines += [f"      - {t}" for t in inputs]
    lines.append(f'    output: "{_tensor(kernel.output)}"')
    if kernel.params:
        lines.append(f"    params: {{{', '.join(f'{name}: {param_text(value)}' for name, value in kernel.params)}}}")
    if kernel.alias is not None:
        lines.append(f"    alias: {kernel.alias}")
    lines += ["    weights: []"] * entry.as_ggml
    return [line for more in _sizes(entry, shared, where) for line in (*lines, *more)]


def _sizes(
    entry: DerivedKernel | GraphEntry, shared: Mapping[str, Sequence[int]], where: Sequence[str]
) -> list[list[str]]:
    """Returns the lines with the sizes of an entry, once for each time that the entry is to be repeated."""
    found = []
    for batch, own in _batches(entry, shared, where):
        more = []
        if batch:
            more.append("    batch: {" + ", ".join(f"{name}: {list(values)}" for name, values in batch.items()) + "}")
        if own is not None:
            more.append(f"    where: [{', '.join(own)}]")
        found.append(more)
    return found


def _graph(entry: GraphEntry, shared: Mapping[str, Sequence[int]], where: Sequence[str]) -> list[str]:
    graph = entry.kernel
    slots = [slot.name for slot in graph.slots]
    nodes = [node.name for node in graph.nodes]

    def reference(r: Reference | None) -> str:
        if r is None:
            return "null"
        name = slots[r.index] if r.slot else nodes[r.index]
        all_of_it = graph.slots[r.index].tensor if r.slot else graph.nodes[r.index].output
        if r.offset != Formula(0):
            return f'"{name}+{_figure(r.offset)} {_tensor(r.tensor)}"'
        return name if r.tensor == all_of_it else f'"{name} {_tensor(r.tensor)}"'

    def node_lines(node: NodeFormula) -> list[str]:
        inputs = f"[{', '.join(map(reference, node.inputs))}]"
        output = f'"{_tensor(node.output)}"' if node.into is None else reference(node.into)
        parts = [f"name: {node.name}", f"op: {node.op}", f"inputs: {inputs}", f"output: {output}"]
        if node.params:
            parts.append(f"params: {{{', '.join(f'{name}: {param_text(value)}' for name, value in node.params)}}}")
        line = f"      - {{{', '.join(parts)}}}"
        if len(line) <= _WIDTH:
            return [line]
        if len(parts[2]) > _WIDTH - 8:
            parts[2:3] = ["inputs:", *(f"  - {reference(r)}" for r in node.inputs)]
        return [f"      {'-' if i == 0 else ' '} {part}" for i, part in enumerate(parts)]

    lines = [f"  - name: {entry.name}", "    inputs:"]
    lines += [f'      {slot.name}: "{_tensor(slot.tensor)}"' for slot in graph.slots]
    lines.append("    nodes:")
    lines += [line for node in graph.nodes for line in node_lines(node)]
    lines.append(f"    outputs: [{', '.join(node.name for node in graph.nodes if node.escapes)}]")
    lines += [] if entry.fallback else ["    fallback: false"]
    lines += [f"    targets: [{', '.join(entry.targets)}]"] if entry.targets else []
    lines += ["    weights: []"] * entry.as_ggml
    lines.append(f"    compiler: {{model_type: {_MODEL_TYPE}}}")
    first, *others = _sizes(entry, shared, where)
    if len(lines) < _LONG or any(len(more) != len(first) for more in others):
        return [line for more in (first, *others) for line in (*lines, *more)]
    # Large entries are most of the manifest, so the text of each is there once.
    again = [line for more in others for line in (f"  - <<: *{entry.name}", *more)]
    head = [f"  - &{entry.name}", f"    name: {entry.name}"] if others else lines[:1]
    return [*head, *lines[1:], *first, *again]


def _comment(entry: DerivedKernel) -> str:
    return f"  # {entry.name}" if entry.name.isprintable() and entry.name else ""


def _batches(
    entry: DerivedKernel | GraphEntry, shared: Mapping[str, Sequence[int]], where: Sequence[str]
) -> list[tuple[dict[str, list[int]], list[str] | None]]:
    """Returns the `batch` and the `where` that an entry needs besides the manifest's, so that it covers exactly its calls.

    If no single batch does, it returns several: the entry is then listed for each value of its first size.
    """
    names = entry.kernel.names
    wanted = set(entry.values)
    if not names:
        return [({}, None)]
    if _combinations(names, shared, where) == wanted:
        return [({}, None)]
    own = {name: sorted({values[i] for values in wanted}) for i, name in enumerate(names)}
    differing = {name: values for name, values in own.items() if values != list(shared[name])}
    for conditions in (where, [], [f"{n_seqs} * n_kv >= n_tokens" for n_seqs in (2,)]):
        usable = [c for c in conditions if set(c.replace("*", " ").split()) & set(NAMES) <= set(names)]
        if _combinations(names, own, usable) == wanted:
            return [(differing, None if conditions is where else usable)]
    found: list[tuple[dict[str, list[int]], list[str] | None]] = []
    for first in sorted({values[0] for values in wanted}):
        rest = sorted(values[1:] for values in wanted if values[0] == first)
        for group in _products(rest):
            batch = {names[0]: [first], **dict(zip(names[1:], map(list, group), strict=True))}
            found.append((batch, [] if _combinations(names, batch, where) != _combinations(names, batch, []) else None))
    return found


def _products(rows: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Returns rows as products of lists: one product if they are one, else a product for each row."""
    columns = tuple(tuple(sorted(set(column))) for column in zip(*rows, strict=True))
    if math.prod(map(len, columns)) == len(rows):
        return [columns]
    return [tuple((value,) for value in row) for row in rows]


_COMPARE = {"<=": int.__le__, ">=": int.__ge__}


def _combinations(
    names: Sequence[str], values: Mapping[str, Sequence[int]], where: Sequence[str]
) -> set[tuple[int, ...]]:
    """Returns the combinations of sizes that a manifest with these values and conditions covers."""
    found = set()
    for combination in itertools.product(*(values[name] for name in names)):
        point = dict(zip(names, combination, strict=True))
        if all(_holds(condition, point) for condition in where):
            found.add(combination)
    return found


def _holds(condition: str, point: Mapping[str, int]) -> bool:
    left, operator, right = condition.rpartition(" <= ") if " <= " in condition else condition.rpartition(" >= ")
    sides = []
    for side in (left, right):
        factors = [f.strip() for f in side.split("*")]
        if any(f in NAMES and f not in point for f in factors):
            return True  # a condition on a size that the kernel does not depend on is not applied
        sides.append(math.prod(point[f] if f in NAMES else int(f) for f in factors))
    return _COMPARE[operator.strip()](*sides)


def _tensor(t: TensorFormula) -> str:
    shown = f"({','.join(map(_figure, t.ne))})/{t.dtype}"
    return shown if t.nb is None else f"{shown}/({','.join(map(_figure, t.nb))})"


def _figure(formula: Formula) -> str:
    return f"${{{formula}}}" if formula.names else str(formula)


def param_text(value: ParamValue | Formula) -> str:
    """Returns the value of a parameter as a manifest has it."""
    if isinstance(value, Formula):
        return f'"{_figure(value)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isinf(value):
            return ".inf" if value > 0 else "-.inf"
        shown = repr(value)
        # readers of YAML 1.1 parse 1e-05 as a string
        mantissa, e, exponent = shown.partition("e")
        return shown if not e else f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"
    return str(value)


def _describe(entry: DerivedKernel) -> str:
    inputs = ", ".join("absent" if t is None else _tensor(t) for t in entry.kernel.inputs)
    return f"{entry.kernel.op}: {inputs} -> {_tensor(entry.kernel.output)}"


def _wrapped(head: str, values: Sequence[int]) -> list[str]:
    """Returns a list of numbers, wrapped to several lines."""
    lines = [head]
    for i, value in enumerate(values):
        item = f"{value}{', ' if i + 1 < len(values) else ']'}"
        if len(lines[-1]) + len(item) > _WIDTH:
            lines[-1] = lines[-1].rstrip()
            lines.append("    ")
        lines[-1] += item
    return lines


def _quoted(value: str) -> str:
    plain = "".join(c if c.isprintable() else "?" for c in value)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
