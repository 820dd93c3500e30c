"""Expands an entry of a manifest's `kernels:` to kernel specs: multiplies out batches, and checks everything that ggml asserts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import UNSET

from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError, did_you_mean, nearest
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml import shapes
from kernelgen.ggml.ops import Op, Param, ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.manifest import sizes as manifest_sizes
from kernelgen.manifest.document import Report, YamlNode, short
from kernelgen.manifest.reading import read
from kernelgen.manifest.settings import Changes, ManifestSettings
from kernelgen.manifest.sizes import SizeCondition
from kernelgen.manifest.template import Template, TemplateError, Value
from kernelgen.manifest.types import Entry, OpKernel
from kernelgen.manifest.values import check_param, explain_tensor, parse_tensor
from kernelgen.manifest.weights import WeightLayouts, Wishes
from kernelgen.plan import Kernel
from kernelgen.spec.kernel import KernelSpec

MAX_KERNELS = 100_000
"""Maximum number of kernels of one entry, and of one manifest."""

_WORD = re.compile(r"word([0-9]{1,2})")


Named = tuple[str, KernelSpec, YamlNode]
"""A name in an entry, its kernel, and the name's node."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the kernels of an entry depend on besides the entry.

    Attributes:
        catalog: the available emitters.
        report: receives mistakes.
        targets: the manifest's targets.
        languages: its `languages`.
        manifest: its name.
        settings: records the kernels that have their own settings, or None.
        weights: the requested layouts of weights; None for none.
        sizes: the values of the variables that its entries share.
        conditions: conditions on variables; one does not apply to an entry that lacks one of its variables.
    """

    catalog: Catalog
    report: Report
    targets: tuple[str, ...] = ()
    languages: Sequence[str] = ()
    manifest: str = ""
    settings: ManifestSettings | None = None
    weights: WeightLayouts | None = None
    sizes: Mapping[str, list[Value]] = field(default_factory=dict)
    conditions: tuple[SizeCondition, ...] = ()


def expand(node: YamlNode, context: Context, label: str = "the kernel") -> tuple[list[Kernel], list[Named]]:
    """Returns the kernels of one entry; adds mistakes to the report, and an entry with a mistake gives no kernel.

    Args:
        node: an item of `kernels:`.
        context: what else its kernels depend on.
        label: the item's name in messages.
    """
    entry = read(node, OpKernel, label, context.report)
    return ([], []) if entry is None else OpExpansion(entry, node, context).expand()


class Expansion:
    """An entry during its expansion.

    Attributes:
        entry: the entry.
        node: its node, for places.
        templated: the keys whose texts may have variables.
    """

    templated: tuple[str, ...] = ()

    def __init__(self, entry: Entry, node: YamlNode, context: Context) -> None:
        self.node = node
        self.catalog = context.catalog
        self.report = context.report
        self.context = context
        own = node.get("weights")
        known = context.weights if own is None else None
        self.weights = known or WeightLayouts(own, context.targets, context.report)
        self.good = True
        self.own = None if context.settings is None else context.settings.own(entry, node)
        self.variables: dict[str, list[Value]] = dict(entry.batch)
        self.where = entry.where
        self.conditions: tuple[SizeCondition, ...] = ()
        self.used: set[str] = set()
        self.templates: dict[str, Template] = {}
        self.failed_with = False
        self.all_read = True
        self.too_many = False

    def fail(self, node: YamlNode, message: str, hint: str | None = None) -> None:
        """Reports a mistake; only the first at a place counts, since other combinations of a batch would repeat it."""
        self.good = False
        if id(node) not in self.report.wrong:
            self.report.fail(node, message, hint)

    def fail_with(self, values: Mapping[str, Value], node: YamlNode, message: str) -> None:
        """Reports a mistake that occurs with these values of the batch's variables."""
        if not values:
            self.fail(node, message)
        elif not self.failed_with:  # one bad value causes errors in several places
            shown = ", ".join(f"{short(name)} = {short(str(value))}" for name, value in values.items())
            self.fail(node, f"{message} (with {shown})")
            self.failed_with = True
        self.good = False

    def is_sized(self, node: YamlNode) -> bool:
        """Returns whether a tensor depends on the manifest's sizes; no weight does."""
        template = self.templates.get(node.text)
        return template is not None and any(name in self.context.sizes for name in template.names)

    def check_layouts(self, has_layout: bool) -> None:
        """Reports layouts that an entry requests itself without having a weight for them."""
        own = self.node.get("weights")
        if own is None or not self.good:
            return
        if self.weights.names and not has_layout:
            hint = (
                f"a weight is the first operand of {' or '.join(WEIGHTS)}, contiguous, and has no variable of `sizes`"
            )
            self.fail(own, f"the entry has no weight that can be {' or '.join(self.weights.names)}", hint)
        else:
            self.weights.check_used()

    def read_variables(self) -> None:
        """Reads the texts with variables and the conditions, and reports unknown and unused variables."""
        self._read_templates()
        self._read_conditions()
        if self.all_read:
            for name, key in self.node.at("batch").keys.items() if "batch" in self.node.value else ():
                if name not in self.used:
                    hint = f"write ${{{short(name)}}} in a shape or parameter, or remove it"
                    self.fail(key, f"variable '{short(name)}' is not used", hint)

    def chosen(self, spec: KernelSpec, targets: Sequence[str], languages: Sequence[str]) -> list[Kernel]:
        """Returns the kernel for these targets with its emitter; several kernels if targets have different emitters."""
        try:
            return self.only_for(targets, self.catalog.kernels(spec, languages, targets))
        except KernelgenError as error:
            (found,) = error.diagnostics
            self.fail(self.node.at("languages" if "languages" in self.node.value else "op"), found.message, found.hint)
            return []

    def only_for(self, targets: Sequence[str], kernels: Sequence[Kernel]) -> list[Kernel]:
        """Returns kernels for some of the manifest's targets; the kernels list the targets if these are not all."""
        if len(targets) == len(self.context.targets):
            return list(kernels)
        return [replace(kernel, targets=kernel.targets or tuple(targets)) for kernel in kernels]

    def note_settings(self, chosen: Sequence[Kernel], values: Mapping[str, Value], own: Changes | None) -> None:
        """Records the settings of an entry's kernels; `own` are settings that the entry sets for them."""
        if self.context.settings is None:
            return
        try:
            for kernel in chosen:
                self.context.settings.note(kernel.id, self.node, values, own)
        except TemplateError as error:
            self.fail_with(values, self.node, str(error))

    def _read_templates(self) -> None:
        for node in (
            scalar for key in self.templated if key in self.node.value for scalar in self.node.at(key).scalars()
        ):
            text = node.value
            if not isinstance(text, str) or "${" not in text:
                continue
            try:
                template = Template(text)
            except TemplateError as error:
                self.fail(node, f"{error}: '{short(text)}'", error.hint)
                self.all_read = False  # it may use any of the variables
                continue
            self.used.update(template.names)
            known = {**self.variables, **self.context.sizes}
            unknown = next((n for n in template.names if n not in known), None)
            if unknown is None:
                self.templates[text] = template
            else:
                hint = f"variables of a kernel are listed under 'batch', as in batch: {{{unknown}: [1, 512]}}"
                self.fail(node, f"unknown variable '{unknown}'{did_you_mean(unknown, known)}", hint)

    def _read_conditions(self) -> None:
        for name, values in self.context.sizes.items():
            if name in self.used:
                self.variables.setdefault(name, values)
        if self.where is UNSET:
            self.conditions = tuple(c for c in self.context.conditions if c.names <= self.variables.keys())
        elif self.all_read:
            self.conditions = manifest_sizes.conditions(self.node.at("where"), self.variables, self.report)
            self.good = self.good and len(self.conditions) == len(self.where)
        total = math.prod(map(len, self.variables.values()))
        if total > MAX_KERNELS:
            message = f"the entry's variables have {total} combinations, more than {MAX_KERNELS}"
            self.fail(self.node.at("batch"), message)
            self.too_many = True

    def combinations(self) -> Iterator[Mapping[str, Value]]:
        if self.too_many:
            return  # a template has no value without its variables
        if not self.variables:
            yield {}
            return
        names = list(self.variables)
        left_out = 0
        for combination in itertools.product(*self.variables.values()):
            values = dict(zip(names, combination, strict=True))
            if self._go_together(values):
                yield values
            else:
                left_out += 1
        if left_out and left_out == math.prod(map(len, self.variables.values())) and self.good:
            self.fail(self.node, "no combination of the variables' values is left by where")

    def _go_together(self, values: Mapping[str, Value]) -> bool:
        for condition in self.conditions:
            try:
                if not condition.holds(values):
                    return False
            except TemplateError as error:
                self.fail_with(values, condition.node, str(error))
                return False
        return True

    def fill(self, node: YamlNode, values: Mapping[str, Value]) -> Value | None:
        """Returns the node's value with its variables replaced; None if that fails."""
        if not isinstance(node.value, str) or "${" not in node.value:
            value: Value = node.value
            return value
        template = self.templates.get(node.value)
        try:
            return None if template is None else template.fill(values)
        except TemplateError as error:
            self.fail_with(values, node, str(error))
            return None

    def fail_filled(self, values: Mapping[str, Value], node: YamlNode, message: str, hint: str | None = None) -> None:
        """Reports a mistake in a text, with the values of its variables if it has some."""
        if isinstance(node.value, str) and "${" in node.value:
            self.fail_with(values, node, message)
        else:
            self.fail(node, message, hint)

    def tensor(self, node: YamlNode, values: Mapping[str, Value]) -> TensorDesc | None:
        """Returns a tensor; None if it is absent or has a mistake."""
        text = self.fill(node, values)
        if text is None:
            return None
        try:
            return parse_tensor(str(text))
        except ValueError as error:
            self.fail_filled(values, node, *explain_tensor(str(text), str(error)))
            return None


class OpNode:
    """An entry's op with its inputs, output and parameters: the entry itself, or a node of a graph.

    Attributes:
        op: the op; None if it is not known.
        node: the mapping.
    """

    def __init__(self, expansion: Expansion, node: YamlNode, in_graph: bool) -> None:
        """Reads the op, and reports wrong numbers of inputs and wrong names of parameters.

        Args:
            expansion: the entry.
            node: the mapping.
            in_graph: whether it is a node of a graph, which may also have kernelgen's own parameters.
        """
        self.expansion = expansion
        self.node = node
        self.inputs: list[YamlNode] = node.at("inputs").value
        self.params: dict[str, YamlNode] = node.at("params").value if "params" in node.value else {}
        self.op = self._read_op()
        if self.op is not None:
            self._check_inputs(self.op)
            self._check_names(self.op, in_graph)

    def _read_op(self) -> Op | None:
        node, catalog = self.node.at("op"), self.expansion.catalog
        op = catalog.op(node.text)
        if op is None:
            near = did_you_mean(node.text, sorted({*ggml_ops.OPS, *catalog.by_op}), ggml_ops.ALIASES)
            self.expansion.fail(node, f"unknown op '{short(node.text)}'{near}")
        elif node.text not in catalog.by_op:
            hint = "kernels can be built for these ops: " + ", ".join(sorted(catalog.by_op))
            self.expansion.fail(node, f"no emitter for op '{node.text}'", hint)
            return None
        return op

    def _check_inputs(self, op: Op) -> None:
        fail, inputs = self.expansion.fail, self.inputs
        count, most = len(inputs), len(op.inputs)
        names = f" ({', '.join(op.inputs)})" if op.inputs else ""
        if count < op.required:
            expected = f"{most} inputs" if op.required == most else f"{op.required} to {most} inputs"
            expected = "one input" if most == 1 else expected
            fail(self.node.at("inputs"), f"{op.name} has {expected}{names}, not {count}")
            return
        if count > most:
            expected = "one input" if most == 1 else f"at most {most} inputs" if most else "no inputs"
            fail(inputs[most], f"{op.name} has {expected}{names}, not {count}")
            return
        for i, item in enumerate(inputs[: op.required]):
            if item.value is None:
                fail(item, f"input {i} of {op.name}, {op.inputs[i]}, can't be absent")
        taken = len(self.expansion.catalog.by_op[op.name][1].inputs)
        for i, item in enumerate(inputs[taken:], taken):
            if item.value is not None:
                fail(item, f"the emitter of {op.name} takes no '{op.inputs[i]}'")

    def _check_names(self, op: Op, in_graph: bool) -> None:
        required = [p.name for p in op.params if p.default is None and p.name not in self.params]
        for name in self.params:
            key = self.node.at("params").keys[name]
            if name in op.by_name:
                if op.by_name[name].ours and not in_graph:
                    hint = "backends never request such a kernel for a single node"
                    self.expansion.fail(key, f"'{name}' is for nodes of graphs", hint)
                continue
            if _is_free_word(op, name):
                continue
            near = nearest(name, [p for p in op.by_name if p not in self.params])
            if near in required:
                required.remove(near)  # the misspelt one replaces it
            meant = f": did you mean '{near}'?" if near else ""
            takes = f"it has {', '.join(op.by_name)}" if op.params else "it has none"
            self.expansion.fail(key, f"op '{op.name}' has no parameter '{short(name)}'{meant}", takes)
        if required:
            names = "', '".join(required)
            message = f"op '{op.name}' needs the parameter{'s' * (len(required) > 1)} '{names}'"
            self.expansion.fail(self.node.at("params"), message)

    def full_params(self, op: Op, values: Mapping[str, Value]) -> dict[str, ParamValue] | None:
        """Returns all parameters; None if one has a mistake, or can't be a run-time value without others."""
        found: dict[str, ParamValue] = {}
        for name, item in self.params.items():
            value = self.expansion.fill(item, values)
            if value is None or id(self.node.at("params").keys[name]) in self.expansion.report.wrong:
                continue
            shown = short(item.text if "${" not in item.text else str(value))
            message = check_param(op.by_name.get(name) or Param(name, 0), value, shown)
            if message:
                self.expansion.fail(item, f"{op.name}'s {message}")
            else:
                found[name] = value
        if not self.expansion.good:
            return None
        full = op.with_defaults(found)
        try:
            op.opened(full)
        except ValueError as error:
            self.expansion.fail(self.node.at("params"), str(error))
            return None
        return full

    def check_shapes(
        self,
        op: Op,
        inputs: Sequence[TensorDesc | None],
        output: TensorDesc,
        params: Mapping[str, ParamValue],
        alias: int | None,
        values: Mapping[str, Value],
    ) -> bool:
        """Reports everything that ggml would assert of a node; returns whether there is nothing to report."""
        problems = shapes.check(op.name, inputs, output, params, alias)
        for problem in problems:
            place = (problem.part,) if problem.part == "output" else (problem.part, problem.which)
            self.expansion.fail_with(values, self.node.at(*place), problem.message)
        return not problems


def _is_free_word(op: Op, name: str) -> bool:
    """Whether `name` is `word<N>` for a word of op_params that has no name."""
    match = _WORD.fullmatch(name)
    if not match or op.custom:
        return False
    word = int(match.group(1))
    taken = {p.word for p in op.params} | ({0} if op.variant is not None else set())
    return word < ggml_ops.N_WORDS and word not in taken and name == f"word{word}"


class OpExpansion(Expansion):
    """An entry that names an op."""

    templated = ("output", "name", "inputs", "params")

    def __init__(self, entry: OpKernel, node: YamlNode, context: Context) -> None:
        super().__init__(entry, node, context)
        self.entry = entry

    def expand(self) -> tuple[list[Kernel], list[Named]]:
        """Returns the entry's kernels, and those that it names."""
        of = OpNode(self, self.node, in_graph=False)
        self.read_variables()
        kernels: list[Kernel] = []
        named: list[Named] = []
        has_layout = False
        for values in self.combinations():
            specs: dict[KernelSpec, list[str]] = {}
            for targets, wishes in self.weights.by_targets:
                spec = self._spec(of, values, wishes)
                if spec is not None:
                    specs.setdefault(spec, []).extend(targets)
            if of.op is None:
                return [], []
            for spec, targets_of in specs.items():
                has_layout = has_layout or any(t is not None and t.layout for t in spec.inputs)
                chosen = self.chosen(spec, targets_of, self.entry.languages or self.context.languages)
                self.note_settings(chosen, values, self.own)
                kernels += chosen
            if specs and self.entry.name:
                name = self.node.at("name")
                named.append((str(self.fill(name, values)), next(iter(specs)), name))
        self.check_layouts(has_layout)
        return (kernels, named) if self.good else ([], [])

    def _spec(self, of: OpNode, values: Mapping[str, Value], wishes: Wishes) -> KernelSpec | None:
        inputs = [self.tensor(item, values) for item in of.inputs]
        output = self.tensor(self.node.at("output"), values)
        op = of.op
        if op is None:
            return None
        inputs = self._with_layouts(op, inputs, wishes)
        params = of.full_params(op, values)
        alias = self._alias(op, inputs, output)
        if not self.good or output is None or params is None:
            return None
        good = of.check_shapes(op, inputs, output, params, op.alias if alias is None else alias, values)
        return KernelSpec.make(op.name, inputs, output, params, alias) if good else None

    def _with_layouts(self, op: Op, inputs: list[TensorDesc | None], wishes: Wishes) -> list[TensorDesc | None]:
        """Returns the inputs, with the weight in the requested layout."""
        index = WEIGHTS.get(op.name)
        weight = inputs[index] if index is not None and index < len(inputs) else None
        if index is None or weight is None or weight.layout or self.is_sized(self.node.at("inputs", index)):
            return inputs
        if op.name == "mul_mat" and weight.ne[2] * weight.ne[3] > 1:  # heads of a cache
            return inputs
        return [*inputs[:index], self.weights.laid_out(weight, wishes), *inputs[index + 1 :]]

    def _alias(self, op: Op, inputs: Sequence[TensorDesc | None], output: TensorDesc | None) -> int | None:
        index = self.entry.alias
        if index is UNSET:
            return None
        node = self.node.at("alias")
        if op.alias is not None and index != op.alias:
            self.fail(node, f"{op.name} writes its result to input {op.alias}, {op.inputs[op.alias]}, not {index}")
        elif index >= len(inputs):
            self.fail(node, f"there is no input {index}: they are counted from 0 to {len(inputs) - 1}")
        elif self.good and output is not None:
            shared = inputs[index]
            if shared is None:
                self.fail(node, f"input {index} is absent")
            elif shared.storage_bytes != output.storage_bytes:
                self.fail(
                    node,
                    f"the result has {output.storage_bytes} bytes and input {index} has {shared.storage_bytes}: "
                    "they can't share memory",
                )
        return index
