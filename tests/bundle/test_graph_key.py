"""Graph kernels' canonical form and keys: equal structure gives equal words, and any difference gives different words."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelgen.bundle.key import ABSENT, KernelIndex, fnv1a, key, key_hash
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import MAX_ID, GraphSpec, Spec, UnnumberedNode, UnnumberedTensor

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "bundle-graph-keys.json").read_text())
T = TensorDesc.parse


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["about"])
def test_golden_keys_follow_from_their_specs(vector: dict[str, Any]) -> None:
    spec = Spec.from_json(vector["spec"])
    assert isinstance(spec, GraphSpec)
    assert [f"{word:016x}" for word in key(spec)] == vector["key"]
    assert f"{key_hash(key(spec)):016x}" == vector["hash"]
    assert spec.id == vector["id"] and len(spec.id.encode()) <= MAX_ID
    assert GraphSpec.from_json(json.loads(spec.json)) == spec
    assert KernelIndex.build([spec]).find(key(spec)) == 0


def test_layout() -> None:
    f32 = "(2,3,1,1)/f32"
    spec = GraphSpec.make(
        [
            UnnumberedNode("sqr", (UnnumberedTensor("x", 512, T(f32)),), T(f32), {}, escapes=True),
            UnnumberedNode(
                "add", (UnnumberedTensor("y", 0, T("(2,1,1,1)/f32")), UnnumberedTensor(0, 0, T(f32))), T(f32), {}
            ),
            UnnumberedNode(
                "soft_max",
                (UnnumberedTensor(1, 8, T("(2,2,1,1)/f32")), None, UnnumberedTensor("x", 480, T("(1,1,1,1)/f32"))),
                T("(2,2,1,1)/f32"),
                {"scale": 1.0},
                escapes=True,
            ),
            UnnumberedNode("relu", (UnnumberedTensor("z", 4, T(f32)),), T(f32), {}, UnnumberedTensor("z", 4, T(f32))),
        ]
    )
    six = (0, 2, 3, 1, 1, 4, 8, 24, 24)
    assert key(spec) == (
        *(fnv1a(b"graph"), 4 | 3 << 32),
        *(56, 8, 24),
        *(fnv1a(b"sqr"), 1 | 1 << 32, 0, 0, *six, 2 * 0 + 1, 32, *six, *[0] * 8),
        *(fnv1a(b"add"), 2, 0, 0, *six),
        *(2 * 1 + 1, 0, 0, 2, 1, 1, 1, 4, 8, 8, 8, 2 * 0, 0, *six, *[0] * 8),
        *(fnv1a(b"soft_max"), 3 | 1 << 32, 0, 0, 0, 2, 2, 1, 1, 4, 8, 16, 16),
        *(2 * 1, 8, 0, 2, 2, 1, 1, 4, 8, 16, 16, ABSENT, 2 * 0 + 1, 0, 0, 1, 1, 1, 1, 4, 4, 4, 4),
        *(0x3F800000, *[0] * 7),
        *(fnv1a(b"relu"), 1, 2 * 2 + 1 + 1, 0, *six, 2 * 2 + 1, 0, *six, 6, *[0] * 7),
    )


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


def _mutations(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields (path, other value) for every field of a spec's JSON that is not a list or a map."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _mutations(item, (*path, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _mutations(item, (*path, i))
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int | float):
        yield path, value + 1
    elif isinstance(value, str) and path[-1] == "op":
        yield path, "my_other"  # a custom op takes any inputs and parameters
    elif isinstance(value, str):
        name, space, tensor = value.partition(" ")
        if not space:
            name, tensor = "", value
        for other in _other_tensors(tensor):
            yield path, f"{name} {other}".lstrip()
        for other in _other_places(name):
            yield path, f"{other} {tensor}"


def _other_tensors(text: str) -> Iterator[TensorDesc]:
    t = T(text)
    for axis in range(4):
        ne = [n + (n > 1 and i == axis) for i, n in enumerate(t.ne)]
        nb = [b + 64 * (i == axis and t.ne[i] > 1) for i, b in enumerate(t.nb)]
        for change in (
            lambda ne=ne: TensorDesc.make(ne, t.dtype, t.nb),
            lambda nb=nb: TensorDesc.make(t.ne, t.dtype, nb),
        ):
            try:
                made = change()
            except ValueError:
                continue
            if made != t:
                yield made
    for dtype in ("f16", "f32", "i32"):
        if dtype != t.dtype:
            yield TensorDesc.make(t.ne, dtype)


def _other_places(name: str) -> Iterator[str]:
    if name:
        base, _, offset = name.partition("+")
        yield f"{base}+{int(offset or 0) + 64}"
        yield f"{base[0]}{int(base[1:]) + 1}"
        yield f"{'n' if base[0] == 's' else 's'}{base[1:]}"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["about"])
def test_every_field_counts(vector: dict[str, Any]) -> None:
    """A field that can't change alone is refused; in both cases the spec does not find this kernel."""
    original = GraphSpec.from_json(vector["spec"])
    index = KernelIndex.build([original])
    fields = set()
    for path, value in _mutations(vector["spec"]):
        mutant = copy.deepcopy(vector["spec"])
        at = mutant
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value
        try:
            spec = GraphSpec.from_json(mutant)
        except ValueError:
            continue
        fields.add(path[2])
        assert index.find(key(spec)) is None, (path, value)
        assert spec.id != original.id, (path, value)
    assert fields >= {"op", "inputs", "output"}


def test_every_word_of_a_key_counts() -> None:
    for vector in VECTORS:
        words = [int(word, 16) for word in vector["key"]]
        index = KernelIndex.build([GraphSpec.from_json(vector["spec"])])
        for i in range(len(words)):
            assert index.find((*words[:i], words[i] ^ 1, *words[i + 1 :])) is None


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
