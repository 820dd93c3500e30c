"""Expands an entry of a manifest's `kernels:` to kernel specs: multiplies out batches, and checks everything that ggml asserts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError, did_you_mean, nearest
from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml import shapes
from kernelgen.ggml.ops import Op, Param, ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.manifest import sizes as manifest_sizes
from kernelgen.manifest.document import YamlNode, short
from kernelgen.manifest.schema import Report, describe
from kernelgen.manifest.settings import Changes, KernelSettings
from kernelgen.manifest.sizes import NO_SIZES, SizeCondition, Sizes
from kernelgen.manifest.template import Template, TemplateError, Value
from kernelgen.manifest.values import check_param, explain_tensor, parse_tensor
from kernelgen.manifest.weights import WeightLayouts, Wishes
from kernelgen.plan import Kernel
from kernelgen.spec.kernel import KernelSpec

MAX_KERNELS = 100_000
"""Maximum number of kernels of one entry, and of one manifest."""

_WORD = re.compile(r"word([0-9]{1,2})")
_EXPRESSION = re.compile(r"\$\{.*\}$")


@dataclass(frozen=True, slots=True)
class NamedKernel:
    """A kernel that an entry names, with the entry's node."""

    name: str
    spec: KernelSpec
    node: YamlNode


@dataclass(frozen=True, slots=True)
class Choice:
    """The inputs besides an entry that decide which emitters compute its kernels.

    Attributes:
        targets: the manifest's targets.
        languages: its `languages`, or None.
        manifest: its name.
        settings: records the kernels that have their own settings, or None.
        weights: the requested layouts of weights; None for none.
    """

    targets: tuple[str, ...] = ()
    languages: YamlNode | None = None
    manifest: str = ""
    settings: KernelSettings | None = None
    weights: WeightLayouts | None = None


def expand(
    entry: YamlNode, catalog: Catalog, report: Report, sizes: Sizes = NO_SIZES, choice: Choice = Choice()
) -> tuple[list[Kernel], list[NamedKernel]]:
    """Returns the kernels of one entry; adds mistakes to `report`, and an entry with a mistake gives no kernel.

    Args:
        entry: an item of `kernels:` that passed the schema check.
        catalog: the available emitters.
        report: receives mistakes; nodes in `report.wrong` are skipped.
        sizes: the variables that it shares with the other entries.
        choice: further inputs of the choice of emitters.
    """
    return KernelEntry(entry, catalog, report, sizes, choice).expand()


class KernelEntry:
    """An entry during its expansion.

    Attributes:
        in_graph: whether it is a node of a graph, which may also have kernelgen's own parameters.
    """

    in_graph = False

    def __init__(self, entry: YamlNode, catalog: Catalog, report: Report, sizes: Sizes, choice: Choice) -> None:
        self.entry = entry
        self.catalog = catalog
        self.report = report
        self.sizes = sizes
        self.choice = choice
        self.languages = entry.get("languages") or choice.languages if entry.kind == "map" else None
        own = entry.get("weights") if entry.kind == "map" else None
        self.weights = choice.weights if own is None and choice.weights else WeightLayouts(own, choice.targets, report)
        self.good = id(entry) not in report.wrong
        self.own = choice.settings.own(entry) if choice.settings is not None and entry.kind == "map" else None
        self.op: Op | None = None
        self.variables: dict[str, list[Value]] = {}
        self.conditions: tuple[SizeCondition, ...] = ()
        self.used: set[str] = set()
        self.templates: dict[int, Template] = {}
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

    def usable(self, node: YamlNode | None) -> bool:
        return node is not None and id(node) not in self.report.wrong

    def expand(self) -> tuple[list[Kernel], list[NamedKernel]]:
        entry = self.entry
        if entry.kind != "map":
            return [], []
        self._read_op()
        self._only_of_op()
        self._read_variables()
        if self.op is not None:
            self._check_counts(self.op)
        kernels: list[Kernel] = []
        named: list[NamedKernel] = []
        if self.op is None:
            for values in self._combinations():
                self._tensors(values)  # to report their mistakes
                break
            return kernels, named
        has_layout = False
        for values in self._combinations():
            specs: dict[KernelSpec, list[str]] = {}
            for targets, wishes in self.weights.by_targets:
                spec = self._spec(self.op, values, wishes)
                if spec is not None:
                    specs.setdefault(spec, []).extend(targets)
            for spec, of in specs.items():
                has_layout = has_layout or any(t is not None and t.layout for t in spec.inputs)
                chosen = self._chosen(spec, of)
                self.note_settings(chosen, values, self.own)
                kernels += chosen
            name = entry.get("name")
            if specs and name is not None and self.usable(name):
                named.append(NamedKernel(str(self._fill(name, values)), next(iter(specs)), name))
        self._check_layouts(has_layout)
        return (kernels, named) if self.good else ([], [])

    def is_sized(self, node: YamlNode) -> bool:
        """Returns whether a tensor depends on the manifest's sizes; no weight does."""
        template = self.templates.get(id(node))
        return template is not None and any(name in self.sizes.variables for name in template.names)

    def _with_layouts(self, op: Op, inputs: list[TensorDesc | None], wishes: Wishes) -> list[TensorDesc | None]:
        """Returns the inputs, with the weight in the requested layout."""
        index = WEIGHTS.get(op.name)
        weight = inputs[index] if index is not None and index < len(inputs) else None
        if index is None or weight is None or weight.layout or self.is_sized(self._need("inputs").value[index]):
            return inputs
        if op.name == "mul_mat" and weight.ne[2] * weight.ne[3] > 1:  # heads of a cache
            return inputs
        return [*inputs[:index], self.weights.laid_out(weight, wishes), *inputs[index + 1 :]]

    def _check_layouts(self, has_layout: bool) -> None:
        """Reports layouts that an entry requests itself without having a weight for them."""
        own = self.entry.get("weights")
        if own is None or not self.usable(own):
            return
        if self.weights.names and self.good and not has_layout:
            hint = (
                f"a weight is the first operand of {' or '.join(WEIGHTS)}, contiguous, and has no variable of `sizes`"
            )
            self.fail(own, f"the entry has no weight that can be {' or '.join(self.weights.names)}", hint)
        elif self.good:
            self.weights.check_used()

    def _only_of_op(self) -> None:
        """Reports keys that only a kernel named by its source may have, and missing keys that only such a kernel may omit."""
        for key in ("outputs", "grid", "arguments", "env", "lowering", "package", "prebuilt", "vjp", "check"):
            if key in self.entry.value:
                self.fail(self.entry.value[key].key, f"'{key}' is a key of kernels that are named by their source")
        if self.entry.get("output") is None:
            self.fail(self.entry, "key 'output' is missing", "output: the result, a tensor")
        alias = self.entry.get("alias")
        if alias is not None and alias.kind == "map":
            self.fail(alias, "alias: expected an integer, not a mapping")
        params = self.entry.get("params")
        for name, item in params.value.items() if params is not None and params.kind == "map" else ():
            value = item.node.value
            if isinstance(value, str) and (value == ggml_ops.ANY or _EXPRESSION.match(value)):
                continue
            if item.node.kind != "scalar" or value is None or isinstance(value, str):
                shown = describe(item.node)
                self.fail(
                    item.node, f"{short(name)}: expected a number, true, false or an expression '${{…}}', not {shown}"
                )

    def _read_variables(self) -> None:
        batch = self.entry.get("batch")
        if batch is not None and self.usable(batch):
            self._read_batch(batch)
        self._read_templates()
        self._read_conditions()
        if batch is not None and self.usable(batch) and self.all_read:
            for name, item in batch.value.items():
                if name not in self.used:
                    self.fail(
                        item.key,
                        f"variable '{short(name)}' is not used",
                        f"write ${{{short(name)}}} in a shape or parameter, or remove it",
                    )

    def _asked_languages(self) -> list[str] | None:
        """Returns the requested languages, empty for no request; None if they have a mistake."""
        if self.languages is None:
            return []
        return [node.text for node in self.languages.value] if self.usable(self.languages) else None

    def _chosen(self, spec: KernelSpec, targets: Sequence[str]) -> list[Kernel]:
        """Returns the kernel for these targets with its emitter; several kernels if targets have different emitters."""
        languages = self._asked_languages()
        if languages is None:
            return []
        try:
            return self.only_for(targets, self.catalog.kernels(spec, languages, targets))
        except KernelgenError as error:
            (found,) = error.diagnostics
            own = self.entry.get("languages")
            self.fail(own or self.entry.get("op") or self.entry, found.message, found.hint)
            return []

    def only_for(self, targets: Sequence[str], kernels: Sequence[Kernel]) -> list[Kernel]:
        """Returns kernels for some of the manifest's targets; the kernels list the targets if these are not all."""
        if len(targets) == len(self.choice.targets):
            return list(kernels)
        return [replace(kernel, targets=kernel.targets or tuple(targets)) for kernel in kernels]

    def note_settings(self, chosen: Sequence[Kernel], values: Mapping[str, Value], own: Changes | None) -> None:
        """Records the settings of an entry's kernels; `own` are settings that the entry sets for them."""
        if self.choice.settings is None:
            return
        try:
            for kernel in chosen:
                self.choice.settings.note(kernel.id, self.entry, values, own)
        except TemplateError as error:
            self.fail_with(values, self.entry, str(error))

    def _read_op(self) -> None:
        node = self.entry.get("op")
        if node is None or not self.usable(node):
            return
        name = node.text
        self.op = self.catalog.op(name)
        if self.op is None:
            known = sorted({*ggml_ops.OPS, *self.catalog.by_op})
            self.fail(node, f"unknown op '{short(name)}'{did_you_mean(name, known, ggml_ops.ALIASES)}")
        elif name not in self.catalog.by_op:
            self.op = None
            self.fail(
                node,
                f"no emitter for op '{name}'",
                "kernels can be built for these ops: " + ", ".join(sorted(self.catalog.by_op)),
            )

    def _read_batch(self, batch: YamlNode) -> None:
        for name, item in batch.value.items():
            self.variables[name] = [value.value for value in item.node.value]

    def _texts(self) -> Iterator[YamlNode]:
        entry = self.entry
        for key in ("output", "name"):
            node = entry.get(key)
            if node is not None:
                yield node
        inputs = entry.get("inputs")
        if inputs is not None and inputs.kind == "seq":
            yield from inputs.value
        params = entry.get("params")
        if params is not None and params.kind == "map":
            for item in params.value.values():
                yield item.node

    def _read_templates(self) -> None:
        batch = self.entry.get("batch")
        for node in self._texts():
            if node.kind != "scalar" or not isinstance(node.value, str) or "${" not in node.value:
                continue
            try:
                template = Template(node.value)
            except TemplateError as error:
                self.fail(node, f"{error}: '{short(node.text)}'", error.hint)
                self.all_read = False  # it may use any of the variables
                continue
            self.used.update(template.names)
            unknown = [n for n in template.names if n not in self.variables and n not in self.sizes.variables]
            if unknown and (batch is None or self.usable(batch)):
                near = did_you_mean(unknown[0], {**self.variables, **self.sizes.variables})
                self.fail(
                    node,
                    f"unknown variable '{unknown[0]}'{near}",
                    f"variables of a kernel are listed under 'batch', as in batch: {{{unknown[0]}: [1, 512]}}",
                )
            elif unknown:
                self.report.wrong.add(id(node))
            else:
                self.templates[id(node)] = template

    def _read_conditions(self) -> None:
        for name, values in self.sizes.variables.items():
            if name in self.used:
                self.variables.setdefault(name, values)
        own = self.entry.get("where")
        if own is None:
            self.conditions = tuple(c for c in self.sizes.conditions if c.names <= self.variables.keys())
        elif self.all_read:
            self.conditions = manifest_sizes.conditions(own, self.variables, self.report)
            self.good = self.good and id(own) not in self.report.wrong and len(self.conditions) == len(own.value)
        total = math.prod(map(len, self.variables.values()))
        if total > MAX_KERNELS:
            node = self.entry.get("batch") or self.entry
            self.fail(node, f"the entry's variables have {total} combinations, more than {MAX_KERNELS}")
            self.too_many = True

    def _combinations(self) -> Iterator[Mapping[str, Value]]:
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
            self.fail(self.entry, "no combination of the variables' values is left by where")

    def _go_together(self, values: Mapping[str, Value]) -> bool:
        for condition in self.conditions:
            try:
                if not condition.holds(values):
                    return False
            except TemplateError as error:
                self.fail_with(values, condition.node, str(error))
                return False
        return True

    def _fill(self, node: YamlNode, values: Mapping[str, Value]) -> Value | None:
        """Returns the node's text with its variables replaced; None if that fails."""
        template = self.templates.get(id(node))
        if template is None:
            value: Value = node.value
            return value
        try:
            return template.fill(values)
        except TemplateError as error:
            self.fail_with(values, node, str(error))
            return None

    def _check_counts(self, op: Op) -> None:
        inputs = self.entry.get("inputs")
        if inputs is not None and inputs.kind == "seq":
            self._check_inputs(op, inputs)
        self._check_names(op)

    def _check_inputs(self, op: Op, inputs: YamlNode) -> None:
        count, most = len(inputs.value), len(op.inputs)
        names = f" ({', '.join(op.inputs)})" if op.inputs else ""
        if count < op.required:
            wanted = f"{most} inputs" if op.required == most else f"{op.required} to {most} inputs"
            self.fail(inputs, f"{op.name} has {'one input' if most == 1 else wanted}{names}, not {count}")
            return
        if count > most:
            wanted = "one input" if most == 1 else f"at most {most} inputs" if most else "no inputs"
            self.fail(inputs.value[most], f"{op.name} has {wanted}{names}, not {count}")
            return
        for i, item in enumerate(inputs.value[: op.required]):
            if item.kind == "scalar" and item.value is None:
                self.fail(item, f"input {i} of {op.name}, {op.inputs[i]}, can't be absent")
        taken = len(self.catalog.by_op[op.name][1].inputs)
        for i, item in enumerate(inputs.value[taken:], taken):
            if item.value is not None:
                self.fail(item, f"the emitter of {op.name} takes no '{op.inputs[i]}'")

    def _check_names(self, op: Op) -> None:
        params = self.entry.get("params")
        given = params.value if params is not None and params.kind == "map" else {}
        required = [p.name for p in op.params if p.default is None and p.name not in given]
        for name, item in given.items():
            if name in op.by_name or self._free_word(op, name):
                if name in op.by_name and op.by_name[name].ours and not self.in_graph:
                    self.fail(
                        item.key,
                        f"'{name}' is for nodes of graphs",
                        "backends never request such a kernel for a single node",
                    )
                continue
            near = nearest(name, [p for p in op.by_name if p not in given])
            if near in required:
                required.remove(near)  # the misspelt one replaces it
            meant = f": did you mean '{near}'?" if near else ""
            takes = f"it has {', '.join(op.by_name)}" if op.params else "it has none"
            self.fail(item.key, f"op '{op.name}' has no parameter '{short(name)}'{meant}", takes)
        if required:
            names = "', '".join(required)
            self.fail(params or self.entry, f"op '{op.name}' needs the parameter{'s' * (len(required) > 1)} '{names}'")

    def _free_word(self, op: Op, name: str) -> bool:
        """Whether `name` is `word<N>` for a word of op_params that has no name."""
        match = _WORD.fullmatch(name)
        if not match or op.custom:
            return False
        word = int(match.group(1))
        taken = {p.word for p in op.params} | ({0} if op.variant is not None else set())
        return word < ggml_ops.N_WORDS and word not in taken and name == f"word{word}"

    def _tensors(self, values: Mapping[str, Value]) -> tuple[list[TensorDesc | None], TensorDesc | None]:
        inputs = self.entry.get("inputs")
        found: list[TensorDesc | None] = []
        if inputs is not None and inputs.kind == "seq":
            for item in inputs.value:
                found.append(self._tensor(item, values))
        output = self.entry.get("output")
        return found, None if output is None else self._tensor(output, values)

    def _tensor(self, node: YamlNode, values: Mapping[str, Value]) -> TensorDesc | None:
        if node.kind == "scalar" and node.value is None:
            return None
        if not self.usable(node):
            self.good = False
            return None
        text = self._fill(node, values)
        if text is None:
            return None
        try:
            return parse_tensor(str(text))
        except ValueError as error:
            message, hint = explain_tensor(str(text), str(error))
            if id(node) in self.templates:
                self.fail_with(values, node, message)
            else:
                self.fail(node, message, hint)
            return None

    def _spec(self, op: Op, values: Mapping[str, Value], wishes: Wishes) -> KernelSpec | None:
        inputs, output = self._tensors(values)
        inputs = self._with_layouts(op, inputs, wishes)
        params = self._params(op, values)
        alias = self._alias(op, inputs, output)
        if not self.good or output is None:
            return None
        full = self.full_params(op, params)
        if full is None:
            return None
        good = self.check_shapes(op, inputs, output, full, op.alias if alias is None else alias, values)
        return KernelSpec.make(op.name, inputs, output, full, alias) if good else None

    def full_params(self, op: Op, params: Mapping[str, ParamValue]) -> dict[str, ParamValue] | None:
        """Returns all parameters; reports parameters that can't be run-time values without others."""
        full = op.with_defaults(params)
        try:
            op.opened(full)
        except ValueError as error:
            self.fail(self._need("params"), str(error))
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
        nodes = self._need("inputs")
        problems = shapes.check(op.name, inputs, output, params, alias)
        for problem in problems:
            if problem.part == "inputs":
                where = nodes.value[problem.which]
            elif problem.part == "output":
                where = self._need("output")
            else:
                given = self.entry.get("params")
                where = (given.get(str(problem.which)) if given else None) or given or self.entry
            self.fail_with(values, where, problem.message)
        return not problems

    def _need(self, key: str) -> YamlNode:
        node = self.entry.get(key)
        assert node is not None
        return node

    def _alias(self, op: Op, inputs: Sequence[TensorDesc | None], output: TensorDesc | None) -> int | None:
        node = self.entry.get("alias")
        if node is None or not self.usable(node):
            return None
        index = int(node.value)
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

    def _params(self, op: Op, values: Mapping[str, Value]) -> dict[str, ParamValue]:
        node = self.entry.get("params")
        found: dict[str, ParamValue] = {}
        if node is None or node.kind != "map":
            return found
        for name, item in node.value.items():
            if not self.usable(item.node) or not self.usable(item.key):
                self.good = False
                continue
            param = op.by_name.get(name) or Param(name, 0)
            value = self._fill(item.node, values)
            if value is None:
                continue
            shown = short(item.node.text) if "${" not in item.node.text else short(str(value))
            message = check_param(param, value, shown)
            if message:
                self.fail(item.node, f"{op.name}'s {message}")
            else:
                found[name] = value
        return found
