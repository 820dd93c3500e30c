"""The spec of a graph kernel: several nodes of a ggml graph that one kernel computes, and the id derived from them.

Its nodes are the graph's computing nodes, in their order. They read and write the memory of a *slot* (a tensor that the
kernel receives: a weight, a cache, the result of an earlier kernel) or of a *node* with its own memory. Views are references into
either. A spec has no addresses, names or layer numbers, so that equal parts of graphs are equal: all layers of a transformer are
one kernel.

`kernelgen.lowering.graph` computes it. docs/reference/graph-kernels.md describes the form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.op_kernel import MAX_ID, MAX_INPUTS, KernelSpec, param_from_json, params_to_json, spec_json
from kernelgen.spec.source_kernel import SourceSpec

OP = "graph"
"""Replaces an op's name in a graph kernel's key, and in lists of kernels."""

MAX_NODES = 65536
"""Maximum number of nodes in a graph kernel: a whole step of a large model has some thousands."""

_REFERENCE = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_.-]*)\s*(?:\+\s*([0-9]{1,18})\s*)?(\(.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The position of a tensor.

    Attributes:
        slot: whether it is in a slot; else it is in a node's memory.
        index: the slot's number, or the node's.
        offset: bytes from the slot's base, which is the lowest address that the kernel uses there, or from the node's data.
    """

    slot: bool
    index: int
    offset: int = 0

    def __str__(self) -> str:
        name = f"{'s' if self.slot else 'n'}{self.index}"
        return f"{name}+{self.offset}" if self.offset else name


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a node reads, and its position."""

    place: TensorPlace
    tensor: TensorDesc

    def __str__(self) -> str:
        return f"{self.place} {self.tensor}"


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a group.

    Attributes:
        op: `ggml_op_desc` in lower case.
        inputs: ggml's `src[0…]`; None for an absent input before a present one.
        output: the result.
        params: all (name, value), sorted by name, floats rounded to binary32.
        place: the memory that holds the result; None for memory of its own.
        escapes: whether code outside the group reads the node's own memory.
    """

    op: str
    inputs: tuple[Operand | None, ...]
    output: TensorDesc
    params: tuple[tuple[str, ParamValue], ...] = ()
    place: TensorPlace | None = None
    escapes: bool = False

    @property
    def alias(self) -> int | None:
        """The input whose memory holds the result; None if the node has its own memory."""
        if self.place is None:
            return None
        preferred = ggml_ops.op(self.op).alias
        order = range(len(self.inputs)) if preferred is None else (preferred,)
        for i in order:
            operand = self.inputs[i] if i < len(self.inputs) else None
            if (
                operand is not None
                and operand.place == self.place
                and (operand.tensor.ne, operand.tensor.type_text) == (self.output.ne, self.output.type_text)
            ):
                return i
        return None

    @property
    def kernel(self) -> KernelSpec:
        """The op kernel that computes this node by itself."""
        inputs = [None if i is None else i.tensor for i in self.inputs]
        return KernelSpec.make(self.op, inputs, self.output, dict(self.params), self.alias)

    @property
    def opened(self) -> tuple[str, ...]:
        """The parameters that are `ANY`."""
        return ggml_ops.op(self.op).opened(dict(self.params))

    @property
    def op_params(self) -> tuple[int, ...]:
        """ggml's 16 words of `op_params`; all 0 for a custom op."""
        return ggml_ops.op(self.op).encode(dict(self.params))


@dataclass(frozen=True, slots=True)
class UnnumberedTensor:
    """A tensor whose root has any name and address: the input of `GraphSpec.make`.

    Attributes:
        root: identifies the memory: for a node, its position; for a slot, any value that is not a number.
        offset: bytes from a fixed point of the root, the same for all uses; for a node, from its data.
        tensor: the tensor.
    """

    root: Hashable
    offset: int
    tensor: TensorDesc


@dataclass(frozen=True, slots=True)
class UnnumberedNode:
    """A node before slots are numbered; like `GraphNode`, with `into` for `place`."""

    op: str
    inputs: tuple[UnnumberedTensor | None, ...]
    output: TensorDesc
    params: Mapping[str, ParamValue]
    into: UnnumberedTensor | None = None
    escapes: bool = False


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """The computation of one graph kernel; `make` creates it, and gives equal structures the same form.

    Attributes:
        nodes: in order of computation.
        slots: bytes of each slot, from its base to the end of its last use. Slots are numbered by first use: in the order of
            nodes, and within a node its inputs before its result.
        label: a manifest's name for it, for readers; may be empty.
        slot_names: a manifest's name for each slot, for readers; empty without a label.
    """

    nodes: tuple[GraphNode, ...]
    slots: tuple[int, ...]
    label: str = field(default="", compare=False)
    slot_names: tuple[str, ...] = field(default=(), compare=False)
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Computed once: ids are keys of most tables, and the class is frozen.
        object.__setattr__(self, "id", _graph_id(self))

    @staticmethod
    def make(nodes: Iterable[UnnumberedNode], label: str = "") -> GraphSpec:
        """Returns the canonical form of nodes.

        Args:
            nodes: the nodes; with a label, the roots of their slots are the slots' names.
            label: see `GraphSpec`.

        Raises:
            ValueError: they are not a group: a node reads memory of a later one, a view has a different type than its root or
                extends beyond it, a result is written to memory of none of the node's inputs, or no result is read.
        """
        return _Maker(list(nodes)).spec(label)

    @property
    def op(self) -> str:
        """Replaces the op of an op kernel."""
        return OP

    @property
    def ops(self) -> tuple[str, ...]:
        """The distinct ops, sorted."""
        return tuple(sorted({node.op for node in self.nodes}))

    @property
    def written(self) -> tuple[int, ...]:
        """Numbers of the slots that nodes write to, ascending."""
        return tuple(sorted({n.place.index for n in self.nodes if n.place is not None and n.place.slot}))

    @property
    def escaping(self) -> tuple[int, ...]:
        """Numbers of the nodes whose results are read outside the group, ascending."""
        return tuple(i for i, node in enumerate(self.nodes) if node.escapes)

    @property
    def n_opened(self) -> int:
        """The number of the kernel's run-time numbers, which are one more slot of F32 in the order of the nodes."""
        return sum(len(node.opened) for node in self.nodes)

    @property
    def without_layouts(self) -> GraphSpec:
        """The kernel of the same group with weights in ggml's layout."""

        def plain(operand: Operand | None) -> Operand | None:
            return None if operand is None else Operand(operand.place, operand.tensor.in_layout(""))

        return GraphSpec(tuple(replace(n, inputs=tuple(map(plain, n.inputs))) for n in self.nodes), self.slots)

    def uses(self) -> list[tuple[Operand, ...]]:
        """Returns, for each slot, the distinct tensors in it that nodes read or write, in order of use."""
        found: list[dict[Operand, None]] = [{} for _ in self.slots]
        for node in self.nodes:
            written = [] if node.place is None else [Operand(node.place, node.output)]
            for operand in (*node.inputs, *written):
                if operand is not None and operand.place.slot:
                    found[operand.place.index][operand] = None
        return [tuple(operands) for operands in found]

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as plain values; `from_json` is its inverse."""
        return {
            "graph": [
                {
                    "op": node.op,
                    "inputs": [None if i is None else str(i) for i in node.inputs],
                    "output": str(node.output) if node.place is None else f"{node.place} {node.output}",
                    "params": params_to_json(node.params),
                    "escapes": node.escapes,
                }
                for node in self.nodes
            ]
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> GraphSpec:
        """Returns the spec that `to_json` wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec, or not in canonical form.
        """
        nodes = []
        for node in value["graph"]:
            written, offset, output = parse_reference(node["output"], nameless=True)
            if output is None:
                raise ValueError(f"'{node['output']}' lacks its tensor")
            if not isinstance(node["escapes"], bool):
                raise ValueError(f"escapes is true or false, not {node['escapes']!r}")
            nodes.append(
                UnnumberedNode(
                    node["op"],
                    tuple(None if i is None else _loose(i) for i in node["inputs"]),
                    output,
                    {name: param_from_json(v) for name, v in node["params"].items()},
                    None if written is None else UnnumberedTensor(_root(written), offset, output),
                    node["escapes"],
                )
            )
        spec = GraphSpec.make(nodes)
        # A kernel has one spec and so one id; another order of slots or spelling of a number would give a second.
        if spec.to_json() != value:
            raise ValueError("not in canonical form")
        return spec


Spec = KernelSpec | GraphSpec | SourceSpec
"""The computation of one kernel."""


def spec_from_json(value: Mapping[str, Any]) -> Spec:
    """Returns the spec of any kind that `to_json` wrote.

    Raises:
        ValueError, KeyError: `value` is not such a spec.
    """
    if "source" in value:
        return SourceSpec.from_json(value)
    return GraphSpec.from_json(value) if "graph" in value else KernelSpec.from_json(value)


def spec_ops(spec: Spec) -> tuple[str, ...]:
    """Returns the distinct ops that a kernel computes, sorted; for a source kernel, its name."""
    return spec.ops if isinstance(spec, GraphSpec) else (spec.op,)


def parse_reference(text: str, *, nameless: bool = False) -> tuple[str | None, int, TensorDesc | None]:
    """Returns (name, offset in bytes, tensor) of `NAME`, `NAME (…)/dtype[/(…)]` or `NAME+OFFSET (…)/dtype[/(…)]`.

    Args:
        text: the reference; the returned tensor is None if the text has none.
        nameless: whether a tensor without a name is allowed; then the name is None.

    Raises:
        ValueError: `text` is not a reference, or its tensor is invalid.
    """
    if nameless and text.lstrip().startswith("("):
        return None, 0, TensorDesc.parse(text)
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ValueError("expected NAME, NAME (ne0,ne1,ne2,ne3)/dtype, or NAME+OFFSET (ne0,ne1,ne2,ne3)/dtype")
    name, offset, tensor = match.groups()
    if offset is not None and tensor is None:
        raise ValueError("a view with an offset says its tensor: NAME+OFFSET (ne0,ne1,ne2,ne3)/dtype")
    return name, int(offset or 0), None if tensor is None else TensorDesc.parse(tensor)


def _loose(text: str) -> UnnumberedTensor:
    name, offset, tensor = parse_reference(text)
    if tensor is None or name is None:
        raise ValueError(f"'{text}' lacks its tensor")
    return UnnumberedTensor(_root(name), offset, tensor)


def _root(name: str) -> Hashable:
    if not re.fullmatch("[sn][0-9]{1,6}", name):
        raise ValueError(f"'{name}' is neither a slot (s0) nor a node (n0)")
    return int(name[1:]) if name[0] == "n" else name


class _Maker:
    """Numbers slots and checks nodes."""

    def __init__(self, nodes: Sequence[UnnumberedNode]) -> None:
        if not 0 < len(nodes) <= MAX_NODES:
            raise ValueError(f"a graph kernel has 1 to {MAX_NODES} nodes, not {len(nodes)}")
        self.nodes = nodes
        self.numbers: dict[Hashable, int] = {}
        self.low: dict[Hashable, int] = {}
        self.high: dict[Hashable, int] = {}
        self.types: dict[Hashable, str] = {}
        for i, node in enumerate(nodes):
            for loose in (*node.inputs, node.into):
                if loose is not None:
                    self._note(i, loose)

    def _note(self, i: int, loose: UnnumberedTensor) -> None:
        root, end = loose.root, loose.offset + loose.tensor.storage_bytes
        what = f"node {i}, {self.nodes[i].op}"
        if isinstance(root, int):
            if not 0 <= root <= i:
                raise ValueError(f"{what}: it reads node {root}, which is not computed before it")
            owner = self.nodes[root]
            if owner.into is not None:
                raise ValueError(f"{what}: node {root} has no memory of its own: name what it is written to")
            if loose.tensor.dtype != owner.output.dtype:
                raise ValueError(f"{what}: a view of node {root} is {owner.output.dtype}, not {loose.tensor.dtype}")
            if loose.offset < 0 or end > owner.output.storage_bytes:
                raise ValueError(
                    f"{what}: a view of node {root} ends at byte {end}, and the node has {owner.output.storage_bytes}"
                )
            return
        # Only the part of a slot that nodes use counts: the id does not depend on its place in the buffer, or on the buffer's size.
        self.numbers.setdefault(root, len(self.numbers))
        self.low[root] = min(loose.offset, self.low.get(root, loose.offset))
        self.high[root] = max(end, self.high.get(root, end))
        if self.types.setdefault(root, loose.tensor.type_text) != loose.tensor.type_text:
            raise ValueError(
                f"{what}: a view has the type of its tensor, {self.types[root]}, not {loose.tensor.type_text}"
            )

    def _place(self, loose: UnnumberedTensor) -> TensorPlace:
        if isinstance(loose.root, int):
            return TensorPlace(False, loose.root, loose.offset)
        return TensorPlace(True, self.numbers[loose.root], loose.offset - self.low[loose.root])

    def _node(self, i: int, node: UnnumberedNode) -> GraphNode:
        op = ggml_ops.op(node.op)
        what = f"node {i}, {node.op}"
        if op.updates:
            raise ValueError(f"{what}: an op that changes several of its inputs is not part of a group")
        inputs = [None if t is None else Operand(self._place(t), t.tensor) for t in node.inputs]
        # Absent inputs at the end have no meaning: `[a]` and `[a, none]` must have one id.
        while inputs and inputs[-1] is None:
            inputs.pop()
        if len(inputs) > MAX_INPUTS:
            raise ValueError(f"{what}: {len(inputs)} inputs, more than {MAX_INPUTS}")
        place = None if node.into is None else self._place(node.into)
        made = GraphNode(
            node.op,
            tuple(inputs),
            node.output,
            tuple(sorted(op.with_defaults(node.params).items())),
            place,
            node.escapes,
        )
        if place is None:
            if not node.output.contiguous:
                raise ValueError(f"{what}: a result with memory of its own is contiguous")
            # ggml_cast refers to its own result as its destination.
            own = [t is not None and t.root == i for t in node.inputs]
            if any(own) and (node.op != "cpy" or own != [False, True]):
                raise ValueError(f"{what}: it reads its own result")
            if op.alias is not None and not any(own):
                raise ValueError(f"{what}: {node.op} writes its result to input {op.alias}")
        else:
            if node.escapes:
                raise ValueError(f"{what}: what is written in place has no memory of its own that escapes")
            if made.alias is None:
                raise ValueError(f"{what}: the memory that it writes to is none of its inputs")
        return made

    def spec(self, label: str) -> GraphSpec:
        nodes = tuple(self._node(i, node) for i, node in enumerate(self.nodes))
        slots = tuple(self.high[root] - self.low[root] for root in self.numbers)
        if len(slots) > MAX_NODES or any(extent >= 2**63 for extent in slots):
            raise ValueError(f"a graph kernel has at most {MAX_NODES} slots, of less than 2^63 bytes each")
        spec = GraphSpec(nodes, slots, label, tuple(map(str, self.numbers)) if label else ())
        opened = {bool(node.opened) for node in nodes if ggml_ops.op(node.op).opens}
        if len(opened) > 1:
            raise ValueError("some nodes of a group are for any numbers, and others for their own")
        if not spec.escaping and not spec.written:
            raise ValueError("no result is read outside of the group")
        return spec


def _graph_id(spec: GraphSpec) -> str:
    digest = hashlib.sha256(spec_json(spec).encode()).hexdigest()[:12]
    # The head is for people; only the digest distinguishes graphs.
    head = f"graph-{len(spec.nodes)}-{'-'.join(node.op for node in spec.nodes[:8])}"
    return f"{head[: MAX_ID - 13].rstrip('-')}-{digest}"
