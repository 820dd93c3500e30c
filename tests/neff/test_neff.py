"""NEFF containers: their bytes, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import struct
import tarfile

import pytest

from kernelgen import lowering
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import proto
from kernelgen.neff import container
from kernelgen.spec.kernel import KernelSpec

T = TensorDesc.parse
CONFIG = CompileConfig.make("trn2")
COMPILER = "simulator 1 (jaxlib 1.2.3)"


@pytest.fixture(scope="session")
def module() -> bytes:
    """HLO with an absent input, an i64 input passed as pairs, a quantized one, and a result in place."""
    spec = KernelSpec.make(
        "my_update",
        [T("(8,4,1,1)/bf16"), None, T("(4,1,1,1)/i64"), T("(64,2,1,1)/q8_0")],
        T("(8,4,1,1)/bf16"),
        alias=0,
    )
    return lowering.emit(
        spec, lambda x, absent, rows, blocks: x + rows.sum().astype(x.dtype) + blocks.sum().astype(x.dtype)
    )


@pytest.fixture(scope="session")
def simulated(module: bytes) -> bytes:
    return container.write_simulated(module, CONFIG.flags(), COMPILER)


def real(payload: bytes = b"", *, version: int = 2) -> bytes:
    """Returns a NEFF in the format of a device's compiler."""
    if not payload:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            member = tarfile.TarInfo("sg00/def.json")
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
        payload = gzip.compress(file.getvalue()) if version == 2 else file.getvalue()
    digest = hashlib.md5(payload).digest()
    fields = (
        version,
        1024,
        len(payload),
        2,
        0,
        b"",
        1,
        digest,
        b"u" * 16,
        b"kernel",
        1,
        b"\1",
        5,
        2,
        b"",
    )
    return struct.pack("<5Q128sI32s16s256sI64sQI468s", *fields) + payload


def test_tensors_come_from_the_entry_computation(module: bytes) -> None:
    tensors = container.tensors_of(module)
    assert [(t.name, t.usage, t.dtype, t.shape, t.size, t.alias) for t in tensors] == [
        ("input0.must_alias_input", "in", "bf16", (1, 1, 4, 8), 64, None),
        ("input2", "in", "s32", (1, 1, 1, 4, 2), 32, None),
        ("input3", "in", "u8", (1, 1, 2, 2, 34), 136, None),
        ("output0", "out", "bf16", (1, 1, 4, 8), 64, "input0.must_alias_input"),
    ]


def test_several_results(module: bytes) -> None:
    message = proto.parse(module)
    entry = proto.entry(message)
    root = next(i for i in entry.instructions if i.id == entry.root_id)
    both = entry.instructions.add(id=9999, opcode="tuple", operand_ids=[root.id, root.id])
    both.shape.element_type = 13
    both.shape.tuple_shapes.extend([root.shape, root.shape])
    both.frontend_attributes.map.add(key="neff_output_names", value="a,b")
    entry.root_id = 9999
    message.input_output_alias.entries[0].output_shape_index.append(1)
    tensors = container.tensors_of(proto.serialize(message))
    assert [(t.name, t.alias) for t in tensors if t.usage == "out"] == [("a", None), ("b", "input0.must_alias_input")]


@pytest.mark.parametrize("data", [b"", b"junk", b"\x08\x01", bytes(100)])
def test_bytes_that_are_not_hlo(data: bytes) -> None:
    with pytest.raises(KernelgenError, match=r"k\.hlo\.pb: .*not a serialized HloModuleProto"):
        container.tensors_of(data, source="k.hlo.pb")


def test_round_trip(module: bytes, simulated: bytes) -> None:
    made = container.read_simulated(simulated)
    assert made.hlo == module
    assert made.tensors == container.tensors_of(module)
    assert made.info == {
        "format": 3,
        "compiler": COMPILER,
        "flags": CONFIG.flags(),
        "hlo_sha256": hashlib.sha256(module).hexdigest(),
    }


def test_header_as_documented(module: bytes, simulated: bytes) -> None:
    """By the offsets of docs/reference/simulated-neff.md, not by the code's own struct."""

    def u64(at: int) -> int:
        return int.from_bytes(simulated[at : at + 8], "little")

    assert [u64(at) for at in (0, 8, 16, 24, 32)] == [1, 1024, len(simulated) - 1024, 0x4D4953, 3]
    assert simulated[40:168].rstrip(b"\0") == b"kernelgen-simulator " + COMPILER.encode()
    assert simulated[168:172] == (1).to_bytes(4, "little")
    assert simulated[172:204] == hashlib.sha256(simulated[1024:]).digest()
    assert simulated[220:476].rstrip(b"\0") == b"simulated-" + hashlib.sha256(module).hexdigest()[:32].encode()
    assert simulated[476:544] == (1).to_bytes(4, "little") + b"\1" + bytes(63)
    assert simulated[552:556] == (2).to_bytes(4, "little"), "lnc of trn2"
    assert not any(simulated[556:1024])


def test_payload_is_a_tar_without_time_or_owner(simulated: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(simulated[1024:])) as tar:
        members = tar.getmembers()
    assert [m.name for m in members] == [
        "hlo_module.pb",
        "info.json",
        "kelf-0.json",
        "sg00/def.json",
        "sg00/tensor_map.json",
        "sg01/def.json",
        "sg01/tensor_map.json",
        "simulated.json",
    ]
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_bytes_depend_on_settings_and_compiler(module: bytes, simulated: bytes) -> None:
    assert simulated == container.write_simulated(module, CONFIG.flags(), COMPILER)
    others = [
        container.write_simulated(module, CompileConfig.make("trn1").flags(), COMPILER),
        container.write_simulated(module, CompileConfig.make("trn2", optlevel=1).flags(), COMPILER),
        container.write_simulated(module, CONFIG.flags(), COMPILER + "x"),
    ]
    assert len({simulated, *others}) == 4


def test_a_long_identity_fits_the_header(module: bytes) -> None:
    data = container.write_simulated(module, CONFIG.flags(), "x" * 300)
    assert container.read_header(data).simulated and container.read_simulated(data).info["compiler"] == "x" * 300
    assert data[40 + 127] == 0, "text is ended by a zero"


@pytest.mark.parametrize("version", [1, 2])
def test_real_header(version: int) -> None:
    data = real(version=version)
    header = container.read_header(data)
    assert header == container.read_header(data[:1024], total=len(data))
    assert (header.pkg_version, header.neff_version, header.build_version) == (version, (2, 0), "")
    assert (header.num_tpb, header.name, header.feature_bits, header.lnc_size) == (1, "kernel", 5, 2)
    assert (header.requested_tpb, header.tpb_per_node) == (1, b"\1" + bytes(63))
    assert container.payload_digest(data, header) == "MD5"
    assert container.payload_digest(data + b"x", header) is None
    assert not header.simulated
    assert container.unpack(data) == {"sg00/def.json": b"{}"}


def test_a_real_neff_is_not_for_the_simulator() -> None:
    with pytest.raises(KernelgenError, match=r"x\.neff: a NEFF for a Neuron device, which the simulator"):
        container.read_simulated(real(), source="x.neff")


@pytest.mark.parametrize("which", ["simulated", "real"])
def test_truncated_anywhere(simulated: bytes, which: str) -> None:
    data = simulated if which == "simulated" else real()
    for length in [*range(0, 1025, 41), 1024, *range(1025, len(data), 101), len(data) - 1]:
        with pytest.raises(KernelgenError, match=r"x\.neff: (not a NEFF|NEFF cut off)"):
            container.read_header(data[:length], source="x.neff")
    with pytest.raises(KernelgenError, match="1 bytes after its end"):
        container.read_header(data + b"x")


def test_damage_anywhere_is_noticed(simulated: bytes) -> None:
    """Every byte with a meaning: the sizes, the digest, the whole payload."""
    chance = random.Random(3)
    for at in [*range(0, 40), *range(172, 204), *(chance.randrange(1024, len(simulated)) for _ in range(500))]:
        data = bytearray(simulated)
        data[at] ^= 1 << chance.randrange(8)
        with pytest.raises(KernelgenError):
            container.read_simulated(bytes(data))


def reseal(data: bytes, payload: bytes) -> bytes:
    """Returns `data` with another payload and a right header."""
    header = bytearray(data[:1024])
    header[16:24] = len(payload).to_bytes(8, "little")
    header[172:204] = hashlib.sha256(payload).digest()
    return bytes(header) + payload


def payload_with(**members: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name.replace("_json", ".json").replace("_pb", ".pb"))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize("made", [b"{}", b"[]", b'{"hlo_sha256":"00"}', b"\xff", b"7", b'{"hlo_sha256":7}', b"null"])
def test_bad_members(simulated: bytes, made: bytes) -> None:
    with pytest.raises(KernelgenError, match="damaged simulated NEFF"):
        container.read_simulated(reseal(simulated, payload_with(simulated_json=made, hlo_module_pb=b"x")))


def test_another_version(simulated: bytes) -> None:
    data = bytearray(simulated)
    data[32] = 4
    with pytest.raises(KernelgenError, match="a simulated NEFF of version 4; this kernelgen reads 3"):
        container.read_simulated(bytes(data))
