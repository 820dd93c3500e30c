"""Kernels: what each computes, on tensors of exact shapes and types, and the id derived from that.

A kernel is a graph of nodes, or a function in a file. `KernelSpec` is a graph of one op that reads whole inputs. `GraphSpec` is
nodes of a ggml graph, in their order. They read and write the memory of a *slot* (a tensor that the kernel receives: a weight, a
cache, the result of an earlier kernel) or of a *node* with its own memory. Views are references into either. A spec has no
addresses, names or layer numbers, so that equal parts of graphs are equal: all layers of a transformer are one kernel.
`SourceSpec` is a function in a file, on arrays of any rank.

Other packages compute a kernel (`kernelgen.emitters`, `kernelgen.lowering`) and compile it (`kernelgen.compilers`).
docs/reference/graph-kernels.md and docs/reference/source-kernels.md describe the forms.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.ops import ANY, ParamValue
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES_BY_NUMBER
from kernelgen.ggml.weight_layouts import WEIGHTS
from kernelgen.spec.arrays import ArrayDesc
from kernelgen.spec.canonical import canonical_json

MAX_INPUTS = 16
"""Maximum inputs of an op kernel, and of a node of a graph kernel; the same as in backend/bundle/include/neuron_kernels.h."""
MAX_ID = 63
"""Maximum bytes of a kernel id: it must fit a file name with a suffix, a GGUF tensor name and a C symbol."""


class Spec:
    """The computation of one kernel: the identity that manifests share, HLO is named by, and a backend looks up.

    Attributes:
        id: a readable name of at most `MAX_ID` bytes; it ends in a digest of `json`.
        op: the op, the name of a function's kernel, or `graph`.
        nodes: the nodes in order of computation; none for a function.
    """

    __slots__ = ()
    if TYPE_CHECKING:

        @property
        def id(self) -> str: ...
        @property
        def op(self) -> str: ...
        @property
        def nodes(self) -> tuple[GraphNode, ...]: ...

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Spec:
        """Returns the spec that `to_json` of any class wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec.
        """
        if "source" in value:
            return SourceSpec.from_json(value)
        return GraphSpec.from_json(value) if "graph" in value else KernelSpec.from_json(value)

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as plain values; `from_json` is its inverse."""
        raise NotImplementedError

    @property
    def json(self) -> str:
        """The canonical JSON: the input of the id's digest, and of an emit step."""
        return canonical_json(self.to_json())

    @property
    def ops(self) -> tuple[str, ...]:
        """The distinct ops, sorted; for a function, its name."""
        return tuple(sorted({node.op for node in self.nodes})) or (self.op,)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """The kernels that compute the nodes one by one; none for a function."""
        return tuple(node.kernel for node in self.nodes)

    @property
    def description(self) -> str:
        """The inputs and results, for people."""
        raise NotImplementedError

    @property
    def n_opened(self) -> int:
        """The number of the kernel's run-time numbers, which are one more input of F32 in the order of the nodes."""
        return sum(len(node.opened) for node in self.nodes)

    @property
    def without_layouts(self) -> Spec:
        """The same kernel with weights in ggml's layout."""
        return self

    @property
    def interpreted(self) -> Spec:
        """The same kernel in the form that a CPU can run."""
        return self

    def own_target(self, targets: Sequence[str]) -> str:
        """Returns the one of a kernel's targets that its HLO is for; empty if the HLO is the same for all targets."""
        return ""

    def _set_id(self, head: str) -> None:
        # Computed once: ids are keys of most tables, and the classes are frozen. The head is for people.
        digest = hashlib.sha256(self.json.encode()).hexdigest()[:12]
        object.__setattr__(self, "id", f"{head[: MAX_ID - 13]}-{digest}")


@dataclass(frozen=True, slots=True)
class KernelSpec(Spec):
    """A graph of one op whose inputs are the kernel's own.

    Attributes:
        op: `ggml_op_desc` in lower case.
        inputs: ggml's `src[0…]`; None for an absent input before a present one.
        output: the result.
        params: all (name, value), sorted by name, floats rounded to binary32.
        alias: the input whose memory holds the result, or None.
    """

    op: str
    inputs: tuple[TensorDesc | None, ...]
    output: TensorDesc
    params: tuple[tuple[str, ParamValue], ...] = ()
    alias: int | None = None
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        ne = self.output.ne
        last = max((i for i in range(4) if ne[i] != 1), default=0)
        self._set_id(f"{self.op}-{'x'.join(map(str, ne[: last + 1]))}-{self.output.dtype}")

    @staticmethod
    def make(
        op: str,
        inputs: Iterable[TensorDesc | None],
        output: TensorDesc,
        params: Mapping[str, ParamValue] | None = None,
        alias: int | None = None,
    ) -> KernelSpec:
        """Returns the canonical spec: trailing absent inputs dropped, defaults filled in, the op's own aliasing applied.

        Raises:
            ValueError: no kernel can have this spec: an input that is not a weight has a layout, there are more than `MAX_INPUTS`,
                or the input whose memory holds the result is absent.
        """
        srcs = list(inputs)
        while srcs and srcs[-1] is None:
            srcs.pop()
        weight = WEIGHTS.get(op)
        wrong = next((t for i, t in enumerate((*srcs, output)) if t is not None and t.layout and i != weight), None)
        if wrong is not None:
            raise ValueError(f"{op}: only the weights of {' and '.join(WEIGHTS)} have a layout, not {wrong}")
        known = ggml_ops.op(op)
        full = known.with_defaults(params or {})
        known.opened(full)
        shared = known.alias if alias is None else alias
        if len(srcs) > MAX_INPUTS:
            raise ValueError(f"{op}: {len(srcs)} inputs, more than {MAX_INPUTS}")
        if shared is not None and (not 0 <= shared < len(srcs) or srcs[shared] is None):
            raise ValueError(f"{op}: the result shares the memory of input {shared}, which is not there")
        return KernelSpec(op, tuple(srcs), output, tuple(sorted(full.items())), shared)

    @property
    def updates(self) -> tuple[int, ...]:
        """The inputs that the kernel changes, other than `alias` (an optimizer's momenta)."""
        return ggml_ops.op(self.op).updates

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        """The op as a node; each input is the slot of the same number."""
        inputs = tuple(None if t is None else Operand(TensorPlace(True, i), t) for i, t in enumerate(self.inputs))
        place = None if self.alias is None else TensorPlace(True, self.alias)
        return (GraphNode(self.op, inputs, self.output, self.params, place, place is None),)

    @property
    def ops(self) -> tuple[str, ...]:
        return (self.op,)

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return (self,)

    @property
    def description(self) -> str:
        return f"{', '.join('-' if t is None else str(t) for t in self.inputs)} -> {self.output}"

    @property
    def slots(self) -> tuple[int, ...]:
        """Bytes of each input; 0 for an absent one."""
        return tuple(0 if t is None else t.storage_bytes for t in self.inputs)

    def uses(self) -> list[tuple[Operand, ...]]:
        """Returns the operand in each slot; none for an absent input."""
        return [() if operand is None else (operand,) for operand in self.nodes[0].inputs]

    @property
    def results(self) -> tuple[tuple[str, tuple[bool, int]], ...]:
        """See `GraphSpec.results`. The result comes first, even where it replaces an input."""
        first = (False, 0) if self.alias is None else (True, self.alias)
        return (("output0", first), *((f"input{i}.updated", (True, i)) for i in self.updates))

    @property
    def opened(self) -> tuple[str, ...]:
        """The parameters that are `ANY`: the kernel receives them at run time, in this order, as one more input of F32."""
        return ggml_ops.op(self.op).opened(dict(self.params))

    @property
    def open(self) -> KernelSpec | None:
        """The kernel of the same op that accepts any numbers; None if the op has none, or this kernel already does."""
        opens = ggml_ops.op(self.op).opens
        if not opens or self.opened:
            return None
        return KernelSpec.make(
            self.op, self.inputs, self.output, {**dict(self.params), **{p.name: ANY for p in opens}}, self.alias
        )

    @property
    def op_params(self) -> tuple[int, ...]:
        """ggml's 16 words of `op_params`; all 0 for a custom op."""
        return ggml_ops.op(self.op).encode(dict(self.params))

    @property
    def without_layouts(self) -> KernelSpec:
        if all(t is None or not t.layout for t in self.inputs):
            return self
        return replace(self, inputs=tuple(None if t is None else t.in_layout("") for t in self.inputs))

    @property
    def of_ggml(self) -> KernelSpec:
        """The kernel of the same op with only ggml's parameters, which computes any node of that op."""
        known = ggml_ops.op(self.op).by_name
        params = tuple((k, v) for k, v in self.params if k not in known or not known[k].ours)
        return self if params == self.params else replace(self, params=params)

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "inputs": [None if t is None else str(t) for t in self.inputs],
            "output": str(self.output),
            "params": params_to_json(self.params),
            "alias": self.alias,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> KernelSpec:
        """Returns the spec that `to_json` wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec.
        """
        if not isinstance(value["op"], str):
            raise ValueError(f"op is a name, not {value['op']!r}")
        if value["alias"] is not None and type(value["alias"]) is not int:
            raise ValueError(f"alias is the number of an input, not {value['alias']!r}")
        return KernelSpec.make(
            value["op"],
            [None if t is None else TensorDesc.parse(t) for t in value["inputs"]],
            TensorDesc.parse(value["output"]),
            {name: param_from_json(v) for name, v in value["params"].items()},
            value["alias"],
        )


def params_to_json(params: Iterable[tuple[str, ParamValue]]) -> dict[str, ParamValue | str]:
    """Returns parameters as JSON values: infinities and "nan" as text."""
    return {name: _param_to_json(value) for name, value in params}


def param_from_json(value: Any) -> ParamValue:
    """Returns a parameter of `params_to_json`. Bazel's attributes pass every value as text.

    Raises:
        ValueError: a text is not a number, `true` or `false`.
    """
    return param_from_text(value) if isinstance(value, str) else value


def param_from_text(text: str) -> ParamValue:
    """Returns the parameter in a text: `1` is an int, `1.0` a float, `true` a bool; or `any`.

    Raises:
        ValueError: `text` is not a number, `true`, `false` or `any`.
    """
    if text == ANY:
        return ANY
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _param_to_json(value: ParamValue) -> ParamValue | str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value


def spec_from_ggml(
    number: int,
    words: Sequence[int],
    inputs: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    output: tuple[int, Sequence[int]],
) -> KernelSpec:
    """Returns the spec of a graph node from ggml's own numbers.

    Args:
        number: `enum ggml_op`.
        words: `op_params`, 16 words.
        inputs: (type number, ne, nb) of each source.
        output: (type number, ne) of the result, which is contiguous.

    Raises:
        ValueError: an op or type number is unknown, or a tensor is invalid.
    """
    name = ggml_ops.op_name(number, words)
    op = ggml_ops.op(name)
    return KernelSpec.make(
        name,
        [TensorDesc.make(ne, _type_name(t), nb) for t, ne, nb in inputs],
        TensorDesc.make(output[1], _type_name(output[0])),
        op.decode(words),
    )


def _type_name(number: int) -> str:
    if number not in TYPES_BY_NUMBER:
        raise ValueError(f"unknown ggml type number {number}")
    return TYPES_BY_NUMBER[number].name


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
class GraphSpec(Spec):
    """A graph of several nodes; `make` creates it, and gives equal structures the same form.

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
        head = f"graph-{len(self.nodes)}-{'-'.join(node.op for node in self.nodes[:8])}"
        self._set_id(head[: MAX_ID - 13].rstrip("-"))

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
    def description(self) -> str:
        return f"{len(self.nodes)} nodes, {len(self.slots)} slots of {sum(self.slots)} bytes"

    @property
    def written(self) -> tuple[int, ...]:
        """Numbers of the slots that nodes write to, ascending."""
        return tuple(sorted({n.place.index for n in self.nodes if n.place is not None and n.place.slot}))

    @property
    def escaping(self) -> tuple[int, ...]:
        """Numbers of the nodes whose results are read outside the group, ascending."""
        return tuple(i for i, node in enumerate(self.nodes) if node.escapes)

    @property
    def results(self) -> tuple[tuple[str, tuple[bool, int]], ...]:
        """The name of each of the HLO's results, and the memory that it is: (is it a slot, number of the slot or node)."""
        own = [(f"output{k}", (False, node)) for k, node in enumerate(self.escaping)]
        return (*own, *((f"input{slot}.updated", (True, slot)) for slot in self.written))

    @property
    def without_layouts(self) -> GraphSpec:

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


@dataclass(frozen=True, slots=True)
class SourceSpec(Spec):
    """A function in a file and its arguments.

    Attributes:
        name: the name by which a program finds it; unique in a bundle.
        source: `FILE.py:FUNCTION`, relative to the manifest's folder, with `/`.
        inputs: the array arguments, in order.
        outputs: the results, in order. Inputs that the function changes in place follow them.
        params: (name, value) of its static arguments, sorted by name: numbers, texts, true, false, None, and tuples of these.
        grid: number of programs in each dimension; empty for a launch without a grid.
        env: (name, value) of the environment variables that the file gets, sorted.
        alias: (output, input) of results that are written to an input's memory, sorted.
        lowering: `interpreted`, or `native` for the output of the language's own compiler.
        arguments: names of the arguments that receive the inputs; empty if these are the function's first arguments.
    """

    name: str
    source: str
    inputs: tuple[ArrayDesc, ...]
    outputs: tuple[ArrayDesc, ...]
    params: tuple[tuple[str, Any], ...] = ()
    grid: tuple[int, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    alias: tuple[tuple[int, int], ...] = ()
    lowering: str = "interpreted"
    arguments: tuple[str, ...] = ()
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        out = self.outputs[0]
        self._set_id("-".join(filter(None, (self.name, "x".join(map(str, out.shape)), out.dtype))))

    @property
    def op(self) -> str:
        """Replaces the op of other kernels in lists and patterns."""
        return self.name

    @property
    def nodes(self) -> tuple[GraphNode, ...]:
        return ()

    @property
    def description(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    @property
    def function(self) -> str:
        """The function's name."""
        return self.source.rpartition(":")[2]

    @property
    def file(self) -> str:
        """The file, relative to the manifest's folder."""
        return self.source.rpartition(":")[0]

    @property
    def interpreted(self) -> SourceSpec:
        return self if self.lowering == "interpreted" else replace(self, lowering="interpreted")

    def own_target(self, targets: Sequence[str]) -> str:
        return targets[0] if self.lowering == "native" and targets else ""

    def to_json(self) -> dict[str, Any]:
        """Returns the spec as plain values; empty values are omitted."""
        made: dict[str, Any] = {
            "name": self.name,
            "source": self.source,
            "inputs": [str(a) for a in self.inputs],
            "outputs": [str(a) for a in self.outputs],
            "params": dict(self.params),
        }
        more = {"grid": self.grid, "env": dict(self.env), "alias": {str(k): i for k, i in self.alias}}
        more |= {"arguments": list(self.arguments)}
        made |= {name: value for name, value in more.items() if value}
        return made if self.lowering == "interpreted" else made | {"lowering": self.lowering}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> SourceSpec:
        """Returns the spec that `to_json` wrote.

        Raises:
            ValueError, KeyError: `value` is not such a spec.
        """
        return SourceSpec(
            value["name"],
            value["source"],
            tuple(map(ArrayDesc.parse, value["inputs"])),
            tuple(map(ArrayDesc.parse, value["outputs"])),
            tuple(sorted((name, static(v)) for name, v in value["params"].items())),
            tuple(value.get("grid", ())),
            tuple(sorted(value.get("env", {}).items())),
            tuple(sorted((int(k), i) for k, i in value.get("alias", {}).items())),
            value.get("lowering", "interpreted"),
            tuple(value.get("arguments", ())),
        )


def static(value: Any) -> Any:
    """Returns a static argument in the form for functions: lists as tuples."""
    return tuple(map(static, value)) if isinstance(value, list | tuple) else value
