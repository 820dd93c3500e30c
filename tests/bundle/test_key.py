"""Keys, their hash, and the hash table."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from kernelgen.bundle import key as key_module
from kernelgen.bundle.key import KernelIndex, fnv1a, key, key_hash
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import GraphSpec, KernelSpec, Spec, UnnumberedNode, UnnumberedTensor

ROWS = [
    row
    for name in ("bundle-keys.json", "bundle-graph-keys.json")
    for row in json.loads((Path(__file__).parents[1] / "data" / name).read_text())
]
"""Keys for which Python and C++ must agree; tests/regenerate compares them with Python's."""


def test_golden_keys_are_all_different() -> None:
    assert len({tuple(row["key"]) for row in ROWS}) == len({row["hash"] for row in ROWS}) == len(ROWS)
    index = KernelIndex.build(Spec.from_json(row["spec"]) for row in ROWS)
    assert all(index.ids[index.find(tuple(int(w, 16) for w in row["key"]))] == row["id"] for row in ROWS)


def test_fnv1a_is_the_published_one() -> None:
    assert fnv1a(b"") == 0xCBF29CE484222325
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a(b"foobar") == 0x85944171F73967E8


def test_hash_as_documented() -> None:
    assert key_hash([]) == 0x9E3779B97F4A7C15
    mixed = (0x9E3779B97F4A7C15 ^ 5) * 0xFF51AFD7ED558CCD % 2**64
    assert key_hash([5]) == mixed ^ mixed >> 32


@pytest.mark.parametrize("count", [1, 4, 5, 1000])
def test_index_finds_every_kernel_and_no_other(count: int) -> None:
    def spec(n: int) -> KernelSpec:
        tensor = TensorDesc.make((n, 1, 1, 1), "f32")
        return KernelSpec.make("relu", [tensor], tensor)

    specs = [spec(n) for n in range(1, count + 1)]
    shuffled = random.Random(count).sample(specs, count)
    index = KernelIndex.build(shuffled)
    assert index == KernelIndex.build(specs), "the order in which kernels are given does not matter"
    assert list(index.ids) == sorted(s.id for s in specs)
    size = len(index.slots)
    assert size >= 8 and size & (size - 1) == 0 and 2 * count <= size < max(9, 4 * count)
    for s in specs:
        number = index.find(key(s))
        assert number is not None and index.ids[number] == s.id
    assert index.find(key(spec(count + 1))) is None
    assert index.find(()) is None


def test_index_is_not_empty_and_not_ambiguous() -> None:
    tensor = TensorDesc.parse("(4,1,1,1)/f32")
    with pytest.raises(KernelgenError, match="at least one kernel"):
        KernelIndex.build([])
    spec = KernelSpec.make("relu", [tensor], tensor)
    with pytest.raises(KernelgenError, match="a lookup cannot distinguish them"):
        KernelIndex.build([spec, spec])
    # Parameters that ggml keeps in the same word.
    with pytest.raises(KernelgenError, match="a lookup cannot distinguish them"):
        KernelIndex.build(KernelSpec("scale", (tensor,), tensor, params) for params in ((("s", 0.0),), (("b", 0.0),)))


@pytest.mark.parametrize(("dtype", "layout"), [("q8_0", "planes"), ("f16", "transposed")])
def test_a_kernel_for_another_layout_is_another_kernel(dtype: str, layout: str) -> None:
    """The layout is in the id, in the key and in plans; a lookup for one layout does not find a kernel for the other."""
    f32, result = TensorDesc.parse("(64,3,1,1)/f32"), TensorDesc.parse("(8,3,1,1)/f32")
    plain, rearranged = (
        KernelSpec.make("mul_mat", [TensorDesc.parse(f"(64,8,1,1)/{t}"), f32], result)
        for t in (dtype, f"{dtype}:{layout}")
    )
    assert plain.id != rearranged.id
    assert KernelSpec.from_json(rearranged.to_json()) == rearranged != plain
    for there, other in ((plain, rearranged), (rearranged, plain)):
        index = KernelIndex.build([there])
        assert index.find(key(there)) == 0
        assert index.find(key(other)) is None


def test_groups_with_weights_in_other_layouts_are_other_kernels() -> None:
    def group(dtype: str) -> GraphSpec:
        weight, x = (
            UnnumberedTensor("w", 0, TensorDesc.parse(f"(64,8,1,1)/{dtype}")),
            UnnumberedTensor("x", 0, TensorDesc.parse("(64,3,1,1)/f32")),
        )
        return GraphSpec.make(
            [UnnumberedNode("mul_mat", (weight, x), TensorDesc.parse("(8,3,1,1)/f32"), {}, None, True)]
        )

    plain, rearranged = group("q8_0"), group("q8_0:planes")
    assert plain.id != rearranged.id
    assert GraphSpec.from_json(rearranged.to_json()) == rearranged
    assert KernelIndex.build([plain]).find(key(rearranged)) is None


def test_so_many_keys_of_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each such kernel would make searches longer; the library refuses such a bundle."""
    monkeypatch.setattr(key_module, "key_hash", lambda words: 7)
    assert set(key_module.make_slots(range(40), range(41))) == set(range(41))
    with pytest.raises(KernelgenError, match="more equal hashes"):
        key_module.make_slots(range(400), range(401))
