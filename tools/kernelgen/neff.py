"""NEFF containers: reading the header of any, writing and unpacking the simulator's.

A NEFF is a header of 1024 bytes and a tar. There is no magic number, so a header is judged by whether its fields make sense.
A *simulated* NEFF has the same shape and holds the HLO itself instead of device code. Two things in its header say so:

* `build_version` begins with `kernelgen-simulator`: the mark that this project's tools and its simulator go by;
* the major `neff_version` is 0x4D4953 (`SIM`), far beyond any that exists, so that a real runtime, which compares it with what it
  supports, refuses the file without a look at the payload.

Everything else, the payload's digest too, is as in a real one. The payload is a plain tar (`pkg_version` 1): gzip's bytes depend
on the zlib that wrote them, and a simulated NEFF must be the same on every machine. docs/simulated-neff.md describes the members.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernelgen.canonical import canonical_json
from kernelgen.compilers.identity import flag
from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto

HEADER_SIZE = 1024

SIMULATED_BUILD = "kernelgen-simulator"
"""What `build_version` of a simulated NEFF begins with."""

SIMULATED_MAJOR = 0x4D4953
"""`neff_version` major of a simulated NEFF."""

SIMULATED_FORMAT = 2
"""Version of a simulated NEFF's payload; the minor `neff_version`."""

HLO_MEMBER = "hlo_module.pb"
NEFF_MEMBER = "neff.json"
INFO_MEMBER = "info.json"

PLAIN, GZIP = 1, 2

# pkg_version, header_size, data_size, neff_version major and minor, build_version, num_tpb, hash, uuid, name,
# requested_tpb_count, tpb_per_node, feature_bits, lnc_size, pad.
_HEADER = struct.Struct("<5Q128sI32s16s256sI64sQI468s")
assert _HEADER.size == HEADER_SIZE

# Bytes per element of the types that a kernel's inputs and outputs can have.
_ELEMENT_SIZES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e5m2", "f8e4m3fn", "f8e4m3", "f8e3m4"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a NEFF's header, by the names in AWS's documentation.

    Attributes:
        pkg_version: 1, a plain tar with its SHA-256 in `hash`; 2, a gzipped one with its MD5 in the first half.
        header_size: bytes before the payload.
        data_size: bytes of the payload.
        neff_version: (major, minor).
        build_version: what built it, text.
        num_tpb: cores it needs.
        hash: digest of the payload, 32 bytes.
        uuid: 16 bytes.
        name: text.
        feature_bits: what the runtime must support.
        lnc_size: physical cores per logical one it was compiled for.
    """

    pkg_version: int
    header_size: int
    data_size: int
    neff_version: tuple[int, int]
    build_version: str
    num_tpb: int
    hash: bytes
    uuid: bytes
    name: str
    feature_bits: int
    lnc_size: int

    @property
    def simulated(self) -> bool:
        """Whether the simulator made it; such a NEFF never loads on a device."""
        return self.build_version.startswith(SIMULATED_BUILD)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output of a kernel as the runtime binds it.

    Attributes:
        name: the name it is bound by.
        usage: `in` or `out`.
        dtype: XLA's name of the element type (`f32`, `bf16`).
        shape: dimensions, slowest first.
        size: bytes.
        alias: of an output, the name of the input whose memory it is written to; else None.
    """

    name: str
    usage: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    alias: str | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {self.dtype}[{','.join(map(str, self.shape))}]"
        return text if self.alias is None else f"{text} in place of {self.alias}"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "usage": self.usage,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "size": self.size,
            "alias": self.alias,
        }


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated NEFF, unpacked.

    Attributes:
        header: its header.
        hlo: the HLO it runs, a serialized HloModuleProto.
        tensors: inputs, then outputs, in order.
        info: what made it (`info.json`): compiler, flags, hlo_sha256, format.
    """

    header: Header
    hlo: bytes
    tensors: tuple[Tensor, ...]
    info: dict[str, Any]


def read_header(data: bytes | memoryview, *, total: int | None = None, source: str = "NEFF") -> Header:
    """Returns the header of a NEFF, its sizes checked.

    Args:
        data: the NEFF, or its first 1024 bytes when `total` is given.
        total: bytes of the whole NEFF.
        source: what errors call it: a file's name.

    Raises:
        KernelgenError: too short, cut off, or not a NEFF's header.
    """
    total = len(data) if total is None else total
    if len(data) < HEADER_SIZE or total < HEADER_SIZE:
        raise KernelgenError(f"{source}: not a NEFF: {total} bytes, less than the header of {HEADER_SIZE}")
    (pkg, size, length, major, minor, build, tpb, digest, uuid, name, _, _, features, lnc, _) = _HEADER.unpack_from(
        data
    )
    if pkg not in (PLAIN, GZIP) or size != HEADER_SIZE:
        raise KernelgenError(
            f"{source}: not a NEFF: package version {pkg} and header size {size}, expected 1 or 2 and {HEADER_SIZE}"
        )
    if size + length > total:
        raise KernelgenError(f"{source}: NEFF cut off: the header says {size + length} bytes, there are {total}")
    if length == 0:
        raise KernelgenError(f"{source}: damaged NEFF: it has no payload")
    if size + length < total:
        raise KernelgenError(f"{source}: damaged NEFF: {total - size - length} bytes after its end at {size + length}")
    return Header(pkg, size, length, (major, minor), _text(build), tpb, digest, uuid, _text(name), features, lnc)


def read_header_of(path: str | Path) -> Header:
    """Returns the header of a NEFF file without reading its payload.

    Raises:
        KernelgenError: not a NEFF, or cut off.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(HEADER_SIZE)
        return read_header(data, total=file.seek(0, 2), source=str(path))


def tensors_of(hlo: bytes, *, source: str = "HLO") -> tuple[Tensor, ...]:
    """Returns the inputs and then the outputs of a kernel, by the names that its HLO gives them.

    Args:
        hlo: a serialized HloModuleProto. Names are its frontend attributes `neff_input_names` and `neff_output_names`, else
            `input<i>` and `output<i>`.
        source: what errors call it.

    Raises:
        KernelgenError: `hlo` cannot be read, or has an input or output that is no array of a known type.
    """
    try:
        module = proto.parse(hlo)
    except ValueError as error:
        raise KernelgenError(f"{source}: {error}") from None
    entry = proto.entry(module)
    try:
        root = next(i for i in entry.instructions if i.id == entry.root_id)
    except StopIteration:
        raise KernelgenError(f"{source}: damaged HLO: its entry computation has no root") from None
    tuple_root = proto.ELEMENT_TYPES.get(root.shape.element_type) == "tuple"
    results = list(root.shape.tuple_shapes) if tuple_root else [root.shape]
    inputs = [
        _tensor(p.shape, next(iter(_names(p, proto.INPUT_NAMES)), f"input{n}"), "in", None, source)
        for n, p in enumerate(proto.parameters(entry))
    ]
    aliases = {}
    for pair in module.input_output_alias.entries:
        if not 0 <= pair.parameter_number < len(inputs):
            raise KernelgenError(
                f"{source}: damaged HLO: a result shares the memory of parameter {pair.parameter_number}"
            )
        aliases[pair.output_shape_index[0] if pair.output_shape_index else 0] = inputs[pair.parameter_number].name
    names = _names(root, proto.OUTPUT_NAMES)
    outputs = [
        _tensor(shape, names[n] if n < len(names) else f"output{n}", "out", aliases.get(n), source)
        for n, shape in enumerate(results)
    ]
    return (*inputs, *outputs)


def _names(instruction: Any, attribute: str) -> list[str]:
    text = next((a.value for a in instruction.frontend_attributes.map if a.key == attribute), "")
    return text.split(",") if text else []


def _tensor(shape: Any, name: str, usage: str, alias: str | None, source: str) -> Tensor:
    dtype = proto.ELEMENT_TYPES.get(shape.element_type, "")
    if dtype not in _ELEMENT_SIZES:
        raise KernelgenError(
            f"{source}: {name} is {proto.shape_text(shape)}, which no NEFF can have as input or output"
        )
    dims = tuple(int(n) for n in shape.dimensions)
    return Tensor(name, usage, dtype, dims, math.prod(dims) * _ELEMENT_SIZES[dtype], alias)


def check_payload(data: bytes, *, source: str = "NEFF") -> Header:
    """Returns the header of a whole NEFF whose payload has the digest that the header gives.

    Raises:
        KernelgenError: not a NEFF, cut off, or the payload is damaged.
    """
    header = read_header(data, source=source)
    payload = memoryview(data)[HEADER_SIZE:]
    if header.pkg_version == PLAIN:
        good = hashlib.sha256(payload).digest() == header.hash
    else:
        good = hashlib.md5(payload, usedforsecurity=False).digest() == header.hash[:16]
    if not good:
        raise KernelgenError(f"{source}: damaged NEFF: the payload does not have the digest that the header gives")
    return header


def write_simulated(hlo: bytes, flags: Sequence[str], compiler_identity: str) -> bytes:
    """Returns a simulated NEFF. Its bytes depend on the arguments alone.

    Args:
        hlo: a serialized HloModuleProto with named inputs and outputs.
        flags: the arguments that neuronx-cc would be given (`CompileConfig.flags`).
        compiler_identity: the simulator's identity.

    Raises:
        KernelgenError: `hlo` cannot be read.
    """
    digest = hashlib.sha256(hlo).hexdigest()
    info = {
        "format": SIMULATED_FORMAT,
        "simulated": True,
        "compiler": compiler_identity,
        "flags": list(flags),
        "hlo_sha256": digest,
    }
    members = {
        INFO_MEMBER: canonical_json(info).encode(),
        NEFF_MEMBER: canonical_json({"tensors": [t.to_json() for t in tensors_of(hlo)]}).encode(),
        HLO_MEMBER: hlo,
    }
    payload = _tar(members)
    sha = hashlib.sha256(payload).digest()
    header = _HEADER.pack(
        PLAIN,
        HEADER_SIZE,
        len(payload),
        SIMULATED_MAJOR,
        SIMULATED_FORMAT,
        f"{SIMULATED_BUILD} {compiler_identity}".encode()[:127],
        1,
        sha,
        hashlib.sha256(b"uuid" + sha).digest()[:16],
        f"simulated-{digest[:32]}".encode(),
        1,
        bytes(64),
        0,
        int(flag(flags, "--lnc") or 1),
        bytes(468),
    )
    return header + payload


def read_simulated(data: bytes, *, source: str = "NEFF") -> Simulated:
    """Returns what a simulated NEFF holds, after checking all of it.

    Raises:
        KernelgenError: not a NEFF, a real one, damaged, or of another format.
    """
    header = check_payload(data, source=source)
    if not header.simulated:
        raise KernelgenError(
            f"{source}: a NEFF for a Neuron device (built by '{header.build_version}'), which the simulator cannot "
            "run; compile the kernel with the simulator"
        )
    if header.pkg_version != PLAIN or header.neff_version != (SIMULATED_MAJOR, SIMULATED_FORMAT):
        raise KernelgenError(
            f"{source}: a simulated NEFF of version {header.neff_version[1]}; this kernelgen reads {SIMULATED_FORMAT}"
        )
    members = unpack(data, source=source)
    try:
        info = json.loads(members[INFO_MEMBER])
        tensors = tuple(
            Tensor(t["name"], t["usage"], t["dtype"], tuple(t["shape"]), t["size"], t["alias"])
            for t in json.loads(members[NEFF_MEMBER])["tensors"]
        )
        hlo = members[HLO_MEMBER]
        stated = info["hlo_sha256"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise KernelgenError(f"{source}: damaged simulated NEFF: {type(error).__name__}: {error}") from None
    if hashlib.sha256(hlo).hexdigest() != stated:
        raise KernelgenError(
            f"{source}: damaged simulated NEFF: the HLO does not have the digest that {INFO_MEMBER} gives"
        )
    return Simulated(header, hlo, tensors, info)


def members(data: bytes, *, source: str = "NEFF") -> dict[str, int]:
    """Returns name and size of the files in a NEFF's payload, in their order, without unpacking them.

    Raises:
        KernelgenError: not a NEFF, or the payload is no tar.
    """
    return {member.name: member.size for _, member in _walk(data, source)}


def unpack(data: bytes, *, source: str = "NEFF") -> dict[str, bytes]:
    """Returns the files in a NEFF's payload by name. Nothing is written to disk.

    Raises:
        KernelgenError: not a NEFF, the payload is no tar, or a file in it is larger than the whole.
    """
    files = {}
    plain = read_header(data, source=source).pkg_version == PLAIN
    for tar, member in _walk(data, source):
        # A few bytes of tar can claim terabytes (sparse files, sizes in extended headers).
        if member.issparse() or (plain and member.size > len(data)):
            raise KernelgenError(f"{source}: damaged NEFF: {member.name} claims {member.size} bytes")
        try:
            file = tar.extractfile(member)
            assert file is not None  # None is for what is no file
            files[member.name] = file.read()
        except _TAR_ERRORS as error:
            raise KernelgenError(f"{source}: damaged NEFF: {member.name} cannot be read: {error}") from None
    return files


# What tarfile, gzip and zlib raise for bytes that are none of theirs.
_TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error)


def _walk(data: bytes, source: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    header = read_header(data, source=source)
    payload = io.BytesIO(data[HEADER_SIZE:])
    mode: Literal["r:gz", "r:"] = "r:gz" if header.pkg_version == GZIP else "r:"
    try:
        with tarfile.open(fileobj=payload, mode=mode) as tar:
            for member in tar:
                if member.isfile():
                    yield tar, member
    except _TAR_ERRORS as error:
        raise KernelgenError(f"{source}: damaged NEFF: the payload is no tar: {error}") from None


def _tar(members: dict[str, bytes]) -> bytes:
    """Returns a USTAR archive with no time, owner or order of its own."""
    parts = []
    for name, data in sorted(members.items()):
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        entry.mode = 0o644
        parts += [entry.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join(parts) + bytes(2 * tarfile.BLOCKSIZE)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode(errors="replace")
