"""The index of a bundle: every kernel's key, and an open-addressing hash table of the keys.

The writer builds it once; readers use it unchanged. The layout is in docs/reference/bundle-format.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kernelgen.bundle.key import key, key_hash
from kernelgen.errors import KernelgenError
from kernelgen.spec.kernel import Spec

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
