"""Graph kernels' canonical form and keys: equal structure gives equal words, and any difference gives different words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen.bundle.key import key
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import GraphSpec, UnnumberedNode, UnnumberedTensor

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "bundle-graph-keys.json").read_text())
T = TensorDesc.parse


def _nodes(vector: dict[str, Any], rename: dict[str, str], shift: int) -> list[UnnumberedNode]:
    """Returns a vector's nodes with slots of other names, each at another address of its root."""
    spec = GraphSpec.from_json(vector["spec"])

    def loose(place: Any, tensor: TensorDesc) -> UnnumberedTensor:
        name = f"s{place.index}"
        return (
            UnnumberedTensor(rename.get(name, name), place.offset + shift, tensor)
            if place.slot
            else UnnumberedTensor(place.index, place.offset, tensor)
        )

    return [
        UnnumberedNode(
            node.op,
            tuple(o and loose(o.place, o.tensor) for o in node.inputs),
            node.output,
            dict(node.params),
            None if node.place is None else loose(node.place, node.output),
            node.escapes,
        )
        for node in spec.nodes
    ]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["about"])
def test_names_and_addresses_of_slots_do_not_count(vector: dict[str, Any]) -> None:
    slots = len(GraphSpec.from_json(vector["spec"]).slots)
    rename = {f"s{i}": f"blk.31.{slots - i}" for i in range(slots)}
    assert GraphSpec.make(_nodes(vector, rename, 1 << 20)) == GraphSpec.from_json(vector["spec"])


def test_one_slot_is_not_two_of_the_same_shape() -> None:
    x = T("(4,1,1,1)/f32")
    one = GraphSpec.make(
        [UnnumberedNode("add", (UnnumberedTensor("x", 0, x), UnnumberedTensor("x", 0, x)), x, {}, escapes=True)]
    )
    two = GraphSpec.make(
        [UnnumberedNode("add", (UnnumberedTensor("x", 0, x), UnnumberedTensor("y", 0, x)), x, {}, escapes=True)]
    )
    assert key(one) != key(two) and one.id != two.id


def _relu(**changes: Any) -> UnnumberedNode:
    x = T("(4,1,1,1)/f32")
    return replace(UnnumberedNode("relu", (UnnumberedTensor("x", 0, x),), x, {}, escapes=True), **changes)


X = T("(4,1,1,1)/f32")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "1 to 65536 nodes"),
        ([_relu(escapes=False)], "no result is read"),
        ([_relu(inputs=(UnnumberedTensor(1, 0, X),)), _relu()], "reads node 1, which is not computed before"),
        ([_relu(inputs=(UnnumberedTensor(0, 0, X),))], "reads its own result"),
        ([_relu(), _relu(inputs=(UnnumberedTensor(0, 4, X),))], "ends at byte 20, and the node has 16"),
        ([_relu(), _relu(inputs=(UnnumberedTensor(0, 0, T("(4,1,1,1)/i32")),))], "a view of node 0 is f32, not i32"),
        ([_relu(), _relu(inputs=(UnnumberedTensor("x", 0, T("(4,1,1,1)/f16")),))], "has the type of its tensor, f32, not f16"),
        ([_relu(into=UnnumberedTensor("y", 0, X), escapes=False)], "the memory that it writes to is none of its inputs"),
        ([_relu(into=UnnumberedTensor("x", 0, X))], "no memory of its own that escapes"),
        ([_relu(into=UnnumberedTensor("x", 0, X), escapes=False), _relu(inputs=(UnnumberedTensor(0, 0, X),))], "name what it is written to"),
        ([_relu(output=T("(4,1,2,1)/f32/(4,16,64,64)"))], "memory of its own is contiguous"),
        (
            [_relu(op="scale", params={"s": "any"}), _relu(op="scale", inputs=(UnnumberedTensor(0, 0, X),), params={"s": 2.0})],
            "some nodes of a group are for any numbers, and others for their own",
        ),
        ([_relu(op="opt_step_adamw", params={})], "changes several of its inputs"),
        ([_relu(op="set_rows", inputs=(UnnumberedTensor("x", 0, X),) * 3, params={})], "writes its result to input 2"),
    ],
)  # fmt: skip
def test_nodes_that_do_not_form_a_group(nodes: list[UnnumberedNode], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraphSpec.make(nodes)
