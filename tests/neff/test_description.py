"""Descriptions of NEFFs: real ones, written by the double of neuronx-cc, and simulated ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from kernelgen import lowering
from kernelgen.compilers.settings import CompileConfig
from kernelgen.errors import KernelgenError
from kernelgen.ggml.tensor import TensorDesc
from kernelgen.hlo import proto
from kernelgen.neff import container, description
from kernelgen.spec.kernel import KernelSpec
from kernelgen.targets import TARGETS

T = TensorDesc.parse
Make = Callable[..., bytes]


@pytest.fixture(scope="session")
def module() -> bytes:
    """HLO with an i64 input, passed as pairs, a quantized one, and a result in place."""
    spec = KernelSpec.make(
        "my_update",
        [T("(8,4,1,1)/bf16"), T("(4,1,1,1)/i64"), T("(64,2,1,1)/q8_0")],
        T("(8,4,1,1)/bf16"),
        alias=0,
    )
    return lowering.emit(spec, lambda x, rows, blocks: x + rows.sum().astype(x.dtype) + blocks.sum().astype(x.dtype))


def repacked(data: bytes, **members: Any) -> bytes:
    """Returns a NEFF with members replaced, by names in which `_` is `/` and `.`; None removes one."""
    files: dict[str, bytes | None] = dict(container.unpack(data))
    for name, value in members.items():
        known = next(n for n in files if n.replace("/", "_").replace(".", "_").replace("-", "_") == name)
        files[known] = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in files.items():
            if content is not None:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    payload = gzip.compress(file.getvalue())
    payload += bytes(-len(payload) % 10240)
    return data[:16] + len(payload).to_bytes(8, "little") + data[24:1024] + payload


def member(data: bytes, name: str) -> Any:
    return json.loads(container.unpack(data)[name])


def test_every_target_has_a_device() -> None:
    assert container.DEVICES.keys() == TARGETS.keys()


def test_compiler_target_and_tensors_are_in_the_payload(module: bytes, real_neff: Make) -> None:
    data = real_neff(module, "trn2", 2)
    said = description.describe(data)
    assert container.read_header(data).build_version == ""
    assert said.identity == "neuronx-cc 2.24.5133.0+58f8de22"
    assert (said.device, said.targets, said.cores) == ("cayman", ("trn2",), ("sg00", "sg01"))
    assert said.features == ("logical cores",) and said.header.neff_version == (2, 0)
    assert [(t.name, t.usage, t.dtype, t.shape, t.size) for t in said.tensors] == [
        ("input0.must_alias_input", "in", "bf16", (1, 1, 4, 8), 64),
        ("input1", "in", "s32", (1, 1, 1, 4, 2), 32),
        ("input2", "in", "u8", (1, 1, 2, 2, 34), 136),
        ("output0", "out", "bf16", (1, 1, 4, 8), 64),
    ], "the outputs of both cores are one"
    assert description.describe(real_neff(module, "inf2", 1)).targets == ("trn1", "trn1n", "inf2")


@pytest.mark.parametrize("target", TARGETS)
def test_a_simulated_neff_says_the_same(module: bytes, real_neff: Make, target: str) -> None:
    config = CompileConfig.make(target)
    real = description.describe(real_neff(module, target, config.lnc))
    simulated = description.describe(container.write_simulated(module, config.flags(), "simulator 3 (jaxlib 1)"))
    assert simulated.identity == "simulator 3 (jaxlib 1)"
    assert (simulated.device, simulated.cores, simulated.tensors) == (real.device, real.cores, real.tensors)
    for said in (real, simulated):
        description.check(said, container.tensors_of(module), target, config.lnc)


def test_members_of_a_simulated_neff_have_the_form_of_a_real_one(module: bytes, real_neff: Make) -> None:
    config = CompileConfig.make("trn2")
    real, simulated = real_neff(module, "trn2", 2), container.write_simulated(module, config.flags(), "simulator 3")
    for name in ("info.json", "kelf-0.json", "sg00/def.json", "sg01/tensor_map.json"):
        theirs, ours = member(real, name), member(simulated, name)
        assert ours.keys() <= theirs.keys()
    assert member(simulated, "kelf-0.json") == member(real, "kelf-0.json")
    tensor = member(simulated, "sg00/tensor_map.json")["input1"]
    assert tensor == member(real, "sg00/tensor_map.json")["input1"]


def wide(*types: str) -> bytes:
    """Returns HLO that returns its parameters: one of each type with shape [3, 5], and one with []."""
    number = {name: n for n, name in proto.ELEMENT_TYPES.items()}
    module = proto.parse(b"\x1a\x00")
    module.name = module.entry_computation_name = "k"
    (computation,) = module.computations
    root = type(computation.instructions.add())()
    del computation.instructions[:]
    root.opcode, root.name, root.id, root.shape.element_type = "tuple", "t", 100, number["tuple"]
    for n, (kind, dims) in enumerate((kind, dims) for kind in types for dims in ((3, 5), ())):
        i = computation.instructions.add(id=n, name=f"p{n}", opcode="parameter", parameter_number=n)
        i.shape.element_type = number[kind]
        i.shape.dimensions.extend(dims)
        root.shape.tuple_shapes.append(i.shape)
        root.operand_ids.append(n)
    computation.instructions.append(root)
    computation.root_id = 100
    return proto.serialize(module)


def test_types_and_shapes_may_differ_at_equal_size(real_neff: Make) -> None:
    module = wide("s64", "pred")
    said = description.describe(real_neff(module, "trn1", 1))
    assert [(t.dtype, t.shape) for t in said.tensors[:4]] == [
        ("s32", (3, 10)),
        ("s32", (2,)),
        ("u8", (3, 5)),
        ("u8", ()),
    ]
    description.check(said, container.tensors_of(module), "trn1", 1)
    simulated = container.write_simulated(module, CompileConfig.make("trn1").flags(), "s")
    assert description.describe(simulated).tensors == said.tensors


def test_inputs_may_be_missing_and_outputs_may_not(module: bytes, real_neff: Make) -> None:
    expected = container.tensors_of(module)
    said = description.describe(real_neff(module, "trn2", 2, drop=["input1"]))
    assert [t.name for t in said.tensors] == ["input0.must_alias_input", "input2", "output0"]
    description.check(said, expected, "trn2", 2)
    data = real_neff(module, "trn1", 1)
    definition = member(data, "sg00/def.json")
    del definition["var"]["output0"]
    with pytest.raises(KernelgenError, match=r"x\.neff: it has no output output0, which its HLO has"):
        description.check(
            description.describe(repacked(data, sg00_def_json=definition)), expected, "trn1", 1, source="x.neff"
        )


def test_a_neff_of_another_kernel_target_or_core_is_refused(module: bytes, real_neff: Make) -> None:
    said = description.describe(real_neff(module, "trn1", 1))
    with pytest.raises(KernelgenError) as caught:
        description.check(said, container.tensors_of(wide("f32")), "trn2", 2, source="x.neff")
    text = str(caught.value)
    assert "x.neff: compiled for sunda (trn1, trn1n, inf2), not for trn2 (cayman)" in text
    assert "x.neff: compiled for logical cores of 1 physical cores, with code for 1; expected 2" in text
    assert "it has an input input0.must_alias_input, which its HLO lacks" in text
    assert "its output output0 has 64 bytes; its HLO's output0: f32[3,5], 60" in text
    assert "it has no output output1, which its HLO has" in text
    with pytest.raises(KernelgenError, match="for sunda"):
        description.check_device(said, "trn3", 1)
    description.check_device(said, "inf2", 1)


def test_the_hash_is_the_md5_up_to_2_14_and_unknown_afterwards(module: bytes, real_neff: Make) -> None:
    def digest(version: str) -> str | None:
        data = real_neff(module, "trn1", 1, version=version)
        return container.payload_digest(data, container.read_header(data))

    assert [
        digest(v)
        for v in ("2.0.99229.0a0+1897edc9", "2.14.227.0+2d4f85be", "2.18.121.0+9e31e41a", "2.24.5133.0+58f8de22")
    ] == [
        "MD5",
        "MD5",
        None,
        None,
    ]


@pytest.mark.parametrize(
    "members, message",
    [
        ({"info_json": None}, "it has no info.json"),
        ({"kelf_0_json": None}, "it has no kelf-0.json"),
        ({"sg00_def_json": None}, "it has no sg00/def.json"),
        ({"sg00_tensor_map_json": None}, "it has no sg00/tensor_map.json"),
        ({"info_json": b"{"}, "info.json is not JSON"),
        ({"info_json": []}, "info.json is not an object"),
        ({"info_json": {}}, "'tool_version' is missing"),
        ({"info_json": {"tool_version": 2}}, "not text, or missing"),
        ({"kelf_0_json": {"target": "sunda"}}, "'graphs' is missing"),
        ({"kelf_0_json": {"target": "sunda", "graphs": []}}, "not text, or missing"),
        ({"kelf_0_json": {"target": "sunda", "graphs": [7]}}, "not subscriptable"),
        ({"sg00_def_json": {"var": {"x": {"type": "input", "size": 4}}}}, "'x' is missing"),
        ({"sg00_def_json": {"var": {"input1": {"type": "input", "size": "4"}}}}, "of input1 cannot be read"),
        ({"sg00_def_json": {"var": 7}}, "unknown form"),
        ({"sg01_def_json": {"var": {"input1": {"type": "input", "size": 4}}}}, "its cores disagree about input1"),
    ],
)
def test_unreadable_parts_are_reported(module: bytes, real_neff: Make, members: dict[str, Any], message: str) -> None:
    data = repacked(real_neff(module, "trn2", 2), **members)
    with pytest.raises(KernelgenError, match=r"x\.neff: damaged NEFF") as caught:
        description.describe(data, source="x.neff")
    assert message in str(caught.value)


def test_the_double_says_of_hlo_what_kernelgen_says(module: bytes, real_neff: Make) -> None:
    """Two independent readers of HLO agree: the double's has 60 lines of Python."""
    said = description.describe(real_neff(module, "trn1", 1))
    assert [(t.name, t.usage, t.size) for t in said.tensors] == [
        (t.name, t.usage, t.size) for t in container.tensors_of(module)
    ]
    assert hashlib.sha256(module).digest() in container.unpack(real_neff(module, "trn1", 1))["sg00/PE.bin"]
