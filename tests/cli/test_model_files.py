"""Commands that receive a model's file instead of a manifest or bundle say what it is, and name the command for it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from kernelgen.ggml import model_files

from .conftest import Done

pytestmark = pytest.mark.usefixtures("kept_workers")

Run = Callable[..., Done]

MANIFEST_COMMANDS = (
    ("validate",),
    ("plan",),
    ("generate", "cmake", "--output", "{out}"),
    ("emit", "-o", "{out}"),
    ("build", "-o", "{out}"),
    ("coverage", "--graph-ops", "{out}"),
)


def model(path: Path, *, architecture: str = "qwen3", kind: str | None = None, words: int = 0) -> Path:
    """Writes the header of a GGUF model, with a vocabulary of `words` before the type."""
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_uint32(f"{architecture}.block_count", 2)
    if words:
        writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(words)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


def safetensors(path: Path) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return path


@pytest.mark.parametrize("arguments", MANIFEST_COMMANDS, ids=lambda a: a[0])
def test_commands_that_take_a_manifest_name_the_one_that_takes_a_model(
    kernelgen: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    file = model(tmp_path / "model.gguf")
    command = [word.format(out=tmp_path / "out") for word in arguments]
    done = kernelgen(*command, file)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: {file} is a model in a GGUF file (qwen3), not a manifest\n"
        f"    kernelgen model {file} -o model.yaml writes the manifest of a model's kernels\n"
    )


def test_inspect_says_what_a_model_is(kernelgen: Run, tmp_path: Path) -> None:
    file = model(tmp_path / "model.gguf", words=1000)
    done = kernelgen("inspect", file)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        f"error: {file} is a model in a GGUF file (qwen3), not a bundle, NEFF or HLO file\n    kernelgen model {file} "
    )


@pytest.mark.parametrize("command", ["validate", "inspect"])
def test_safetensors_and_folders_of_hugging_face_are_known(kernelgen: Run, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    for path, what in (
        (safetensors(folder / "model.safetensors"), "a model's weights in a safetensors file"),
        (folder / "config.json", "the configuration of a Hugging Face model"),
        (folder, "the folder of a Hugging Face model"),
    ):
        done = kernelgen(command, path)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {path} is {what}, not a ")
        assert f"    kernelgen model {path} -o model.yaml writes the manifest of a model's kernels\n" in done.err


def test_other_gguf_files_are_not_called_models(kernelgen: Run, tmp_path: Path) -> None:
    adapter = model(tmp_path / "lora.gguf", kind="adapter")
    assert "is a GGUF file of the type 'adapter' (qwen3), not a manifest" in kernelgen("validate", adapter).err
    part = tmp_path / "part.gguf"
    part.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + _key("split.no") + struct.pack("<IH", 2, 1))
    assert "a later file of a model that was split into several GGUF files" in kernelgen("inspect", part).err


def test_a_pack_is_not_a_model(kernelgen: Run, tmp_path: Path) -> None:
    arguments = ("--compiler", "simulator", "--cache", "off", "--form", "pack")
    manifest = tmp_path / "small.yaml"
    manifest.write_text(
        'format: 1\nname: small\ntargets: [trn1]\nkernels:\n  - {op: relu, inputs: ["(4,1,1,1)/f32"], output: "(4,1,1,1)/f32"}\n'
    )
    assert kernelgen("build", manifest, *arguments, "-o", tmp_path).code == 0
    pack = tmp_path / "small_trn1.kernels.gguf"
    assert kernelgen("inspect", pack).code == 0
    done = kernelgen("validate", pack)
    assert done.code == 2
    assert (
        f"{pack} is a bundle of kernels, a GGUF pack, not a manifest\n    kernelgen inspect {pack} prints" in done.err
    )
    # A damaged pack is still recognized as a pack.
    pack.write_bytes(pack.read_bytes()[:200])
    assert "damaged kernel pack" in kernelgen("inspect", pack).err


def test_a_manifest_that_is_json_is_read(kernelgen: Run, tmp_path: Path) -> None:
    manifest = tmp_path / "config.json"
    kernel = {"op": "relu", "inputs": ["(4,1,1,1)/f32"], "output": "(4,1,1,1)/f32"}
    manifest.write_text(json.dumps({"format": 1, "name": "x", "targets": ["trn1"], "kernels": [kernel]}))
    assert kernelgen("validate", manifest) == Done(0, "x: 1 kernel for trn1\n", "")


def _key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def test_a_file_that_is_not_a_model_is_left_to_its_reader(tmp_path: Path) -> None:
    for name, data in (("a.gguf", b"GGUF"), ("b.safetensors", bytes(20)), ("c.json", b"["), ("d.yaml", b"format: 1\n")):
        (tmp_path / name).write_bytes(data)
        assert model_files.recognize(tmp_path / name, "manifest") is None
    for path in (tmp_path, tmp_path / "none", "a\0b", "/dev/null"):
        assert model_files.recognize(path, "manifest") is None
