"""`kernelgen repack`: the files that it writes, the weights that it omits, and its errors. tests/ggml_neuron loads such
files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest

from kernelgen.ggml import weight_layouts
from kernelgen.ggml.types import TYPES
from kernelgen.model import repacked

from .conftest import Done

Run = Callable[..., Done]

ENTRY = '  - {{op: mul_mat, inputs: ["({0},{1},1,1)/{2}", "({0},1,1,1)/f32"], output: "({1},1,1,1)/f32"}}\n'
HEAD = "format: 1\nname: some\ntargets: [trn1, trn2]\n"

SHAPES = {
    "blk.0.a.weight": (256, 300, "q8_0"),
    "blk.0.b.weight": (512, 300, "f16"),
    "blk.0.c.weight": (256, 24, "q4_K"),
    "token_embd.weight": (256, 1000, "q8_0"),
}
"""Columns, rows and type of tensors."""


def write_model(
    path: Path, shapes: Mapping[str, tuple[int, int, str]] = SHAPES, split: tuple[int, int] | None = None
) -> Path:
    """Writes a model, or one file of a split model."""
    random = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    if split:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    for name, (columns, rows, dtype) in shapes.items():
        kind = TYPES[dtype]
        data = random.integers(0, 0x40, (rows, columns // kind.block * kind.size), np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(kind.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_manifest(path: Path, weights: str, shapes: Mapping[str, tuple[int, int, str]] = SHAPES) -> Path:
    entries = "".join(ENTRY.format(*shape) for shape in dict.fromkeys(shapes.values()))
    path.write_text(f"{HEAD}weights: {weights}\nkernels:\n{entries}")
    return path


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test in a folder that holds none of its inputs: outputs without -o go there."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.gguf")


def test_weights_are_written_as_kernels_want_them(kernelgen: Run, model: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "some.yaml", "[bf16, transposed]")
    done = kernelgen("repack", model, manifest)
    output = Path.cwd() / "model.repacked.gguf"
    size = output.stat().st_size / (1 << 20)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"model.repacked.gguf: 4 of 4 tensors, 3 in bf16, 1 in transposed; {size:.1f} MiB\n"
        f"GGML_NEURON_REPACKED={output} makes programs read it\n"
    )
    given = {t.name: t for t in gguf.GGUFReader(model).tensors}
    read = gguf.GGUFReader(output)
    values = [int(part[0]) for part in read.fields[repacked.WORDS_KEY].parts[-4 * 8 :]]
    words = [values[i : i + 8] for i in range(0, len(values), 8)]
    assert [t.name for t in read.tensors] == list(SHAPES)
    for tensor, said in zip(read.tensors, words, strict=True):
        columns, rows, dtype = SHAPES[tensor.name]
        data = np.asarray(given[tensor.name].data)
        layout = "transposed" if dtype == "f16" else "bf16"
        if layout == "bf16":
            expected = weight_layouts.pack_bf16(gguf.quants.dequantize(data, given[tensor.name].tensor_type))
        else:
            expected = np.ascontiguousarray(data.T).view(np.uint8).reshape(-1)
        assert np.array_equal(tensor.data.view(np.uint8), expected), tensor.name
        number = TYPES[dtype].number | weight_layouts.LAYOUTS[layout] << 16
        assert said[:5] == [number, columns, rows, 1, 1]
        assert said[5:7] == [repacked.digest(data.tobytes()), repacked.digest(expected.tobytes())]
        sealed = struct.pack("<8Q", *said[:7], len(expected)) + tensor.name.encode()
        assert said[7] == repacked.digest(sealed)


@pytest.mark.parametrize("weights", ["[planes, transposed]", "[f8_e4m3_128x128]"])
def test_the_same_model_and_kernels_give_the_same_file(
    kernelgen: Run, model: Path, tmp_path: Path, weights: str
) -> None:
    manifest = write_manifest(tmp_path / "some.yaml", weights)
    for n in (1, 3):
        assert kernelgen("repack", model, manifest, "-o", tmp_path / f"{n}.gguf", "-j", n).code == 0
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()


def test_a_digest_is_that_of_its_definition() -> None:
    mask = (1 << 64) - 1
    for size in (0, 1, 7, 8, 4099, 1 << 18):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        words = [*struct.unpack(f"<{-(-size // 8)}Q", data + bytes(-size % 8)), size]
        keyed = [w ^ ((i + 1) * 0x9E3779B97F4A7C15 & mask) for i, w in enumerate(words)]
        expected = sum(x + (x & 0xFFFFFFFF) * (x >> 32) for x in keyed) & mask
        assert repacked.digest(data) == expected, size
    assert len({repacked.digest(bytes(n)) for n in range(40)}) == 40


def test_an_embedding_beside_an_output_is_left_out(kernelgen: Run, tmp_path: Path) -> None:
    """llama.cpp keeps the embedding on the CPU."""
    shapes = {**SHAPES, "output.weight": SHAPES["token_embd.weight"]}
    model, manifest = write_model(tmp_path / "m.gguf", shapes), write_manifest(tmp_path / "m.yaml", "[bf16]", shapes)
    assert kernelgen("repack", model, manifest).out.startswith("m.repacked.gguf: 3 of 5 tensors, 3 in bf16")
    names = [t.name for t in gguf.GGUFReader("m.repacked.gguf").tensors]
    assert "output.weight" in names and "token_embd.weight" not in names


def test_a_model_in_several_files_is_one(kernelgen: Run, tmp_path: Path) -> None:
    names = list(SHAPES)
    for number, part in enumerate((names[:1], names[1:]), 1):
        shapes = {name: SHAPES[name] for name in part}
        write_model(tmp_path / f"m-{number:05}-of-00002.gguf", shapes, (number - 1, 2))
    manifest = write_manifest(tmp_path / "m.yaml", "[planes]")
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    done = kernelgen("repack", first, manifest)
    assert done.out.startswith("m-00001-of-00002.repacked.gguf: 3 of 4 tensors, 3 in planes"), done
    done = kernelgen("repack", second, manifest)
    assert done.code == 2 and "its name does not say where the others are" in done.err
    second.unlink()
    done = kernelgen("repack", first, manifest)
    assert done.code == 2 and f"can't read '{second}': No such file" in done.err


def test_what_the_gguf_package_does_not_decode_is_left_to_the_load(kernelgen: Run, tmp_path: Path) -> None:
    shapes = {"a": (256, 8, "q1_0"), "b": (256, 8, "q8_0")}
    model, manifest = write_model(tmp_path / "m.gguf", shapes), write_manifest(tmp_path / "m.yaml", "[bf16]", shapes)
    done = kernelgen("repack", model, manifest)
    assert done.err == "warning: 1 weights in q1_0 are left to be repacked at load: gguf can't dequantize q1_0\n"
    assert "m.repacked.gguf: 1 of 2 tensors, 1 in bf16" in done.out
    done = kernelgen("repack", model, write_manifest(manifest, "[planes]", shapes))
    assert (done.err, "2 in planes" in done.out) == ("", True)


def test_weights_that_cannot_be_repacked_are_reported(kernelgen: Run, model: Path, tmp_path: Path) -> None:
    plain = write_manifest(tmp_path / "plain.yaml", "[]")
    wide = write_manifest(tmp_path / "wide.yaml", "[bf16]")
    other = write_manifest(tmp_path / "other.yaml", "[bf16]", {"a": (256, 99, "q8_0")})
    both = tmp_path / "both.yaml"
    both.write_text(wide.read_text().replace("weights: [bf16]", "weights: {trn1: [bf16], trn2: [planes]}"))
    damaged, text, cut = tmp_path / "damaged.gguf", tmp_path / "text.gguf", tmp_path / "cut.gguf"
    data = model.read_bytes()
    damaged.write_bytes(data[:90])
    cut.write_bytes(data[:-100])
    text.write_text("no model")
    output = tmp_path / "out.gguf"
    assert kernelgen("repack", model, wide, "-o", output).code == 0
    before = output.read_bytes()
    cases = [
        ((model, plain), "no kernel reads a weight in a layout, so there is nothing to repack"),
        ((model, other), f"none of the 4 tensors of {model} has a type and shape that these kernels read in a layout"),
        ((model, both), "kernels for trn1, trn2 read weights in different layouts: choose a target with --target"),
        ((model, wide, "--target", "inf2"), "manifest 'some' is for trn1, trn2, not for inf2"),
        ((model, model), f"{model} is a model in a GGUF file (llama), not a manifest"),
        ((model, wide, "-o", model), f"-o {model} is the model's own file"),
        ((tmp_path / "none.gguf", wide), "none.gguf': No such file or directory"),
        ((output, wide), f"{output} is not a model: it is repacked weights"),
        ((damaged, wide), f"{damaged}: damaged at byte "),
        ((text, wide), f"{text} is not a GGUF file"),
        ((cut, wide), f"{cut}: the file ends at byte {len(data) - 100}, and tensor 'token_embd.weight' ends at "),
    ]
    for arguments, message in cases:
        done = kernelgen("repack", *(("-o", output) if "-o" not in arguments else ()), *arguments)
        assert (done.code, done.out) == (2, "") and message in done.err, done
    assert output.read_bytes() == before and not list(tmp_path.glob(".*"))
    assert kernelgen("repack", model, both, "--target", "trn2", "-o", output).out.startswith(
        f"{output}: 3 of 4 tensors, 3 in planes"
    )


@pytest.fixture
def repacked_model(kernelgen: Run, model: Path, tmp_path: Path) -> Path:
    assert kernelgen("repack", model, write_manifest(tmp_path / "some.yaml", "[bf16, transposed]")).code == 0
    return Path.cwd() / "model.repacked.gguf"


def test_inspect_prints_the_weights_and_their_layouts(kernelgen: Run, repacked_model: Path) -> None:
    done = kernelgen("inspect", "--check", repacked_model)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        f"{repacked_model}: weights of a model, repacked",
        "  model        model.gguf",
        f"  size         {repacked_model.stat().st_size}",
        "  layouts      3 bf16, 1 transposed",
        "  weight       blk.0.a.weight: (256,300,1,1)/q8_0 in bf16, 153600 bytes",
        "  weight       blk.0.b.weight: (512,300,1,1)/f16 in transposed, 307200 bytes",
        "  weight       blk.0.c.weight: (256,24,1,1)/q4_K in bf16, 12288 bytes",
        "  weight       token_embd.weight: (256,1000,1,1)/q8_0 in bf16, 512000 bytes",
    ]


def test_inspect_finds_a_damaged_byte_and_a_damaged_word(kernelgen: Run, repacked_model: Path) -> None:
    good = repacked_model.read_bytes()
    repacked_model.write_bytes(good[:-70] + bytes([good[-70] ^ 1]) + good[-69:])
    assert kernelgen("inspect", repacked_model).code == 0
    done = kernelgen("inspect", "--check", repacked_model)
    expected = f"error: {repacked_model}: damaged: the bytes of token_embd.weight are not those that were written\n"
    assert (done.code, done.err) == (2, expected)
    at = good.index(repacked.WORDS_KEY.encode()) + len(repacked.WORDS_KEY) + 4 + 4 + 8
    at += 5 * 8  # the digest of the original
    repacked_model.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    done = kernelgen("inspect", repacked_model)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"error: {repacked_model}: damaged: what it says of blk.0.a.weight is not what was written\n"


@pytest.mark.parametrize("size", [3, 100, 700, 2000, 4000])
def test_inspect_says_where_a_file_of_repacked_weights_is_cut(kernelgen: Run, repacked_model: Path, size: int) -> None:
    repacked_model.write_bytes(repacked_model.read_bytes()[:size])
    done = kernelgen("inspect", repacked_model)
    assert (done.code, done.out) == (2, "") and done.err.startswith(f"error: {repacked_model}: "), done


def test_other_commands_say_what_repacked_weights_are(kernelgen: Run, repacked_model: Path) -> None:
    done = kernelgen("validate", repacked_model)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {repacked_model} has repacked weights, not a manifest\n")
    assert "GGML_NEURON_REPACKED makes programs read it" in done.err
