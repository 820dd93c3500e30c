"""The index of a bundle: every kernel's key, and an open-addressing table over the keys' hashes.

It is built once, when the bundle is written; readers use it as it is. The layout is docs/bundle-format.md's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernelgen.bundle.key import key, key_hash
from kernelgen.errors import KernelgenError
from kernelgen.graph_kernel import Spec

MIN_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Index:
    """The tables of a bundle.

    Attributes:
        ids: kernel ids, ascending; a kernel's position here is its number.
        words: the keys of all kernels, one after another.
        offsets: where each kernel's key starts in `words`, and the end of the last: one more than there are kernels.
        slots: the hash table: kernel number + 1, or 0; a power of two long.
    """

    ids: tuple[str, ...]
    words: tuple[int, ...]
    offsets: tuple[int, ...]
    slots: tuple[int, ...]

    @staticmethod
    def build(specs: Iterable[Spec]) -> Index:
        """Returns the index of some kernels, given in any order.

        Raises:
            KernelgenError: there are none, or two of them have the same key or the same id.
        """
        ordered = sorted(specs, key=lambda spec: spec.id.encode())
        if not ordered:
            raise KernelgenError("a bundle needs at least one kernel")
        size = MIN_SLOTS
        while size < 2 * len(ordered):
            size *= 2
        words: list[int] = []
        offsets = [0]
        slots = [0] * size
        seen: dict[tuple[int, ...], str] = {}
        for number, spec in enumerate(ordered):
            k = key(spec)
            other = seen.setdefault(k, spec.id)
            if number and (other is not spec.id or ordered[number - 1].id == spec.id):
                raise KernelgenError(
                    f"kernels {other} and {spec.id} cannot be told apart by a lookup: their keys are equal"
                )
            slot = key_hash(k) & (size - 1)
            while slots[slot]:
                slot = (slot + 1) & (size - 1)
            slots[slot] = number + 1
            words += k
            offsets.append(len(words))
        return Index(tuple(spec.id for spec in ordered), tuple(words), tuple(offsets), tuple(slots))

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
