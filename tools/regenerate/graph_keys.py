"""Generates tests/data/bundle-graph-keys.json: groups of nodes, with the key words and hashes that Python and C++ must agree on.

The file defines the format: a change of it changes every bundle with graph kernels, and needs a new format version.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from typing import Any

from kernelgen.bundle.key import key, key_hash
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.spec.kernel import GraphSpec, UnnumberedNode, UnnumberedTensor

_T = TensorDesc.parse


def _at(root: Hashable, tensor: str, offset: int = 0) -> UnnumberedTensor:
    return UnnumberedTensor(root, offset, _T(tensor))


def _node(
    op: str,
    inputs: Iterable[UnnumberedTensor | None],
    output: str,
    into: UnnumberedTensor | None = None,
    escapes: bool = False,
    **params: Any,
) -> UnnumberedNode:
    return UnnumberedNode(op, tuple(inputs), _T(output), params, into, escapes)


def _norm_mul_mul_mat() -> list[UnnumberedNode]:
    x, y = "(64,4,1,1)/f32", "(96,4,1,1)/f32"
    return [
        _node("rms_norm", [_at("x", x)], x, eps=1e-5),
        _node("mul", [_at(0, x), _at("w", "(64,1,1,1)/f32")], x),
        _node("mul_mat", [_at("a", "(64,96,1,1)/f16"), _at(1, x)], y, escapes=True),
    ]


def _cache_and_attention() -> list[UnnumberedNode]:
    """Returns one token's nodes: K and V are written into rows of their caches; attention then reads the first 256 rows."""
    cache = _at("k", "(64,512,1,1)/f16")
    values = _at("v", "(64,512,1,1)/f16")
    row, q = "(64,1,1,1)/f32", "(32,1,4,1)/f32/(4,512,128,512)"
    view = "(32,256,2,1)/f16/(2,128,64,32768)"
    return [
        _node("rope", [_at("q", "(32,4,1,1)/f32"), _at("pos", "(1,1,1,1)/i32")], "(32,4,1,1)/f32", n_dims=32),
        _node("set_rows", [_at("k_new", row), _at("at", "(1,1,1,1)/i64"), cache], "(64,512,1,1)/f16", cache),
        _node("set_rows", [_at("v_new", row), _at("at", "(1,1,1,1)/i64"), values], "(64,512,1,1)/f16", values),
        _node(
            "flash_attn_ext",
            [_at(0, q), _at("k", view), _at("v", view), _at("mask", "(256,1,1,1)/f16")],
            "(32,4,1,1)/f32",
            escapes=True,
            scale=0.17677669,
        ),
    ]


def _in_place() -> list[UnnumberedNode]:
    """Returns a sum into the memory of an earlier node, which escapes, and a sum into a slot."""
    x = "(16,3,1,1)/f32"
    return [
        _node("sqr", [_at("x", x)], x, escapes=True),
        _node("add", [_at(0, x), _at("y", "(16,1,1,1)/f32")], x, _at(0, x)),
        _node("scale", [_at("z", x)], x, _at("z", x), s=0.5, b=-1.0),
        _node("mul", [_at("z", x), _at(0, x)], x, escapes=True),
    ]


def _views_with_offsets() -> list[UnnumberedNode]:
    """Returns Q, K and V of one matrix product, and a slot that no node uses from the root's first byte."""
    rows, part = "(192,5,1,1)/f32", "(64,5,1,1)/f32/(4,768,3840,3840)"
    out = _at("out", "(64,5,1,1)/f16", 128)
    return [
        _node("mul_mat", [_at("w", "(32,192,1,1)/q8_0"), _at("x", "(32,5,1,1)/f32")], rows),
        _node("cont", [_at(0, part, 256)], "(64,5,1,1)/f32", escapes=True),
        _node("add", [_at(0, part), _at(0, part, 512)], "(64,5,1,1)/f32", escapes=True),
        _node("get_rows", [_at("table", "(64,9,1,1)/f32", 4096), _at("rows", "(5,1,1,1)/i32", 40)], "(64,5,1,1)/f32"),
        _node("add", [_at(3, "(64,5,1,1)/f32"), _at("table", "(64,1,1,1)/f32", 2048)], "(64,5,1,1)/f32"),
        _node("cpy", [_at(4, "(64,5,1,1)/f32"), out], "(64,5,1,1)/f16", out),
    ]


def _escaping_middle() -> list[UnnumberedNode]:
    """Returns two results, one of which other nodes of the group read, and absent inputs."""
    x = "(128,6,2,1)/f32"
    return [
        _node("soft_max", [_at("x", x), None, _at("sinks", "(2,1,1,1)/f32")], x, escapes=True, scale=0.125),
        _node("cpy", [_at(0, x), _at(1, "(128,6,2,1)/f16")], "(128,6,2,1)/f16"),
        _node("cont", [_at(1, "(6,128,2,1)/f16/(256,2,1536,3072)")], "(6,128,2,1)/f16", escapes=True),
        _node("silu", [_at(0, x)], x, escapes=True),
    ]


def _one_node() -> list[UnnumberedNode]:
    return [_node("relu", [_at("x", "(64,4,1,1)/f32")], "(64,4,1,1)/f32", escapes=True)]


def _custom_op() -> list[UnnumberedNode]:
    x = "(64,4,1,1)/f32"
    return [
        _node("relu", [_at("x", x)], x),
        _node("my_scale", [_at(0, x)], x, escapes=True, factor=0.5, steps=3, wrap=True),
    ]


GROUPS = {
    "norm, mul, mul_mat": _norm_mul_mul_mat,
    "cache and attention": _cache_and_attention,
    "in place": _in_place,
    "views with offsets": _views_with_offsets,
    "escaping middle": _escaping_middle,
    "one node": _one_node,
    "custom op": _custom_op,
}
"""One group for each possible error in a key, by its subject."""


def vectors() -> list[dict[str, Any]]:
    """Returns the file's content: about, id, spec, key (16 hexadecimal digits a word) and hash."""
    found = []
    for about, nodes in GROUPS.items():
        spec = GraphSpec.make(nodes())
        words = key(spec)
        found.append(
            {
                "about": about,
                "id": spec.id,
                "spec": spec.to_json(),
                "key": [f"{word:016x}" for word in words],
                "hash": f"{key_hash(words):016x}",
            }
        )
    return found


def render() -> str:
    """Returns the text of bundle-graph-keys.json."""
    return "[\n" + ",\n".join(json.dumps(v) for v in vectors()) + "\n]\n"
