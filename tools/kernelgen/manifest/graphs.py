"""Expands an entry of a manifest's `graphs:` to graph kernels: resolves references, and checks every node like an op kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kernelgen.errors import KernelgenError, did_you_mean
from kernelgen.ggml.ops import Op
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.languages import DEFAULT
from kernelgen.manifest.document import YamlNode, short
from kernelgen.manifest.kernels import Context, Expansion, OpNode
from kernelgen.manifest.reading import read
from kernelgen.manifest.template import Value
from kernelgen.manifest.types import Graph
from kernelgen.manifest.values import explain_tensor, parse_tensor
from kernelgen.manifest.weights import Wishes
from kernelgen.plan import Kernel
from kernelgen.spec.kernel import GraphSpec, UnnumberedNode, UnnumberedTensor

MAX_SUGGESTIONS = 20
"""Number of wrong names per entry that get a suggestion: each is compared with all names, which may be ten thousand."""

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)")
_REFERENCE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*(?:\+\s*([^()\s]*)\s*)?(\(.*)?", re.DOTALL)


def expand(node: YamlNode, context: Context, label: str) -> list[Kernel]:
    """Returns the graph kernels of one entry and, unless it has `fallback: false`, the op kernels of their nodes.

    Adds mistakes to the report; an entry with a mistake gives no kernel.

    Args:
        node: an item of `graphs:`.
        context: what else its kernels depend on.
        label: the item's name in messages.
    """
    entry = read(node, Graph, label, context.report)
    return [] if entry is None else _GraphExpansion(entry, node, context).expand()


class _GraphExpansion(Expansion):
    templated = ("inputs", "nodes")

    def __init__(self, entry: Graph, node: YamlNode, context: Context) -> None:
        super().__init__(entry, node, context)
        self.entry = entry
        self.inputs: dict[str, YamlNode] = node.at("inputs").value
        self.names: dict[str, YamlNode] = {}
        self.suggestions = MAX_SUGGESTIONS
        self.members: list[OpNode] = []

    def expand(self) -> list[Kernel]:
        self.read_variables()
        self.members = [OpNode(self, node, in_graph=True) for node in self.node.at("nodes").value]
        self._check_references()
        found: list[Kernel] = []
        weights = self._weights()
        has_layout = False
        only = self._only_targets()
        for values in self.combinations():
            specs: dict[GraphSpec, list[str]] = {}
            for targets, wishes in self.weights.by_targets:
                spec = self._group(values, weights, wishes)
                if spec is not None and (of := [target for target in targets if target in only]):
                    specs.setdefault(spec, []).extend(of)
            for spec, of in specs.items():
                has_layout = has_layout or any(
                    t is not None and t.tensor.layout for node in spec.nodes for t in node.inputs
                )
                group = self.only_for(of, self._of_group(spec))
                self.note_settings(group, values, self.own)
                found += group
                if self.entry.fallback:
                    kernels = dict.fromkeys(node.kernel.of_ggml for node in spec.nodes)
                    ops = [k for one in kernels for k in self.chosen(one, of, self.context.languages)]
                    self.note_settings(ops, values, None)
                    found += ops
        self.check_layouts(has_layout)
        # Groups of several sizes share nodes; list each kernel once.
        return list(dict.fromkeys(found)) if self.good else []

    def _only_targets(self) -> Sequence[str]:
        """Returns the targets that have the group's kernel."""
        for i, target in enumerate(self.entry.targets):
            if target not in self.context.targets:
                hint = "add it to the manifest's targets, or remove it"
                self.fail(self.node.at("targets", i), f"the manifest is not for {target}", hint)
        return self.entry.targets or self.context.targets

    def _weights(self) -> set[str]:
        """Returns the inputs that may have a layout: every use has to read them whole, and as a weight."""
        found = {name for name, item in self.inputs.items() if not self.is_sized(item)}
        for member in self.members:
            index = None if member.op is None else WEIGHTS.get(member.op.name)
            for i, item in enumerate([*member.inputs, member.node.at("output")]):
                match = _REFERENCE.fullmatch(item.text) if item.value is not None else None
                if match is not None and (i != index or match[2] is not None or match[3] is not None):
                    found.discard(match[1])
        return found

    def _of_group(self, spec: GraphSpec) -> list[Kernel]:
        """Returns the kernel of a group with its emitters, which are in JAX."""
        if self.context.languages and DEFAULT not in self.context.languages:
            message = f"a graph kernel is composed of emitters in {DEFAULT}, which `languages` leaves out"
            self.fail(self.node, message, f"add {DEFAULT} to languages")
            return []
        try:
            return [self.catalog.kernel(spec)]
        except KernelgenError as error:
            (found,) = error.diagnostics
            self.fail(self.node, found.message, found.hint)
            return []

    # --- names -----------------------------------------------------------------------------------------------------------

    def _check_references(self) -> None:
        """Checks that names exist, precede their use, and are used: everything that does not depend on variables' values."""
        used: set[str] = set()
        self.names = dict(self.node.at("inputs").keys)
        later = {node.name for node in self.entry.nodes}
        in_place: set[str] = set()
        for member in self.members:
            name = member.node.at("name")
            later.discard(name.text)
            for i, item in enumerate(member.inputs):
                # ggml_cast refers to its own result as its destination.
                itself = member.op is not None and member.op.name == "cpy" and i == 1
                used |= self._refer(item, later, name.text if itself else None)
            output = member.node.at("output")
            if not output.text.lstrip().startswith("("):
                in_place.add(name.text)
                used |= self._refer(output, later, None)
            if name.text in self.names:
                kind = "an input" if name.text in self.inputs else "a node"
                hint = f"the first is at {self.names[name.text].location}"
                self.fail(name, f"'{short(name.text)}' is already the name of {kind}", hint)
            self.names.setdefault(name.text, name)
        for name_of in self.inputs:
            if name_of not in used:
                hint = "name it in a node's inputs, or remove it"
                self.fail(self.names[name_of], f"input '{short(name_of)}' is not used", hint)
        for i, name_of in enumerate(self.entry.outputs):
            item = self.node.at("outputs", i)
            if name_of in in_place:
                hint = "what is written in place is visible without being named: remove it"
                self.fail(item, f"'{short(name_of)}' has no memory of its own", hint)
            elif name_of not in self.names or name_of in self.inputs:
                near = self._near(name_of, (n for n in self.names if n not in self.inputs))
                self.fail(item, f"there is no node '{short(name_of)}'{near}")
        needed = used.union(self.entry.outputs, in_place)
        for member in self.members:
            name = member.node.at("name")
            if name.text not in needed:
                hint = "name it in outputs or in another node's inputs, or remove it"
                self.fail(name, f"the result of '{short(name.text)}' is not used", hint)
        if not self.entry.outputs and not in_place:
            hint = "name the nodes whose results are read outside of it"
            self.fail(self.node.at("outputs"), "the group has no result", hint)

    def _near(self, name: str, known: Iterable[str]) -> str:
        """Returns a suggestion like `did_you_mean`, for the first mistakes only."""
        self.suggestions -= 1
        return did_you_mean(name, known) if self.suggestions >= 0 else ""

    def _refer(self, item: YamlNode, later: set[str], itself: str | None) -> set[str]:
        """Checks the name of a reference and returns the names that it refers to."""
        match = _NAME.match(item.text) if item.value is not None else None
        if match is None:
            return set()
        name = match[1]
        if name in self.names or name == itself:
            return {name}
        if name in later:
            self.fail(item, f"node '{short(name)}' is computed later", "nodes are in the order of the graph")
        else:
            near = self._near(name, self.names)
            self.fail(item, f"there is no input or earlier node '{short(name)}'{near}")
        return set()

    # --- one group -------------------------------------------------------------------------------------------------------

    def _group(self, values: Mapping[str, Value], weights: set[str], wishes: Wishes) -> GraphSpec | None:
        """Returns the group with these values of the variables; None if it has a mistake."""
        memory: dict[str, UnnumberedTensor] = {}
        for name, item in self.inputs.items():
            tensor = self.tensor(item, values)
            if tensor is not None:
                tensor = self.weights.laid_out(tensor, wishes) if name in weights else tensor
                memory[name] = UnnumberedTensor(name, 0, tensor)
        nodes = [self._node(i, member, memory, values) for i, member in enumerate(self.members)]
        # `make` would report missing nodes, but their mistakes are reported already.
        if not self.good:
            return None
        try:
            return GraphSpec.make([node for node in nodes if node is not None], self._label(values))
        except ValueError as error:
            self.fail_with(values, self.node, str(error))
            return None

    def _label(self, values: Mapping[str, Value]) -> str:
        """Returns the entry's name and its sizes; without a name, the names of its results."""
        sizes = ", ".join(f"{variable} {value}" for variable, value in values.items())
        return f"{self.entry.name or ', '.join(self.entry.outputs)}{': ' if sizes else ''}{sizes}"

    def _node(
        self, i: int, member: OpNode, memory: dict[str, UnnumberedTensor], values: Mapping[str, Value]
    ) -> UnnumberedNode | None:
        name, output, op = member.node.at("name").text, member.node.at("output"), member.op
        into: UnnumberedTensor | None = None
        result: TensorDesc | None
        if output.text.lstrip().startswith("("):
            result = self.tensor(output, values)
            if result is not None:
                memory[name] = UnnumberedTensor(i, 0, result)
        else:
            into = self._reference(output, memory, values)
            result = None if into is None else into.tensor
            if into is not None:
                memory[name] = into
        inputs = [None if item.value is None else self._reference(item, memory, values) for item in member.inputs]
        params = None if op is None else member.full_params(op, values)
        if op is None or params is None or result is None or not self.good:
            return None
        alias = self._alias_of(op, inputs, into, output, i, values)
        member.check_shapes(op, [None if t is None else t.tensor for t in inputs], result, params, alias, values)
        return UnnumberedNode(op.name, tuple(inputs), result, params, into, name in self.entry.outputs)

    def _alias_of(
        self,
        op: Op,
        inputs: list[UnnumberedTensor | None],
        into: UnnumberedTensor | None,
        output: YamlNode,
        i: int,
        values: Mapping[str, Value],
    ) -> int | None:
        """Returns the input whose memory holds a node's result."""
        if into is None:
            if op.alias is not None and not (op.name == "cpy" and inputs[1] is not None and inputs[1].root == i):
                what = f"{op.name} writes its result to input {op.alias}, {op.inputs[op.alias]}"
                self.fail(output, f"{what}: the output is a reference", "write its name, as in output: cache")
            return op.alias
        order = range(len(inputs)) if op.alias is None else (op.alias,)
        found = next((k for k in order if k < len(inputs) and inputs[k] == into), None)
        if found is None:
            of = "one of its inputs" if op.alias is None else f"input {op.alias}, {op.inputs[op.alias]}"
            self.fail_with(values, output, f"{op.name} writes its result to {of}: the output is the same reference")
        return found

    def _reference(
        self, item: YamlNode, memory: Mapping[str, UnnumberedTensor], values: Mapping[str, Value]
    ) -> UnnumberedTensor | None:
        """Returns the tensor of a reference; None if it has a mistake."""
        text = self.fill(item, values)
        match = _REFERENCE.fullmatch(str(text)) if text is not None else None
        if match is None:
            if text is not None:
                self.fail(item, f"'{short(str(text))}' is not a reference", "write NAME, or NAME+OFFSET (…)/dtype")
            return None
        name, offset, tensor = match.groups()
        base = memory.get(name)
        if base is None:
            self.good = False
            return None
        if offset is not None and (tensor is None or not re.fullmatch("[0-9]{1,18}", offset)):
            expected = "an offset is bytes, and its view's tensor follows: NAME+OFFSET (…)/dtype"
            self.fail(item, f"'{short(str(text))}' is not a reference", expected)
            return None
        if tensor is None:
            return base
        try:
            view = parse_tensor(tensor)
        except ValueError as error:
            self.fail_filled(values, item, *explain_tensor(tensor, str(error)))
            return None
        end, size = int(offset or 0) + view.storage_bytes, base.tensor.storage_bytes
        if view.type_text != base.tensor.type_text:
            have = base.tensor.type_text
            self.fail_with(values, item, f"a view of {name} is {have}, as {name} is, not {view.type_text}")
        elif end > size:
            self.fail_with(values, item, f"the view ends at byte {end}, and {name} has {size}")
        return UnnumberedTensor(base.root, base.offset + int(offset or 0), view)
