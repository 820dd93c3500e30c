"""The pack: a bundle as one GGUF file, with a tensor of bytes per distinct NEFF and the index in the metadata.

The `gguf` package writes it, so that an independent implementation defines the GGUF. A small reader (gguf_reader.py) reads it: an
embedded bundle needs the arrays' offsets in the file, and every kind of broken file must give a clear error. The layout is in
docs/reference/bundle-format.md.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from kernelgen import fileio
from kernelgen.bundle.contents import FORMAT, BundleOrigin, Contents, StoredFile, is_kernel_id, is_sha256
from kernelgen.bundle.key import KernelIndex, make_slots
from kernelgen.errors import KernelgenError
from kernelgen.ggml.gguf_reader import BOOL, MAGIC, STRING, U32, U64, DamagedGguf, GgufReader, Value
from kernelgen.neff.memory import MAX, NeffMemory

ARCHITECTURE = "neuron-kernels"
ALIGNMENT = 64
MEMORY_KEY = "kernelgen.neff.memory"
_I8_TENSOR = 24


def write(path: str | Path, contents: Contents) -> None:
    """Writes a pack; the file appears by rename. Holds one NEFF at a time in memory, besides the index.

    Raises:
        KernelgenError: a NEFF changed while it was being packed.
        OSError: a file cannot be read or written.
    """
    import gguf
    import numpy as np

    value = gguf.GGUFValueType
    with fileio.replacing(path) as temporary:
        writer = gguf.GGUFWriter(None, ARCHITECTURE)
        writer.add_custom_alignment(ALIGNMENT)
        add = writer.add_key_value  # not add_string and add_array, which omit empty values
        origin, index = contents.origin, contents.index
        add("general.name", origin.id, value.STRING)
        add("kernelgen.format", FORMAT, value.UINT32)
        add("kernelgen.name", origin.name, value.STRING)
        add("kernelgen.target", origin.target, value.STRING)
        add("kernelgen.lnc", origin.lnc, value.UINT32)
        add("kernelgen.simulated", origin.simulated, value.BOOL)
        add("kernelgen.compiler", origin.compiler, value.STRING)
        add("kernelgen.flags", list(origin.flags), value.ARRAY, value.STRING)
        add("kernelgen.version", origin.version, value.STRING)
        add("kernelgen.jax_version", origin.jax_version, value.STRING)
        add("kernelgen.kernel.ids", index.ids, value.ARRAY, value.STRING)
        add("kernelgen.kernel.specs", [spec.json for spec in contents.specs], value.ARRAY, value.STRING)
        add("kernelgen.kernel.hlo_sha256", [hlo.sha256 for hlo in contents.hlos], value.ARRAY, value.STRING)
        add("kernelgen.kernel.neff", contents.kernel_neff, value.ARRAY, value.UINT32)
        if any(contents.notes):
            add("kernelgen.kernel.notes", list(contents.notes), value.ARRAY, value.STRING)
        if contents.special_flags:
            special = {number: "".join(f"{flag}\n" for flag in flags) for number, flags in contents.special_flags}
            texts = [special.get(number, "") for number in range(len(index.ids))]
            add("kernelgen.kernel.flags", texts, value.ARRAY, value.STRING)
        add("kernelgen.neff.sha256", [neff.sha256 for neff in contents.neffs], value.ARRAY, value.STRING)
        if contents.neff_memory:
            figures = [figure for memory in contents.neff_memory for figure in memory.words()]
            add(MEMORY_KEY, figures, value.ARRAY, value.UINT64)
        add("kernelgen.key.words", index.words, value.ARRAY, value.UINT64)
        add("kernelgen.key.offsets", index.offsets, value.ARRAY, value.UINT32)
        add("kernelgen.key.slots", index.slots, value.ARRAY, value.UINT32)
        for neff in contents.neffs:
            writer.add_tensor_info(f"neff.{neff.sha256[:32]}", (neff.size,), np.dtype(np.int8), neff.size)
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        finally:
            writer.close()
        _append_neffs(temporary, contents.neffs)


def _append_neffs(path: Path, neffs: Iterable[StoredFile]) -> None:
    """Appends NEFFs, each padded. On a full disk gguf's `write_tensor_data` gives no reason, or loses bytes without an error."""
    with path.open("ab") as file:
        for neff in neffs:
            data = neff.path.read_bytes()
            if len(data) != neff.size or hashlib.sha256(data).hexdigest() != neff.sha256:
                raise KernelgenError(f"{neff.path} changed while it was being packed")
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(data)
        file.write(bytes(-file.tell() % ALIGNMENT))


@dataclass(frozen=True, slots=True)
class PackedNeff:
    """A NEFF in a pack.

    Attributes:
        sha256: 64 hexadecimal digits, as in the metadata.
        offset: bytes from the start of the tensor data.
        size: bytes.
        memory: memory of its program, if the pack records it.
    """

    sha256: str
    offset: int
    size: int
    memory: NeffMemory | None = None


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack after reading and checking.

    Attributes:
        path: the file.
        origin: its identity and the tools that made it.
        index: the lookup tables.
        specs: each kernel's spec as JSON, by number.
        hlo_sha256: each kernel's HLO digest, by number.
        kernel_neff: each kernel's NEFF, by number.
        neffs: the distinct NEFFs.
        data_offset: bytes from the start of the file to the tensor data.
        size: bytes of the file.
        metadata: every metadata value by name, as stored.
        notes: each kernel's notes as JSON, by number; empty if the pack has no notes.
        special_flags: the compiler's flags, by id, of kernels whose flags differ from the bundle's.
    """

    path: Path
    origin: BundleOrigin
    index: KernelIndex
    specs: tuple[str, ...]
    hlo_sha256: tuple[str, ...]
    kernel_neff: tuple[int, ...]
    neffs: tuple[PackedNeff, ...]
    data_offset: int
    size: int
    metadata: dict[str, Value] = field(repr=False)
    notes: tuple[str, ...] = ()
    special_flags: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def read_neff(self, number: int, limit: int | None = None) -> bytes:
        """Returns the bytes of NEFF `number`, or the first `limit` of them."""
        neff = self.neffs[number]
        with self.path.open("rb") as file:
            file.seek(self.data_offset + neff.offset)
            return file.read(neff.size if limit is None else min(limit, neff.size))


def read(path: str | Path) -> Pack:
    """Returns a pack's index and the offsets of its NEFFs, after checking all but the NEFFs' digests.

    Raises:
        KernelgenError: the file is not a pack, is damaged, or has another format; the message gives the problem and its place.
        OSError: it cannot be read.
    """
    path = Path(path)
    with path.open("rb") as file:
        reader = GgufReader(file)
        if reader.size == 0:
            raise KernelgenError(f"{path}: not a kernel pack: the file is empty")
        try:
            metadata, tensors, data_offset = _header(path, reader)
        except DamagedGguf as problem:
            raise KernelgenError(f"{path}: damaged kernel pack at byte {problem.at}: {problem.what}") from None
        return _check(path, metadata, tensors, data_offset, reader.size)


def _header(path: Path, reader: GgufReader) -> tuple[dict[str, Value], list[tuple[str, int, int]], int]:
    """Returns the metadata, (name, offset, size) of the tensors, and the offset of their data."""
    if reader.take(4, "the magic") != MAGIC:
        raise KernelgenError(f"{path}: not a kernel pack: it does not begin with GGUF")
    version = reader.number("I", "the GGUF version")
    if version != 3:
        raise KernelgenError(f"{path}: not a kernel pack that can be read: GGUF version {version}, expected 3")
    n_tensors, n_values = reader.number("Q", "the tensor count"), reader.number("Q", "the metadata count")
    metadata: dict[str, Value] = {}
    for i in range(n_values):  # an absurd count ends at the end of the file
        name = reader.text(f"the name of metadata value {i}")
        if not name:
            reader.fail(f"the name of metadata value {i} is empty")
        if name in metadata:
            reader.fail(f"metadata value '{name}' is a duplicate")
        metadata[name] = reader.value(f"metadata value '{name}'")
    tensors = []
    for i in range(n_tensors):
        name = reader.text(f"the name of tensor {i}")
        if reader.number("I", name) != 1:
            reader.fail(f"tensor '{name}' does not have one dimension")
        size, kind, offset = reader.number("Q", name), reader.number("I", name), reader.number("Q", name)
        if kind != _I8_TENSOR:
            reader.fail(f"tensor '{name}' is not of type I8")
        tensors.append((name, offset, size))
    alignment = metadata.get("general.alignment")
    if alignment is None or alignment.is_array or alignment.kind != U32 or alignment.value != ALIGNMENT:
        reader.fail(f"general.alignment is not {ALIGNMENT}")
    start = -(-reader.at // ALIGNMENT) * ALIGNMENT
    end = 0
    for name, offset, size in tensors:
        if offset != end:
            reader.fail(f"tensor '{name}' is at {offset}, expected {end}")
        if size == 0 or size > reader.size - start - offset:
            reader.fail(f"tensor '{name}' has {size} bytes, which the file does not hold")
        end = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
    return metadata, tensors, start


@dataclass(frozen=True, slots=True)
class _Metadata:
    """A pack's metadata; an absent value or one of another type is an error."""

    path: Path
    values: dict[str, Value]

    def fail(self, what: str) -> NoReturn:
        raise KernelgenError(f"{self.path}: {what}")

    def damaged(self, what: str) -> NoReturn:
        self.fail(f"damaged kernel pack: {what}")

    def get(self, name: str, kind: int, *, is_array: bool = False) -> Any:
        value = self.values.get(name)
        if value is None:
            self.damaged(f"it lacks {name}")
        if value.kind != kind or value.is_array != is_array:
            self.damaged(f"{name} has the wrong type")
        return value.value

    def array(self, name: str, kind: int, count: int) -> list[Any]:
        """Returns an array of exactly `count` elements."""
        found: list[Any] = self.get(name, kind, is_array=True)
        if len(found) != count:
            self.damaged(f"{name} has {len(found)} elements, expected {count}")
        return found


def _check(
    path: Path, values: dict[str, Value], tensors: list[tuple[str, int, int]], data_offset: int, size: int
) -> Pack:
    metadata = _Metadata(path, values)
    architecture = values.get("general.architecture")
    if architecture is None or architecture.value != ARCHITECTURE:
        metadata.fail(f"a GGUF file, but no kernel pack: general.architecture is not '{ARCHITECTURE}'")
    version = metadata.get("kernelgen.format", U32)
    if version != FORMAT:
        metadata.fail(f"a kernel pack of format {version}; this kernelgen reads format {FORMAT}")
    ids = metadata.get("kernelgen.kernel.ids", STRING, is_array=True)
    n, m = len(ids), len(tensors)
    specs = metadata.array("kernelgen.kernel.specs", STRING, n)
    hlo_sha256 = metadata.array("kernelgen.kernel.hlo_sha256", STRING, n)
    kernel_neff = metadata.array("kernelgen.kernel.neff", U32, n)
    digests = metadata.array("kernelgen.neff.sha256", STRING, m)
    offsets = metadata.array("kernelgen.key.offsets", U32, n + 1)
    notes, flags = [], [""] * n
    if "kernelgen.kernel.notes" in values:
        notes = metadata.array("kernelgen.kernel.notes", STRING, n)
    if "kernelgen.kernel.flags" in values:  # present if some kernels have their own flags
        flags = metadata.array("kernelgen.kernel.flags", STRING, n)
    if not n or not m:
        metadata.damaged("it holds no kernel")
    index = _index(metadata, ids, offsets)
    if max(kernel_neff) >= m:
        metadata.damaged("kernelgen.kernel.neff names a NEFF that does not exist")
    _check_digests(metadata, hlo_sha256, digests, [name for name, _, _ in tensors])
    return Pack(
        path=path,
        origin=_origin(metadata),
        index=index,
        specs=tuple(specs),
        hlo_sha256=tuple(hlo_sha256),
        kernel_neff=tuple(kernel_neff),
        neffs=tuple(
            PackedNeff(d, offset, size, said)
            for d, (_, offset, size), said in zip(digests, tensors, _memory(metadata, m), strict=True)
        ),
        data_offset=data_offset,
        size=size,
        metadata=values,
        notes=tuple(notes),
        special_flags={id: tuple(text.splitlines()) for id, text in zip(ids, flags, strict=True) if text},
    )


def _memory(metadata: _Metadata, count: int) -> list[NeffMemory | None]:
    """Returns the memory of each NEFF's program, where the pack records it."""
    if MEMORY_KEY not in metadata.values:
        return [None] * count
    figures = metadata.array(MEMORY_KEY, U64, 3 * count)
    if max(figures) > MAX:
        metadata.damaged(f"{MEMORY_KEY} has {max(figures)} bytes; expected at most {MAX}")
    return [NeffMemory(*figures[at : at + 3]) for at in range(0, 3 * count, 3)]


def _index(metadata: _Metadata, ids: list[str], offsets: list[int]) -> KernelIndex:
    """Returns the index of a pack's kernels, after checking that ids ascend and the slots match the keys."""
    words = metadata.get("kernelgen.key.words", U64, is_array=True)
    slots = metadata.get("kernelgen.key.slots", U32, is_array=True)
    for number, id in enumerate(ids):
        if not is_kernel_id(id) or (number and ids[number - 1].encode() >= id.encode()):
            metadata.damaged(f"item {number} of kernelgen.kernel.ids, {id!r}, is not an id, or is not ascending")
    if offsets[0] != 0 or offsets[-1] != len(words) or any(a >= b for a, b in itertools.pairwise(offsets)):
        metadata.damaged("kernelgen.key.offsets does not divide kernelgen.key.words")
    try:
        expected = make_slots(words, offsets)
    except KernelgenError as error:
        metadata.damaged(f"kernelgen.key.words: {error.diagnostics[0].message}")
    if tuple(slots) != expected:
        metadata.damaged("kernelgen.key.slots is not the table of the keys")
    return KernelIndex(tuple(ids), tuple(words), tuple(offsets), tuple(slots))


def _check_digests(metadata: _Metadata, hlos: list[str], neffs: list[str], tensors: list[str]) -> None:
    """Checks that digests are well formed, and that exactly one tensor is named after each NEFF's digest."""
    for name, digests in (("kernelgen.kernel.hlo_sha256", hlos), ("kernelgen.neff.sha256", neffs)):
        if not all(map(is_sha256, digests)):
            metadata.damaged(f"{name} is not a list of SHA-256 digests")
    if any(name != f"neff.{digest[:32]}" for name, digest in zip(tensors, neffs, strict=True)):
        metadata.damaged("tensors are not named after kernelgen.neff.sha256")
    if len(set(tensors)) < len(tensors):
        metadata.damaged("a digest of kernelgen.neff.sha256 is a duplicate")


def _origin(metadata: _Metadata) -> BundleOrigin:
    origin = BundleOrigin(
        name=metadata.get("kernelgen.name", STRING),
        target=metadata.get("kernelgen.target", STRING),
        lnc=metadata.get("kernelgen.lnc", U32),
        simulated=metadata.get("kernelgen.simulated", BOOL),
        compiler=metadata.get("kernelgen.compiler", STRING),
        flags=tuple(metadata.get("kernelgen.flags", STRING, is_array=True)),
        version=metadata.get("kernelgen.version", STRING),
        jax_version=metadata.get("kernelgen.jax_version", STRING),
    )
    if problem := origin.problem():
        metadata.damaged(f"kernelgen.{problem}")
    return origin
