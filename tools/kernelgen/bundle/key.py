"""The lookup key of a kernel: the properties that a backend reads from a graph node, as 64-bit words, and its hash.

The layout is in docs/reference/bundle-keys.md. The C++ library computes the same words from a `ggml_tensor`. Tests compare both
with `tests/data/bundle-keys.json` and `tests/data/bundle-graph-keys.json`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kernelgen.ggml import ops as ggml_ops
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.ggml.types import TYPES
from kernelgen.ggml.weight_layouts import LAYOUTS
from kernelgen.spec.canonical import canonical_json
from kernelgen.spec.kernel import GraphNode, GraphSpec, KernelSpec, Spec, TensorPlace, params_to_json

MASK = 2**64 - 1
ABSENT = MASK
"""The word for an absent input."""
LAYOUT_SHIFT = 16
"""The first bit of a tensor's layout in the word of its type."""


def fnv1a(data: bytes) -> int:
    """Returns the 64-bit FNV-1a hash of `data`."""
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 & MASK
    return h


def key(spec: Spec) -> tuple[int, ...]:
    """Returns the key words of a kernel, each in 0 … 2^64 - 1."""
    if isinstance(spec, GraphSpec):
        return _graph(spec)
    if not isinstance(spec, KernelSpec):
        name = spec.op.encode()
        return fnv1a(b"source"), len(name), fnv1a(name)
    words = [fnv1a(spec.op.encode()), len(spec.inputs) | (0 if spec.alias is None else spec.alias + 1) << 32]
    for tensor in spec.inputs:
        words += [ABSENT] if tensor is None else tensor_words(tensor)
    return (*words, *tensor_words(spec.output), *_params(spec))


def _graph(spec: GraphSpec) -> tuple[int, ...]:
    words = [fnv1a(spec.op.encode()), len(spec.nodes) | len(spec.slots) << 32, *spec.slots]
    for node in spec.nodes:
        words += [fnv1a(node.op.encode()), len(node.inputs) | node.escapes << 32]
        words += [0, 0] if node.place is None else [_memory(node.place) + 1, node.place.offset]
        words += tensor_words(node.output)
        for operand in node.inputs:
            if operand is None:
                words += [ABSENT]
            else:
                words += [_memory(operand.place), operand.place.offset, *tensor_words(operand.tensor)]
        words += _params(node)
    return tuple(words)


def _memory(place: TensorPlace) -> int:
    return 2 * place.index + place.slot


def key_hash(words: Iterable[int]) -> int:
    """Returns the hash of a key, 64 bits; its low bits choose the slot."""
    h = 0x9E3779B97F4A7C15
    for word in words:
        h = (h ^ word) * 0xFF51AFD7ED558CCD & MASK
        h ^= h >> 32
    return h


def tensor_words(tensor: TensorDesc) -> list[int]:
    """Returns a tensor's words: its type and layout, then elements and strides in bytes of its four dimensions."""
    layout = LAYOUTS[tensor.layout] if tensor.layout else 0
    return [TYPES[tensor.dtype].number | layout << LAYOUT_SHIFT, *tensor.ne, *tensor.nb]


def _params(spec: KernelSpec | GraphNode) -> list[int]:
    if ggml_ops.op(spec.op).custom:
        # ggml has no op_params for it: a digest of the parameters replaces them.
        digest = hashlib.sha512(canonical_json(params_to_json(spec.params)).encode()).digest()
        return [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 64, 8)]
    words = [word & 0xFFFFFFFF for word in spec.op_params]
    return [words[i] | words[i + 1] << 32 for i in range(0, ggml_ops.N_WORDS, 2)]
