"""Packs: other readers can read them, and damaged ones are refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelgen.bundle import build as bundle
from kernelgen.bundle import pack
from kernelgen.errors import KernelgenError

from .conftest import Kernels, unary


@pytest.fixture
def packed(kernels: Kernels, tmp_path: Path) -> Path:
    path = tmp_path / "tiny_trn1.kernels.gguf"
    bundle.build(*kernels.arguments, pack_path=path)
    return path


def test_the_gguf_package_reads_it(packed: Path, kernels: Kernels) -> None:
    import gguf

    reader = gguf.GGUFReader(packed)
    made = pack.read(packed)
    assert reader.get_field("general.architecture").contents() == "neuron-kernels"
    assert reader.get_field("kernelgen.format").contents() == 3
    assert reader.get_field("kernelgen.simulated").contents() is True
    assert reader.get_field("kernelgen.kernel.ids").contents() == list(made.index.ids)
    assert reader.get_field("kernelgen.key.words").contents() == list(made.index.words)
    assert reader.get_field("kernelgen.key.offsets").contents() == list(made.index.offsets)
    assert reader.get_field("kernelgen.key.slots").contents() == list(made.index.slots)
    figures = reader.get_field("kernelgen.neff.memory").contents()
    assert figures == [figure for neff in made.neffs if neff.memory for figure in neff.memory.words()]
    assert len(figures) == 3 * len(made.neffs) and min(figures[::3]) > 0
    which = reader.get_field("kernelgen.kernel.neff").contents()
    assert which == list(made.kernel_neff)
    for number, kernel in enumerate(made.index.ids):
        tensor = reader.tensors[which[number]]
        assert tensor.data.tobytes() == kernels.neffs[kernel].read_bytes()
        assert tensor.tensor_type == gguf.GGMLQuantizationType.I8
        assert tensor.data_offset % pack.ALIGNMENT == 0 and len(tensor.name) < 64


def test_offsets_of_arrays(packed: Path) -> None:
    """The embedded form takes the arrays out of the file by these offsets."""
    data = packed.read_bytes()
    made = pack.read(packed)
    words = made.metadata["kernelgen.key.words"]
    assert struct.unpack_from(f"<{len(words.value)}Q", data, words.offset) == made.index.words
    slots = made.metadata["kernelgen.key.slots"]
    assert struct.unpack_from(f"<{len(slots.value)}I", data, slots.offset) == made.index.slots


def test_truncated_anywhere(packed: Path, tmp_path: Path) -> None:
    data = packed.read_bytes()
    cut = tmp_path / "cut.gguf"
    end = pack.read(packed).data_offset
    made = pack.read(packed)
    last = made.data_offset + made.neffs[-1].offset + made.neffs[-1].size
    for length in [*range(0, 64), *range(64, end, 97), end, last - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(KernelgenError, match=r"cut\.gguf"):
            pack.read(cut)
    cut.write_bytes(data[:last])  # without the padding after the last tensor, which no reader needs
    assert pack.read(cut).neffs == made.neffs


def test_mutated_anywhere(packed: Path, tmp_path: Path) -> None:
    """After any change of any byte of the metadata, the pack is read or refused, without another error."""
    data = packed.read_bytes()
    end = pack.read(packed).data_offset
    chance = random.Random(7)
    path = tmp_path / "mutated.gguf"
    refused = 0
    for _ in range(1500):
        mutated = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            at = chance.randrange(end)
            mutated[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        path.write_bytes(mutated)
        try:
            pack.read(path)
        except KernelgenError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 200


def test_other_gguf_files_are_not_packs(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with pytest.raises(KernelgenError, match=r"model\.gguf"):
        pack.read(tmp_path / "model.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(KernelgenError, match="the file is empty"):
        pack.read(tmp_path / "empty.gguf")


def test_ten_thousand_kernels(make: Callable[..., Kernels], tmp_path: Path) -> None:
    """Not a benchmark: a step that is quadratic in the kernels would take minutes."""
    kernels = make([unary("relu", 1)])
    specs = [unary("relu", n) for n in range(1, 10_001)]
    hlo, made = next(iter(kernels.hlos.values())), next(iter(kernels.neffs.values()))
    kernels.specs = {s.id: s for s in specs}
    kernels.hlos, kernels.neffs = dict.fromkeys(kernels.specs, hlo), dict.fromkeys(kernels.specs, made)
    bundle.build(*kernels.arguments, pack_path=tmp_path / "big.gguf")
    assert len(pack.read(tmp_path / "big.gguf").index.ids) == 10_000
