"""An entry's name depends on the NEFF's inputs alone; a damaged entry is noticed."""

from __future__ import annotations

import hashlib

import pytest

from kernelgen.cache import EntryHead, NeffKey, entry
from kernelgen.cache.entry import DamagedEntry
from kernelgen.compilers.settings import CompileConfig

TRN1 = CompileConfig.make("trn1").flags()
KEY = NeffKey.make(b"hlo", "neuronx-cc 2", TRN1)
NAME = KEY.name
NEFF = b"any bytes"
HEAD = EntryHead.make(KEY, "sqr-1", NEFF, 431)
FILES = {f"{NAME}.json": HEAD.encode(), f"{NAME}.neff": NEFF}


def read(files: dict[str, bytes], name: str = NAME) -> tuple[EntryHead, bytes] | None:
    return entry.read(files.get, name)


def test_name_depends_on_hlo_compiler_flags_and_target() -> None:
    others = [
        NeffKey.make(b"HLO", "neuronx-cc 2", TRN1),
        NeffKey.make(b"hlo", "neuronx-cc 3", TRN1),
        NeffKey.make(b"hlo", "neuronx-cc 2", CompileConfig.make("inf2").flags()),
        NeffKey.make(b"hlo", "neuronx-cc 2", CompileConfig.make("trn1", optlevel=1).flags()),
        NeffKey.make(b"hlo", "neuronx-cc 2", CompileConfig.make("trn1", extra_flags=("--x",)).flags()),
    ]
    assert len({NAME, *(key.name for key in others)}) == 6
    assert KEY.hlo_sha256 == hashlib.sha256(b"hlo").hexdigest()
    # If this digest changes, no existing cache can be used: raise FORMAT with it.
    assert NAME == "b28271c14f2820663e482fe550a6634a823e654a3c264dd06ca6932d704e04d3"


def test_key_with_a_target_other_than_its_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="its target is not the flags'"):
        NeffKey.from_json(KEY.to_json() | {"target": "trn2"})


def test_entry_reads_back() -> None:
    assert read(FILES) == (HEAD, NEFF)
    assert read({}) is None
    # A writer that was killed between the two files.
    assert read({f"{NAME}.neff": NEFF}) is None


def replaced(old: bytes, new: bytes) -> dict[str, bytes]:
    text = FILES[f"{NAME}.json"]
    assert old in text
    return {f"{NAME}.json": text.replace(old, new)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({f"{NAME}.neff": NEFF[:-1]}, "does not have the digest"),
        ({f"{NAME}.neff": NEFF + b"\0"}, "does not have the digest"),
        ({f"{NAME}.neff": b"ANY bytes"}, "does not have the digest"),
        ({f"{NAME}.json": EntryHead.make(KEY, "k", b"of another writer").encode()}, "does not have the digest"),
        ({f"{NAME}.json": b""}, "is damaged: JSONDecodeError"),
        ({f"{NAME}.json": HEAD.encode()[:-3]}, "is damaged: JSONDecodeError"),
        (replaced(b"trn1", b"trn2"), "is that of the entry"),
        (replaced(b"neuronx-cc 2", b"neuronx-cc 3"), "is that of the entry"),
        (replaced(b'"size": 9', b'"size": 8'), "does not have the digest"),
        (replaced(b"431", b"1e400"), "is damaged: OverflowError"),
        (replaced(b"431", b'"soon"'), "is damaged: ValueError"),
    ],
)
def test_damage_is_noticed(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(DamagedEntry, match=message):
        read(FILES | files)


def test_entry_without_its_neff_is_damaged() -> None:
    with pytest.raises(DamagedEntry, match="is missing"):
        read({f"{NAME}.json": HEAD.encode()})


def test_only_files_of_entries_have_a_name() -> None:
    assert entry.name_of(f"{NAME}.json") == entry.name_of(f"{NAME}.neff") == NAME
    for file in (NAME, f".{NAME}.neff", f"../{NAME}.neff", f"{NAME.upper()}.neff", f"{NAME}.neff\n", "x.neff", ""):
        assert entry.name_of(file) is None
