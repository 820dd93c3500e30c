"""An entry is used as a whole or not at all: a change of any byte is noticed."""

from __future__ import annotations

import random

import pytest

from kernelgen.cache import NeffKey, entry
from kernelgen.cache.entry import DamagedEntry

Neffs = list[tuple[NeffKey, bytes]]


def test_an_entry_gives_back_what_it_was_made_of(neffs: Neffs) -> None:
    for key, neff in neffs:
        data = entry.pack(key, "sqr-1", neff)
        head, back = entry.unpack(data, key.name)
        assert (head.kernel, head.key, head.size, back) == ("sqr-1", key, len(neff), neff)
        assert entry.pack(key, "sqr-1", neff) == data
        assert entry.read_head(data[: entry.MAX_HEAD], key.name)[0] == head


def test_its_first_lines_are_for_people(neffs: Neffs) -> None:
    key, neff = neffs[0]
    first, second, _ = entry.pack(key, "sqr-1", neff).split(b"\n", 2)
    assert first.startswith(b"kernelgen-neff-cache 1 ")
    for part in (b'"kernel":"sqr-1"', b'"compiler":"simulator 1"', b'"target":"trn1"', key.hlo_sha256.encode()):
        assert part in second


def test_every_flipped_bit_is_noticed(neffs: Neffs) -> None:
    key, neff = neffs[0]
    data = entry.pack(key, "sqr-1", neff)
    chance = random.Random(1)
    head = data.index(b"\n", data.index(b"\n") + 1)
    places = [*range(head + 2), *(chance.randrange(len(data)) for _ in range(500))]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << chance.randrange(8)
        with pytest.raises(DamagedEntry):
            entry.unpack(bytes(damaged), key.name)


def test_every_truncation_and_every_addition_is_noticed(neffs: Neffs) -> None:
    key, neff = neffs[0]
    data = entry.pack(key, "sqr-1", neff)
    for length in [*range(600), *range(600, len(data), 97), len(data) - 1]:
        with pytest.raises(DamagedEntry):
            entry.unpack(data[:length], key.name)
    with pytest.raises(DamagedEntry):
        entry.unpack(data + b"\0", key.name)


def test_an_entry_under_another_name_is_damaged(neffs: Neffs) -> None:
    (one, neff), (other, _) = neffs[:2]
    with pytest.raises(DamagedEntry, match="it is the entry"):
        entry.unpack(entry.pack(one, "sqr-1", neff), other.name)


def test_a_file_with_the_right_digest_that_is_not_a_neff_is_not_used(neffs: Neffs) -> None:
    key, neff = neffs[0]
    for wrong in (b"", b"not a NEFF", neff[:-3]):
        with pytest.raises(DamagedEntry):
            entry.unpack(entry.pack(key, "sqr-1", wrong), key.name)


def test_a_simulated_neff_of_another_hlo_is_not_used(neffs: Neffs) -> None:
    (one, _), (_, neff) = neffs[:2]
    with pytest.raises(DamagedEntry, match="its NEFF was compiled from another HLO"):
        entry.unpack(entry.pack(one, "sqr-1", neff), one.name)


def test_only_names_of_entries_are_names() -> None:
    name = "0123456789abcdef" * 4
    assert entry.name_of(entry.file_name(name)) == name
    for file in (name, f"{name}.neff", f".{name}.entry", f"../{name}.entry", f"{name.upper()}.entry", "x.entry", ""):
        assert entry.name_of(file) is None
