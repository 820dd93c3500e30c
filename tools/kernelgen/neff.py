"""NEFF containers: reading the header of any, writing and unpacking the simulator's.

A NEFF is a header of 1024 bytes and a tar. There is no magic number, so a header is judged by whether its fields make sense.
A *simulated* NEFF has the same shape and holds the HLO itself instead of device code. Two things in its header say so:

* `build_version` begins with `kernelgen-simulator`: the mark that this project's tools and its simulator go by;
* the major `neff_version` is 0x4D4953 (`SIM`), far beyond any that exists, so that a real runtime, which compares it with what it
  supports, refuses the file without a look at the payload.

Its members are those of a real one that say what it is, but for the device's code. The payload is a plain tar
(`pkg_version` 1): gzip's bytes depend on the zlib that wrote them, and a simulated NEFF must be the same on every machine.
docs/simulated-neff.md describes the members; `neff_description` reads them, of a real NEFF and of a simulated one alike.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernelgen import fileio
from kernelgen.canonical import canonical_json
from kernelgen.compilers.identity import flag
from kernelgen.errors import KernelgenError
from kernelgen.hlo import proto

HEADER_SIZE = 1024

SIMULATED_BUILD = "kernelgen-simulator"
"""What `build_version` of a simulated NEFF begins with."""

SIMULATED_MAJOR = 0x4D4953
"""`neff_version` major of a simulated NEFF."""

SIMULATED_FORMAT = 3
"""Version of a simulated NEFF's payload; the minor `neff_version`."""

INFO_MEMBER = "info.json"
"""Which compiler made a NEFF."""
KELF_MEMBER = "kelf-0.json"
"""The device that a NEFF is for, and the definition of what each physical core runs."""
GRAPH_MEMBER = "neff.json"
"""What is called with which tensors: a graph in TVM's form."""
DEFINITION = "def.json"
"""In the folder of a physical core: its tensors, by name, with their sizes."""
TENSOR_MAP = "tensor_map.json"
"""Beside it: their types and shapes."""

HLO_MEMBER = "hlo_module.pb"
"""Of a simulated NEFF: what it runs."""
SIMULATED_MEMBER = "simulated.json"
"""Of a simulated NEFF: what it was made of."""

DEVICES: Mapping[str, str] = MappingProxyType(
    {"trn1": "sunda", "trn1n": "sunda", "inf2": "sunda", "trn2": "cayman", "trn3": "mariana"}
)
"""What a NEFF calls the device, by neuronx-cc's `--target`. Of trn1n and inf2 no NEFF was seen: their cores are trn1's."""

PLAIN, GZIP = 1, 2

# pkg_version, header_size, data_size, neff_version major and minor, build_version, num_tpb, hash, uuid, name,
# requested_tpb_count, tpb_per_node, feature_bits, lnc_size, pad.
_HEADER = struct.Struct("<5Q128sI32s16s256sI64sQI468s")
assert _HEADER.size == HEADER_SIZE

ELEMENT_SIZES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e5m2", "f8e4m3fn", "f8e4m3", "f8e3m4"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}
"""Bytes per element of the types that a kernel's inputs and outputs can have, by XLA's name."""

# How NEFFs name element types. What has no array of its own on a device is another one of the same size.
_NEFF_TYPES = {
    **{"pred": "uint8", "s8": "int8", "u8": "uint8", "s16": "int16", "u16": "uint16", "s32": "int32", "u32": "uint32"},
    **{"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "s64": "int32", "u64": "uint32"},
    **{"f8e5m2": "float8_e5m2", "f8e4m3fn": "float8_e4m3fn", "f8e4m3": "float8_e4m3", "f8e3m4": "float8_e3m4"},
}
_FORMATS = ("N", "N", "NC", "NHC", "NHWC")


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a NEFF's header, by the names in AWS's documentation.

    Attributes:
        pkg_version: 1, a plain tar; 2, a gzipped one, which is what neuronx-cc writes.
        header_size: bytes before the payload.
        data_size: bytes of the payload.
        neff_version: (major, minor): (2, 0) when there are feature bits, else (1, 0).
        build_version: text; empty in every real NEFF that was seen.
        num_tpb: 1 also with two physical cores.
        hash: 32 bytes. In the first half neuronx-cc writes the payload's MD5 up to version 2.14; what from 2.18 on is not known,
            so a real NEFF does not say whether it is whole. A simulated one has the payload's SHA-256.
        uuid: 16 bytes.
        name: text: the path that the compiler was told to write, as it was given.
        requested_tpb: as `num_tpb`.
        tpb_per_node: 64 bytes, a count for each node.
        feature_bits: what the runtime must support (`neff_description.FEATURES`).
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
    requested_tpb: int
    tpb_per_node: bytes
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
        info: what made it (`simulated.json`): compiler, flags, hlo_sha256, format.
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
    (pkg, size, length, major, minor, build, tpb, digest, uuid, name, requested, per_node, features, lnc, _) = (
        _HEADER.unpack_from(data)
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
    versions, texts = (major, minor), (_text(build), _text(name))
    return Header(
        pkg, size, length, versions, texts[0], tpb, digest, uuid, texts[1], requested, per_node, features, lnc
    )


def read_header_of(path: str | Path) -> Header:
    """Returns the header of a NEFF file without reading its payload.

    Raises:
        KernelgenError: not a NEFF, or cut off.
        OSError: it cannot be read.
    """
    with fileio.open_input(path) as file:
        data = file.read(HEADER_SIZE)
        return read_header(data, total=file.seek(0, 2), source=str(path))


def tensors_of(hlo: bytes, *, source: str = "HLO") -> tuple[Tensor, ...]:
    """Returns the inputs and then the outputs of a kernel, by the names that its HLO gives them.

    Args:
        hlo: a serialized HloModuleProto. Names are its frontend attributes `neff_input_names` and `neff_output_names`, else
            `input<i>` and `output<i>`.
        source: what errors call it.

    Raises:
        KernelgenError: `hlo` cannot be read, or has an input or output that is not an array of a known type.
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
    if dtype not in ELEMENT_SIZES:
        raise KernelgenError(
            f"{source}: {name} is {proto.shape_text(shape)}, which no NEFF can have as input or output"
        )
    dims = tuple(int(n) for n in shape.dimensions)
    return Tensor(name, usage, dtype, dims, math.prod(dims) * ELEMENT_SIZES[dtype], alias)


def payload_digest(data: bytes, header: Header) -> str | None:
    """Returns which digest of the payload the header has: `SHA-256`, `MD5`, or None for what is not a digest that we know."""
    payload = memoryview(data)[HEADER_SIZE:]
    if hashlib.sha256(payload).digest() == header.hash:
        return "SHA-256"
    if hashlib.md5(payload, usedforsecurity=False).digest() == header.hash[:16]:
        return "MD5"
    return None


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
    made = {"format": SIMULATED_FORMAT, "compiler": compiler_identity, "flags": list(flags), "hlo_sha256": digest}
    cores = int(flag(flags, "--lnc") or 1)
    name = f"simulated-{digest[:32]}"
    texts = description_members(tensors_of(hlo), compiler_identity, flag(flags, "--target") or "", cores, name)
    texts[SIMULATED_MEMBER] = made
    payload = _tar({HLO_MEMBER: hlo, **{member: canonical_json(text).encode() for member, text in texts.items()}})
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
        name.encode(),
        1,
        b"\1",
        0,
        cores,
        bytes(468),
    )
    return header + payload


def description_members(
    tensors: Sequence[Tensor], compiler: str, target: str, cores: int, name: str
) -> dict[str, dict[str, Any]]:
    """Returns the members by which a NEFF says what it is, by their names, in the form that neuronx-cc gives them.

    Args:
        tensors: inputs, then outputs.
        compiler: what made it.
        target: neuronx-cc's `--target`.
        cores: physical cores of a logical one.
        name: the NEFF's.
    """
    inputs, outputs = ([t for t in tensors if t.usage == usage] for usage in ("in", "out"))
    graphs = [f"sg{core:02}" for core in range(cores)]
    members: dict[str, dict[str, Any]] = {
        INFO_MEMBER: {
            "tool_version": compiler,
            "kelp_version": "Dynamic",
            "name": name,
            "num_tpb": 1,
            "num_tpb_requested": 1,
            "num_tpb_per_node": [1] + [0] * 63,
        },
        KELF_MEMBER: {
            "graphs": [{"definition": f"{graph}/{DEFINITION}", "name": graph} for graph in graphs],
            "version": "0.5",
            "target": DEVICES.get(target, target),
        },
        GRAPH_MEMBER: _graph(inputs, outputs),
    }
    usages = {"in": "input", "out": "output"}
    for graph in graphs:
        members[f"{graph}/{DEFINITION}"] = {
            "name": "definition",
            "neff_features": [],
            "var": {
                t.name: {"ops": [], "size": t.size, "type": usages[t.usage], "var_id": number}
                for number, t in enumerate(tensors, 1)
            },
            "version": "0.6",
        }
        members[f"{graph}/{TENSOR_MAP}"] = {t.name: _mapped(t, usages[t.usage]) for t in tensors}
    return members


def _graph(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """Returns `neff.json`: a node for each input, and one that calls the device's code with them."""
    tensors = [*inputs, *outputs]
    types, shapes = [_neff_type(t)[0] for t in tensors], [list(_neff_type(t)[1]) for t in tensors]
    call: dict[str, Any] = {
        "op": "tvm_op",
        "name": "sg_coreV10",
        "attrs": {
            "func_name": "__kelf",
            "flatten_data": "0",
            "num_inputs": str(len(inputs)),
            "kelf": KELF_MEMBER,
            "num_outputs": str(len(outputs)),
        },
        "inputs": [[number, 0, 0] for number in range(len(inputs))],
        "output_names": [t.name for t in outputs],
    }
    nodes = [{"op": "null", "name": t.name, "inputs": [], "output_names": [t.name], "is_param": "0"} for t in inputs]
    signature = {
        t.name: {"id": number, "dtype": types[number], "shape": shapes[number]} for number, t in enumerate(inputs)
    }
    return {
        "nodes": [*nodes, call],
        "arg_nodes": list(range(len(inputs))),
        "heads": [[len(inputs), number, 0] for number in range(len(outputs))],
        "attrs": {
            "shape": ["list_shape", shapes],
            "storage_id": ["list_int", list(range(len(tensors)))],
            "dltype": ["list_str", types],
        },
        "node_row_ptr": [*range(len(inputs) + 1), len(tensors)],
        "metadata": {"signatures": {"default": {"inputs": signature, "outputs": {}}}},
    }


def _mapped(tensor: Tensor, kind: str) -> dict[str, Any]:
    """Returns what `tensor_map.json` says of an input or output."""
    dtype, shape = _neff_type(tensor)
    letters = _FORMATS[len(shape)] if len(shape) < len(_FORMATS) else ""
    return {
        "dtype": dtype,
        "is_const": False,
        "kind": kind,
        "layer_name": tensor.name,
        "sim_format": letters,
        "sim_shape": list(shape) or [1],
        "tf_file": f"value_{tensor.name}.npy",
        "tf_format": letters,
        "tf_shape": list(shape),
    }


def _neff_type(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Returns element type and shape as a NEFF has them: 64-bit integers are pairs of 32-bit ones, so that sizes are equal."""
    shape = tensor.shape
    if tensor.dtype in ("s64", "u64"):
        shape = (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return _NEFF_TYPES[tensor.dtype], shape


def read_simulated(data: bytes, *, source: str = "NEFF") -> Simulated:
    """Returns what a simulated NEFF holds, after checking all of it.

    Raises:
        KernelgenError: not a NEFF, a real one, damaged, or of another format.
    """
    header = read_header(data, source=source)
    if not header.simulated:
        raise KernelgenError(
            f"{source}: a NEFF for a Neuron device, which the simulator cannot run; compile the kernel with the simulator"
        )
    if header.pkg_version != PLAIN or header.neff_version != (SIMULATED_MAJOR, SIMULATED_FORMAT):
        raise KernelgenError(
            f"{source}: a simulated NEFF of version {header.neff_version[1]}; this kernelgen reads {SIMULATED_FORMAT}"
        )
    if payload_digest(data, header) != "SHA-256":
        raise KernelgenError(f"{source}: damaged NEFF: the payload does not have the digest that the header gives")
    members = unpack(data, source=source)
    try:
        info = json.loads(members[SIMULATED_MEMBER])
        hlo = members[HLO_MEMBER]
        stated = info["hlo_sha256"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise KernelgenError(f"{source}: damaged simulated NEFF: {type(error).__name__}: {error}") from None
    if hashlib.sha256(hlo).hexdigest() != stated:
        raise KernelgenError(
            f"{source}: damaged simulated NEFF: the HLO does not have the digest that {SIMULATED_MEMBER} gives"
        )
    tensors = tensors_of(hlo, source=source)
    return Simulated(header, hlo, tensors, info)


def members(data: bytes, *, source: str = "NEFF") -> dict[str, int]:
    """Returns name and size of the files in a NEFF's payload, in their order, without unpacking them.

    Raises:
        KernelgenError: not a NEFF, or the payload is not a tar.
    """
    return {member.name: member.size for _, member in _walk(data, source)}


def unpack(
    data: bytes, *, source: str = "NEFF", only: Callable[[str], bool] = lambda name: True, limit: int | None = None
) -> dict[str, bytes]:
    """Returns the files in a NEFF's payload by name. Nothing is written to disk.

    Args:
        data: the NEFF.
        source: what errors call it.
        only: which files to return, by name; the others are passed over.
        limit: bytes that one of them may have.

    Raises:
        KernelgenError: not a NEFF, the payload is not a tar, or a file in it is larger than the whole, or than `limit`.
    """
    files = {}
    plain = not _is_gzip(data)
    for tar, member in _walk(data, source):
        if not only(member.name):
            continue
        # A few bytes of tar can claim terabytes (sparse files, sizes in extended headers).
        too_large = (plain and member.size > len(data)) or (limit is not None and member.size > limit)
        if member.issparse() or too_large:
            raise KernelgenError(f"{source}: damaged NEFF: {member.name} claims {member.size} bytes")
        try:
            file = tar.extractfile(member)
            assert file is not None  # None is for what is not a file
            files[member.name] = file.read()
        except _TAR_ERRORS as error:
            raise KernelgenError(f"{source}: damaged NEFF: {member.name} cannot be read: {error}") from None
    return files


# What tarfile, gzip and zlib raise for bytes that are none of theirs.
_TAR_ERRORS = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, zlib.error)


def _is_gzip(data: bytes) -> bool:
    return data[HEADER_SIZE : HEADER_SIZE + 2] == b"\x1f\x8b"


def _walk(data: bytes, source: str) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Gives the files of the payload, and reads it to its end: a gzip says there whether it is whole."""
    read_header(data, source=source)
    payload: Any = io.BytesIO(data[HEADER_SIZE:])
    if _is_gzip(data):
        payload = gzip.GzipFile(fileobj=payload)
    try:
        with tarfile.open(fileobj=payload, mode="r:") as tar:
            for member in tar:
                if member.isfile():
                    yield tar, member
        while payload.read(1 << 20):
            pass
    except _TAR_ERRORS as error:
        raise KernelgenError(f"{source}: damaged NEFF: the payload is not a tar: {error}") from None


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
