"""The lookup key of a kernel: the properties that a backend reads from a graph node, as 64-bit words; and a table of keys.

The layout is in docs/reference/bundle-keys.md. The C++ library computes the same words from a `ggml_tensor`. Tests compare both
with `tests/data/bundle-keys.json` and `tests/data/bundle-graph-keys.json`.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelgen.errors import KernelgenError
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


# --- the table --------------------------------------------------------------------------------------------------------

MIN_SLOTS = 8


def make_slots(words: Sequence[int], offsets: Sequence[int]) -> tuple[int, ...]:
    """Returns the hash table of some keys; see `KernelIndex`.

    Raises:
        KernelgenError: too many keys share a hash for chance, so searches would be slow.
    """
    count = len(offsets) - 1
    size = MIN_SLOTS
    while size < 2 * count:
        size *= 2
    slots = [0] * size
    steps = 64 * count + 4096  # occupied slots that all searches may probe, as in the C++ library
    for number, (begin, end) in enumerate(itertools.pairwise(offsets)):
        slot = key_hash(words[begin:end]) & (size - 1)
        while slots[slot]:
            slot = (slot + 1) & (size - 1)
            steps -= 1
        if steps <= 0:
            raise KernelgenError("the keys have more equal hashes than in any bundle that kernelgen writes")
        slots[slot] = number + 1
    return tuple(slots)


@dataclass(frozen=True, slots=True)
class KernelIndex:
    """The tables of a bundle.

    Attributes:
        ids: kernel ids, ascending; a kernel's position here is its number.
        words: the keys of all kernels, concatenated.
        offsets: start of each kernel's key in `words`, and the end of the last; length: number of kernels + 1.
        slots: the hash table: kernel number + 1, or 0 for a free slot; its length is a power of two.
    """

    ids: tuple[str, ...]
    words: tuple[int, ...]
    offsets: tuple[int, ...]
    slots: tuple[int, ...]

    @staticmethod
    def build(specs: Iterable[Spec]) -> KernelIndex:
        """Returns the index of some kernels, given in any order.

        Raises:
            KernelgenError: there are no kernels, two have the same key or the same id, or too many share a hash for chance.
        """
        ordered = sorted(specs, key=lambda spec: spec.id.encode())
        if not ordered:
            raise KernelgenError("a bundle needs at least one kernel")
        words: list[int] = []
        offsets = [0]
        seen: dict[tuple[int, ...], str] = {}
        for number, spec in enumerate(ordered):
            k = key(spec)
            other = seen.setdefault(k, spec.id)
            if number and (other is not spec.id or ordered[number - 1].id == spec.id):
                raise KernelgenError(
                    f"kernels {other} and {spec.id} have equal keys, so a lookup cannot distinguish them"
                )
            words += k
            offsets.append(len(words))
        ids = tuple(spec.id for spec in ordered)
        return KernelIndex(ids, tuple(words), tuple(offsets), make_slots(words, offsets))

    def key_of(self, number: int) -> tuple[int, ...]:
        """Returns the key words of kernel `number`."""
        return self.words[self.offsets[number] : self.offsets[number + 1]]

    def find(self, words: tuple[int, ...]) -> int | None:
        """Returns the number of the kernel with this key, or None; the same search as the C++ library's."""
        mask = len(self.slots) - 1
        slot = key_hash(words) & mask
        while entry := self.slots[slot]:
            if self.key_of(entry - 1) == words:
                return entry - 1
            slot = (slot + 1) & mask
        return None
