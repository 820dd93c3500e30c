"""Expands an entry of a manifest's `graphs:` to graph kernels: resolves references, and checks every node like an op kernel."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernelgen.emitters.catalog import Catalog
from kernelgen.errors import KernelgenError, did_you_mean
from kernelgen.ggml.ops import Op
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.languages import DEFAULT
from kernelgen.manifest.document import YamlNode, short
from kernelgen.manifest.kernels import Choice, KernelEntry
from kernelgen.manifest.schema import Report
from kernelgen.manifest.sizes import Sizes
from kernelgen.manifest.template import Value
from kernelgen.manifest.values import explain_tensor, parse_tensor
from kernelgen.manifest.weights import Wishes
from kernelgen.plan import Kernel
from kernelgen.spec.kernel import GraphSpec, UnnumberedNode, UnnumberedTensor

MAX_SUGGESTIONS = 20
"""Number of wrong names per entry that get a suggestion: each is compared with all names, which may be ten thousand."""

_NAME = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)")
_REFERENCE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*(?:\+\s*([^()\s]*)\s*)?(\(.*)?", re.DOTALL)


def expand(entry: YamlNode, catalog: Catalog, report: Report, sizes: Sizes, choice: Choice) -> list[Kernel]:
    """Returns the graph kernels of one entry and, unless it has `fallback: false`, the op kernels of their nodes.

    Adds mistakes to `report`; an entry with a mistake gives no kernel.

    Args:
        entry: an item of `graphs:` that passed the schema check.
        catalog: the available emitters.
        report: receives mistakes; nodes in `report.wrong` are skipped.
        sizes: the variables that it shares with the other entries.
        choice: further inputs of the choice of emitters.
    """
    return _GraphEntry(entry, catalog, report, sizes, choice).expand_graph()


@dataclass(frozen=True, slots=True)
class _Memory:
    """The tensor that a name refers to.

    Attributes:
        root: see `UnnumberedTensor`.
        offset: bytes from the root's start.
        tensor: its tensor.
    """

    root: str | int
    offset: int
    tensor: TensorDesc


class _Member(KernelEntry):
    """A node of a group: it has the op, parameters and inputs of a kernel's entry."""

    in_graph = True

    def __init__(self, graph: _GraphEntry, node: YamlNode) -> None:
        super().__init__(node, graph.catalog, graph.report, graph.sizes, graph.choice)
        self.graph = graph
        self.templates = graph.templates

    def fail(self, node: YamlNode, message: str, hint: str | None = None) -> None:
        self.graph.fail(node, message, hint)

    def fail_with(self, values: Mapping[str, Value], node: YamlNode, message: str) -> None:
        self.graph.fail_with(values, node, message)


class _GraphEntry(KernelEntry):
    def __init__(self, entry: YamlNode, catalog: Catalog, report: Report, sizes: Sizes, choice: Choice) -> None:
        super().__init__(entry, catalog, report, sizes, choice)
        self.members: list[_Member] = []
        self.names: dict[str, YamlNode] = {}
        self.suggestions = MAX_SUGGESTIONS

    def expand_graph(self) -> list[Kernel]:
        if self.entry.kind != "map" or not self.usable(self.entry):
            return []
        self._read_variables()
        nodes = self._need("nodes")
        self.members = [_Member(self, node) for node in nodes.value]
        for member in self.members:
            member._read_op()
            if member.op is not None:
                member._check_counts(member.op)
        self._check_references()
        found: list[Kernel] = []
        weights = self._weights()
        has_layout = False
        fallback = self.entry.get("fallback")
        only = self._only_targets()
        for values in self._combinations():
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
                if fallback is None or fallback.value:
                    kernels = dict.fromkeys(node.kernel.of_ggml for node in spec.nodes)
                    ops = [k for one in kernels for k in self._chosen(one, of)]
                    self.note_settings(ops, values, None)
                    found += ops
        self._check_layouts(has_layout)
        # Groups of several sizes share nodes; list each kernel once.
        return list(dict.fromkeys(found)) if self.good else []

    def _only_targets(self) -> Sequence[str]:
        """Returns the targets that have the group's kernel."""
        node = self.entry.get("targets")
        if node is None:
            return self.choice.targets
        for item in node.value:
            if item.text not in self.choice.targets:
                self.fail(
                    item, f"the manifest is not for {item.text}", "add it to the manifest's targets, or remove it"
                )
        return [item.text for item in node.value]

    def _weights(self) -> set[str]:
        """Returns the inputs that may have a layout: every use has to read them whole, and as a weight."""
        found = {name for name, item in self._need("inputs").value.items() if not self.is_sized(item.node)}
        for member in self.members:
            index = None if member.op is None else WEIGHTS.get(member.op.name)
            read = [*self._of(member, "inputs").value, self._of(member, "output")]
            for i, item in enumerate(read):
                match = _REFERENCE.fullmatch(item.text) if item.value is not None else None
                if match is not None and (i != index or match[2] is not None or match[3] is not None):
                    found.discard(match[1])
        return found

    def _of_group(self, spec: GraphSpec) -> list[Kernel]:
        """Returns the kernel of a group with its emitters, which are in JAX."""
        languages = self._asked_languages()
        if languages is None:
            return []
        if languages and DEFAULT not in languages:
            hint = f"add {DEFAULT} to languages"
            self.fail(
                self.entry, f"a graph kernel is composed of emitters in {DEFAULT}, which `languages` leaves out", hint
            )
            return []
        try:
            return [self.catalog.kernel(spec)]
        except KernelgenError as error:
            (found,) = error.diagnostics
            self.fail(self.entry, found.message, found.hint)
            return []

    def _texts(self) -> Iterator[YamlNode]:
        for item in self._need("inputs").value.values():
            yield item.node
        for node in self._need("nodes").value:
            for key in ("inputs", "params"):
                several = node.get(key)
                if several is not None:
                    yield from several.value if several.kind == "seq" else (e.node for e in several.value.values())
            yield node.get("output")

    # --- names -----------------------------------------------------------------------------------------------------------

    def _check_references(self) -> None:
        """Checks that names exist, precede their use, and are used: everything that does not depend on variables' values."""
        inputs = self._need("inputs")
        outputs = self._need("outputs")
        used: set[str] = set()
        self.names = {name: item.key for name, item in inputs.value.items()}
        later = {member.entry.get("name").text for member in self.members}  # type: ignore[union-attr]
        in_place: set[str] = set()
        for member in self.members:
            name = self._of(member, "name")
            later.discard(name.text)
            for i, item in enumerate(self._of(member, "inputs").value):
                # ggml_cast refers to its own result as its destination.
                itself = member.op is not None and member.op.name == "cpy" and i == 1
                used |= self._refer(item, later, name.text if itself else None)
            output = self._of(member, "output")
            if not output.text.lstrip().startswith("("):
                in_place.add(name.text)
                used |= self._refer(output, later, None)
            if name.text in self.names:
                what = "an input" if name.text in inputs.value else "a node"
                hint = f"the first is at {self.names[name.text].location}"
                self.fail(name, f"'{short(name.text)}' is already the name of {what}", hint)
            self.names.setdefault(name.text, name)
        for name_of, item in inputs.value.items():
            if name_of not in used:
                self.fail(item.key, f"input '{short(name_of)}' is not used", "name it in a node's inputs, or remove it")
        named = set()
        for item in outputs.value:
            named.add(item.text)
            if item.text in in_place:
                hint = "what is written in place is visible without being named: remove it"
                self.fail(item, f"'{short(item.text)}' has no memory of its own", hint)
            elif item.text not in self.names or item.text in inputs.value:
                near = self._near(item.text, (n for n in self.names if n not in inputs.value))
                self.fail(item, f"there is no node '{short(item.text)}'{near}")
        needed = used | named | in_place
        for member in self.members:
            name = self._of(member, "name")
            if name.text not in needed:
                hint = "name it in outputs or in another node's inputs, or remove it"
                self.fail(name, f"the result of '{short(name.text)}' is not used", hint)
        if not named and not in_place:
            self.fail(outputs, "the group has no result", "name the nodes whose results are read outside of it")

    def _of(self, member: _Member, key: str) -> YamlNode:
        node = member.entry.get(key)
        assert node is not None
        return node

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
        memory: dict[str, _Memory] = {}
        for name, item in self._need("inputs").value.items():
            tensor = self._tensor(item.node, values)
            if tensor is not None:
                memory[name] = _Memory(name, 0, self.weights.laid_out(tensor, wishes) if name in weights else tensor)
        outputs = {item.text for item in self._need("outputs").value}
        nodes = []
        for i, member in enumerate(self.members):
            made = self._node(i, member, memory, outputs, values)
            if made is not None:
                nodes.append(made)
        # `make` would report missing nodes, but their mistakes are reported already.
        if not self.good or len(nodes) != len(self.members):
            return None
        try:
            return GraphSpec.make(nodes, self._label(values))
        except ValueError as error:
            self.fail_with(values, self.entry, str(error))
            return None

    def _label(self, values: Mapping[str, Value]) -> str:
        """Returns the entry's name and its sizes; without a name, the names of its results."""
        name = self.entry.get("name")
        results = [item.text for item in self._need("outputs").value]
        sizes = ", ".join(f"{variable} {value}" for variable, value in values.items())
        return f"{', '.join(results) if name is None else name.text}{': ' if sizes else ''}{sizes}"

    def _node(
        self, i: int, member: _Member, memory: dict[str, _Memory], outputs: set[str], values: Mapping[str, Value]
    ) -> UnnumberedNode | None:
        name, output = self._of(member, "name").text, self._of(member, "output")
        own = output.text.lstrip().startswith("(")
        into: UnnumberedTensor | None = None
        result: TensorDesc | None
        if own:
            result = self._tensor(output, values)
            if result is not None:
                memory[name] = _Memory(i, 0, result)
        else:
            into = self._reference(output, memory, values)
            result = None if into is None else into.tensor
            if into is not None:
                memory[name] = _Memory(_root(into), into.offset, into.tensor)
        items = self._of(member, "inputs").value
        inputs = [None if item.value is None else self._reference(item, memory, values) for item in items]
        missing = any(t is None and item.value is not None for t, item in zip(inputs, items, strict=True))
        op = member.op
        params = {} if op is None else member._params(op, values)
        if op is None or missing or result is None or not self.good:
            return None
        alias = self._alias_of(op, inputs, into, output, i, values)
        descriptions = [None if t is None else t.tensor for t in inputs]
        full = member.full_params(op, params)
        if full is None:
            return None
        member.check_shapes(op, descriptions, result, full, alias, values)
        return UnnumberedNode(op.name, tuple(inputs), result, full, into, name in outputs)

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
        self, item: YamlNode, memory: Mapping[str, _Memory], values: Mapping[str, Value]
    ) -> UnnumberedTensor | None:
        """Returns the tensor of a reference; None if it has a mistake."""
        if not self.usable(item):
            self.good = False
            return None
        text = self._fill(item, values)
        match = _REFERENCE.fullmatch(str(text)) if text is not None else None
        if match is None:
            if text is not None:
                self.fail(item, f"'{short(str(text))}' is not a reference", "write NAME, or NAME+OFFSET (…)/dtype")
            return None
        name, offset, tensor = match.groups()
        whole = memory.get(name)
        if whole is None:
            self.good = False
            return None
        if offset is not None and (tensor is None or not re.fullmatch("[0-9]{1,18}", offset)):
            expected = "an offset is bytes, and its view's tensor follows: NAME+OFFSET (…)/dtype"
            self.fail(item, f"'{short(str(text))}' is not a reference", expected)
            return None
        if tensor is None:
            return UnnumberedTensor(whole.root, whole.offset, whole.tensor)
        try:
            view = parse_tensor(tensor)
        except ValueError as error:
            message, hint = explain_tensor(tensor, str(error))
            if id(item) in self.templates:
                self.fail_with(values, item, message)
            else:
                self.fail(item, message, hint)
            return None
        end, size = int(offset or 0) + view.storage_bytes, whole.tensor.storage_bytes
        if view.type_text != whole.tensor.type_text:
            have = whole.tensor.type_text
            self.fail_with(values, item, f"a view of {name} is {have}, as {name} is, not {view.type_text}")
        elif end > size:
            self.fail_with(values, item, f"the view ends at byte {end}, and {name} has {size}")
        return UnnumberedTensor(whole.root, whole.offset + int(offset or 0), view)


def _root(loose: UnnumberedTensor) -> str | int:
    assert isinstance(loose.root, str | int)
    return loose.root
