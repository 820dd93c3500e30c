"""One kernel of a group of nodes computes what the nodes compute one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernelgen.errors import KernelgenError
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
