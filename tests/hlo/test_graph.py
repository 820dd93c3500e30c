"""One kernel of a group of nodes computes what the nodes compute one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen.errors import KernelgenError
from kernelgen.ggml import shapes
from kernelgen.ggml.ops import op as ggml_op
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import execute
from kernelgen.hlo.describe import describe
from kernelgen.hlo.lint import errors, lint
from kernelgen.lowering.emission import emit_functions
from kernelgen.neff.container import tensors_of
from kernelgen.spec.kernel import GraphSpec, UnnumberedNode, UnnumberedTensor
from kernelgen.targets import TARGETS

from . import group_kernels as groups

VECTORS = {
    vector["about"]: GraphSpec.from_json(vector["spec"])
    for vector in json.loads((Path(__file__).parents[1] / "data" / "bundle-graph-keys.json").read_text())
}
T = TensorDesc.parse
CUSTOM = "custom op"


@pytest.mark.parametrize("about", [about for about in VECTORS if about != CUSTOM])
def test_a_group_computes_what_its_nodes_compute(about: str) -> None:
    spec = VECTORS[about]
    groups.check(spec, most={2: 512, 3: 9})
    for target in TARGETS.values():
        assert errors(lint(groups.emit(spec), target)) == []


def test_parameters_are_slots_and_results_are_named() -> None:
    spec = VECTORS["cache and attention"]
    tensors = {(t.usage, t.name): t for t in tensors_of(groups.emit(spec))}
    names = [f"input{i}" + (".must_alias_input" if i in spec.written else "") for i in range(len(spec.slots))]
    assert [name for usage, name in tensors if usage == "in"] == names
    assert [name for usage, name in tensors if usage == "out"] == ["output0", "input4.updated", "input6.updated"]
    assert [tensors["in", name].size for name in names] == list(spec.slots)
    assert tensors["out", "output0"].size == spec.nodes[3].output.storage_bytes
    assert tensors["out", "input6.updated"].alias == names[6]


def test_values_go_from_node_to_node_without_instructions_between() -> None:
    """A node's output that the next node reads in the same shape is neither copied nor reshaped."""
    x = T("(64,4,1,1)/f32")
    nodes = [
        UnnumberedNode("neg", (UnnumberedTensor("x", 0, x),), x, {}),
        UnnumberedNode("abs", (UnnumberedTensor(0, 0, x),), x, {}, escapes=True),
    ]
    made = describe(groups.emit(GraphSpec.make(nodes))).opcodes
    assert dict(made) == {"parameter": 1, "negate": 1, "abs": 1}


def test_an_unused_slot_stays_a_parameter() -> None:
    """`fill` reads only the shape of its input."""
    x = T("(64,4,1,1)/f32")
    spec = GraphSpec.make([UnnumberedNode("fill", (UnnumberedTensor("x", 0, x),), x, {"c": 2.0}, escapes=True)])
    assert [name for name, _, _ in execute.parameters(groups.emit(spec))] == ["input0"]


def test_a_written_slot_keeps_what_no_node_writes() -> None:
    x = T("(8,2,1,1)/f32")
    part = T("(4,2,1,1)/f32/(4,32,64,64)")
    spec = GraphSpec.make(
        [
            UnnumberedNode("sqr", (UnnumberedTensor("x", 0, x),), x, {}, escapes=True),
            UnnumberedNode(
                "scale", (UnnumberedTensor("x", 8, part),), part, {"s": 3.0}, UnnumberedTensor("x", 8, part)
            ),
        ]
    )
    slots = groups.contents(spec, 1)
    before = slots[0].view(np.float32).reshape(2, 8)
    squares, after = (a.view(np.float32).reshape(2, 8) for a in groups.whole(spec, slots))
    np.testing.assert_array_equal(squares, before**2)
    np.testing.assert_array_equal(after[:, 2:6], before[:, 2:6] * 3)
    np.testing.assert_array_equal(after[:, [0, 1, 6, 7]], before[:, [0, 1, 6, 7]])


def test_what_a_node_s_emitter_refuses_names_the_node_s_kernel() -> None:
    spec = VECTORS[CUSTOM]

    def my_scale(x: Any, *, factor: float, steps: int, wrap: bool) -> Any:
        raise ValueError("no such scale")

    with pytest.raises(KernelgenError, match=r"kernel my_scale-.*no such scale"):
        emit_functions(spec, {"relu": lambda x: x, "my_scale": my_scale})
    with pytest.raises(KernelgenError, match="the kernel returns"):
        emit_functions(spec, {"relu": lambda x: x[0], "my_scale": my_scale})


# --- random groups -----------------------------------------------------------------------------------------------------------


class _Random:
    """Makes nodes of random ops on random views of slots and earlier nodes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[UnnumberedNode] = []
        self.tensors: list[UnnumberedTensor] = [self._slot() for _ in range(3)]

    def _slot(self) -> UnnumberedTensor:
        ne = [int(n) for n in self.rng.choice([1, 2, 3, 4, 8], 3)]
        return UnnumberedTensor(f"slot{len(getattr(self, 'tensors', []))}-{self.rng.integers(1 << 30)}", int(4 * self.rng.integers(3)),
                     TensorDesc.make((8 * ne[0], ne[1], ne[2], 1), "f32"))  # fmt: skip

    def _pick(self) -> UnnumberedTensor:
        """Returns an existing tensor, or a view of one: permuted, reshaped, or some of its rows."""
        one = self.tensors[self.rng.integers(len(self.tensors))]
        t = one.tensor
        way = self.rng.integers(4)
        if way == 1 and t.contiguous:
            ne = (t.ne[0], t.ne[1] * t.ne[2], 1, 1)
            return UnnumberedTensor(one.root, one.offset, TensorDesc.make(ne, "f32"))
        if way == 2:
            order = [0, 2, 1, 3] if t.nb[0] == 4 else [0, 1, 2, 3]
            return UnnumberedTensor(
                one.root, one.offset, TensorDesc.make([t.ne[i] for i in order], "f32", [t.nb[i] for i in order])
            )
        if way == 3 and t.ne[1] > 1:
            first = int(self.rng.integers(t.ne[1]))
            ne = (t.ne[0], t.ne[1] - first, *t.ne[2:])
            return UnnumberedTensor(one.root, one.offset + first * t.nb[1], TensorDesc.make(ne, "f32", t.nb))
        return one

    def add(self) -> None:
        rng, x = self.rng, self._pick()
        rows = (x.tensor.ne[0], 1, 1, 1)
        name = rng.choice(
            ["add", "mul", "rms_norm", "silu", "soft_max", "mul_mat", "cont", "scale", "sub", "in place", "cpy"]
        )
        inputs: tuple[UnnumberedTensor, ...] = (x,)
        params: dict[str, Any] = {}
        into = None
        if name in ("add", "sub"):
            same = [t for t in self.tensors if t.tensor.ne == x.tensor.ne]
            inputs = (x, same[rng.integers(len(same))] if same else x)
        elif name == "mul":
            inputs = (x, UnnumberedTensor(f"weight{len(self.nodes)}", 0, TensorDesc.make(rows, "f32")))
        elif name == "mul_mat":
            weight = TensorDesc.make((x.tensor.ne[0], 16, 1, 1), "f32")
            inputs = (UnnumberedTensor(f"matrix{len(self.nodes)}", 0, weight), x)
        elif name == "rms_norm":
            params = {"eps": 1e-5}
        elif name == "soft_max":
            if not x.tensor.contiguous:
                name = "cont"
            params = {"scale": 0.5} if name == "soft_max" else {}
        elif name == "scale":
            params = {"s": 0.5, "b": 0.25}
        elif name == "in place":
            name, params, into = "scale", {"s": 0.5, "b": 0.25}, x
        elif name == "cpy":
            to = self._pick()
            if to.tensor.elements != x.tensor.elements or to.root == x.root:
                return
            inputs, into = (x, to), to
        # ggml's own rules decide whether the inputs fit, and give the result.
        descriptions = [t.tensor for t in inputs]
        known = ggml_op(str(name))
        full = known.with_defaults(params)
        result = into.tensor if into is not None else shapes.result(str(name), descriptions, full)
        if result is None:
            result = TensorDesc.make(x.tensor.ne, "f32")
        if shapes.check(str(name), descriptions, result, full, None if into is None else len(inputs) - 1):
            return
        self.nodes.append(UnnumberedNode(str(name), inputs, result, params, into))
        if into is None:
            self.tensors.append(UnnumberedTensor(len(self.nodes) - 1, 0, result))

    def spec(self, n: int) -> GraphSpec:
        while len(self.nodes) < n:
            self.add()
        escaping = {
            i for i, node in enumerate(self.nodes) if node.into is None and (i == n - 1 or self.rng.random() < 0.3)
        }
        nodes = [
            UnnumberedNode(o.op, o.inputs, o.output, o.params, o.into, i in escaping) for i, o in enumerate(self.nodes)
        ]
        if not escaping and not any(node.into for node in nodes):
            nodes[0] = UnnumberedNode(nodes[0].op, nodes[0].inputs, nodes[0].output, nodes[0].params, None, True)
        return GraphSpec.make(nodes)


@pytest.mark.parametrize("seed", range(6))
def test_random_groups_compute_what_their_nodes_compute(seed: int) -> None:
    groups.check(_Random(seed).spec(9), seed)
