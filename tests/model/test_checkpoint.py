"""`kernelgen model` on Hugging Face checkpoints with a double of llama.cpp's converter; test_converter.py uses the real one."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import headers
import pytest
from headers import GgufHeader

from kernelgen.model import checkpoint
from kernelgen.model.exporter import Exporter

from .conftest import run_model, specs

Said = pytest.CaptureFixture[str]
MODEL = headers.qwen3()
BITS = {"f16": 16, "f32": 32}


def tensors(header: GgufHeader) -> dict[str, dict[str, object]]:
    """Returns a safetensors header with the tensors of a GGUF header, under the same names."""
    found: dict[str, dict[str, object]] = {}
    end = 0
    for tensor in header.tensors:
        size = BITS[tensor.dtype] // 8
        for n in tensor.ne:
            size *= n
        found[tensor.name] = {
            "dtype": tensor.dtype.upper(),
            "shape": list(reversed(tensor.ne)),
            "data_offsets": [end, end + size],
        }
        end += size
    return found


def safetensors(path: Path, described: object, *, whole: bool = False) -> Path:
    """Writes a safetensors file that ends after its header; with `whole` it has the size of its tensors too."""
    data = json.dumps(described).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    if whole:
        assert isinstance(described, dict)
        os.truncate(path, 8 + len(data) + max(tensor["data_offsets"][1] for tensor in described.values()))
    return path


def write(folder: Path, header: GgufHeader = MODEL, **config: object) -> Path:
    """Writes a checkpoint without a tokenizer and without weights."""
    folder.mkdir(exist_ok=True)
    fields = {key: value for key, value in header.fields.items() if not key.startswith(".") and key != "vocab_size"}
    (folder / "config.json").write_text(json.dumps({"model_type": header.architecture, "fields": fields, **config}))
    safetensors(folder / "model.safetensors", tensors(header))
    return folder


Convert = Callable[..., int]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns llama.cpp's source tree with a double of the converter."""
    folder = tmp_path / "llama.cpp"
    (folder / "build" / "bin").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("converter_double.py"), folder / checkpoint.PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return folder


@pytest.fixture
def convert(exporter: Exporter, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Convert:
    """Returns a function that derives `m.yaml` from a checkpoint and returns the exit status."""
    assert exporter.libraries is not None
    monkeypatch.setenv("LD_LIBRARY_PATH", str(exporter.libraries))

    def run(source: Path, *arguments: object) -> int:
        where = Exporter(exporter.program, tree / "build")
        given = ("--name", "m", "--n-ctx", 512, "--n-tokens", "1,64", "--python", sys.executable)
        return run_model(where, source, tmp_path / "m.yaml", *given, *arguments)

    return run


@pytest.fixture
def wanted(exporter: Exporter, tmp_path: Path) -> str:
    """Returns the kernels of the manifest of the same model's GGUF file."""
    file = headers.write(MODEL, tmp_path / "wanted.gguf")
    assert run_model(exporter, file, tmp_path / "wanted.yaml", "--n-ctx", 512, "--n-tokens", "1,64") == 0
    return kernels(tmp_path / "wanted.yaml")


def kernels(path: Path) -> str:
    return path.read_text().partition("\nsizes:")[2]


def refused(convert: Convert, said: Said, source: Path, tmp_path: Path, *arguments: object) -> str:
    said.readouterr()
    assert convert(source, *arguments) == 2
    assert not (tmp_path / "m.yaml").exists()
    captured = said.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


# --- accepted files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["", "config.json", "model.safetensors"])
@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_has_the_manifest_of_its_gguf_file(
    named: str, whole: bool, convert: Convert, wanted: str, tmp_path: Path, capsys: Said
) -> None:
    folder = write(tmp_path / "Tiny-Qwen3")
    safetensors(folder / "model.safetensors", tensors(MODEL), whole=whole)
    assert convert(folder / named) == 0
    assert kernels(tmp_path / "m.yaml") == wanted
    assert f"#   kernelgen model {named or 'Tiny-Qwen3'} --n-ctx 512 " in (tmp_path / "m.yaml").read_text()
    said = capsys.readouterr().out
    assert "qwen3: 1.64 million parameters, 3.1 MiB of weights, 2 layers\n" in said
    assert "no tokenizer can be read (FileNotFoundError: " in said
    assert "128 tokens without texts stand for its vocabulary\n" in said


def test_a_checkpoint_of_several_files(convert: Convert, wanted: str, tmp_path: Path, capsys: Said) -> None:
    folder = write(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    described = tensors(MODEL)
    parts = [f"model-{i + 1:05}-of-00002.safetensors" for i in range(2)]
    for i, part in enumerate(parts):
        safetensors(folder / part, {name: described[name] for name in list(described)[i::2]})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: parts[i % 2] for i, name in enumerate(described)}}))
    for source in (folder, index, folder / parts[0]):
        assert convert(source) == 0
        assert kernels(tmp_path / "m.yaml") == wanted
        (tmp_path / "m.yaml").unlink()
    (folder / parts[1]).unlink()
    said = refused(convert, capsys, folder, tmp_path)
    assert said.startswith(f"error: {folder / parts[1]} is missing\n    its header is enough: ")


def test_a_tokenizer_is_read_where_there_is_one(convert: Convert, wanted: str, tmp_path: Path, capsys: Said) -> None:
    folder = write(tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps([f"token {i}" for i in range(128)]))
    assert convert(folder) == 0
    assert kernels(tmp_path / "m.yaml") == wanted
    assert "no tokenizer" not in capsys.readouterr().out
    (folder / "tokenizer.json").write_text("null")
    assert convert(folder) == 0
    assert kernels(tmp_path / "m.yaml") == wanted
    assert "no tokenizer can be read (the converter stops): 128 tokens" in capsys.readouterr().out


def test_a_converter_that_can_t_do_without_the_tokenizer_s_size(
    convert: Convert, wanted: str, tmp_path: Path, capsys: Said
) -> None:
    folder = write(tmp_path / "model", do="(folder / 'tokenizer.json').read_text()", vocab_size=128)
    assert convert(folder) == 0
    assert kernels(tmp_path / "m.yaml") == wanted
    assert (
        "\na tokenizer is missing, to whose size the converter cuts the embedding: 128 tokens are assumed\n"
        in capsys.readouterr().out
    )


def test_weights_that_no_disk_holds(convert: Convert, tmp_path: Path) -> None:
    large = headers.qwen3(n_embd=8192, n_ff=65536, n_vocab=1 << 20, n_layer=40)
    assert convert(write(tmp_path / "model", large)) == 0
    assert any(spec.output.ne[0] == 1 << 20 for spec in specs(tmp_path / "m.yaml"))


def test_code_of_a_checkpoint_is_not_given_to_the_converter(convert: Convert, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    for name in ("configuration_evil.py", "pytorch_model.bin", "tokenizer.py"):
        (folder / name).write_text("raise SystemExit('evil')")
    assert convert(folder) == 0


TORCH = """
import contextlib

@contextlib.contextmanager
def device(name):
    assert name == "meta"
    yield
"""
TRANSFORMERS = """
import json, math
from pathlib import Path

class Tensor:
    def __init__(self, shape):
        self.shape = shape
    def numel(self):
        return math.prod(self.shape)
    def detach(self):
        return self

class AutoConfig:
    @staticmethod
    def from_pretrained(folder, trust_remote_code):
        assert trust_remote_code is False
        return json.loads((Path(folder) / "config.json").read_text())

class TinyForCausalLM:
    def __init__(self, config):
        self.tensors = {name: Tensor(shape) for name, shape in config["tensors"].items()}
        self.tensors["tied.weight"] = self.tensors["token_embd.weight"]
    @classmethod
    def _from_config(cls, config):
        return cls(config)
    def state_dict(self, keep_vars):
        return dict(self.tensors)

class AutoModelForCausalLM:
    @staticmethod
    def from_config(config, trust_remote_code):
        assert trust_remote_code is False
        return TinyForCausalLM(config)
"""


@pytest.mark.parametrize("architecture", ["TinyForCausalLM", "OtherForCausalLM"])
def test_a_configuration_alone_is_enough_with_transformers(
    architecture: str, convert: Convert, tree: Path, tmp_path: Path, capsys: Said
) -> None:
    (tree / "torch.py").write_text(TORCH)
    (tree / "transformers.py").write_text(TRANSFORMERS)
    plain = replace(MODEL, tensors=[replace(tensor, dtype="f16") for tensor in MODEL.tensors])
    config = {
        "architectures": [architecture],
        "torch_dtype": "float16",
        "tensors": {name: tensor["shape"] for name, tensor in tensors(plain).items()},
    }
    folder = write(tmp_path / "model", plain, **config)
    assert convert(folder) == 0
    with_header = kernels(tmp_path / "m.yaml")
    (folder / "model.safetensors").unlink()
    alone = tmp_path / "anything.json"
    shutil.copy(folder / "config.json", alone)
    for source in (folder, folder / "config.json", alone):
        capsys.readouterr()
        assert convert(source) == 0
        assert kernels(tmp_path / "m.yaml") == with_header
        assert (
            "\nthere is no safetensors header: transformers says which tensors the model has\n"
            in capsys.readouterr().out
        )
    (tmp_path / "m.yaml").unlink()
    alone.write_text(alone.read_text().replace('"float16"', '"float5"'))
    said = refused(convert, capsys, alone, tmp_path)
    assert "ValueError: config.json: dtype 'float5': expected one of float32, float16, bfloat16\n" in said


def test_llama_cpp_s_converter_has_what_is_changed_of_it(llama_cpp_sources: Path) -> None:
    """llama.cpp has the methods that run_converter.py replaces. test_converter.py runs them where PyTorch is installed."""
    program = ast.parse((llama_cpp_sources / checkpoint.PROGRAM).read_text())
    imported = {name.name for node in ast.walk(program) if isinstance(node, ast.ImportFrom) for name in node.names}
    assert "ModelBase" in imported
    assert "main" in {node.name for node in program.body if isinstance(node, ast.FunctionDef)}
    methods = _methods(llama_cpp_sources / "conversion" / "base.py", "ModelBase")
    assert [name for name in _called(methods["write"]) if name.startswith("write_")] == [
        "write_header_to_file",
        "write_kv_data_to_file",
        "write_tensors_to_file",
    ]
    assert "set_vocab" in _called(
        _methods(llama_cpp_sources / "conversion" / "base.py", "TextModel")["prepare_metadata"]
    )
    writer = _methods(llama_cpp_sources / "gguf-py" / "gguf" / "gguf_writer.py", "GGUFWriter")
    assert {"write_ti_data_to_file", "add_tokenizer_model", "add_vocab_size"} <= writer.keys()
    assert (llama_cpp_sources / "requirements" / "requirements-convert_hf_to_gguf.txt").is_file()


def _methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    (found,) = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def _called(function: ast.FunctionDef) -> list[str]:
    """Returns the names of the methods that a method calls, in order."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return [
        call.func.attr for call in sorted(calls, key=lambda call: call.lineno) if isinstance(call.func, ast.Attribute)
    ]


# --- refused files ----------------------------------------------------------------------------------------------------


def test_the_error_names_what_the_converter_needs(convert: Convert, tree: Path, tmp_path: Path, capsys: Said) -> None:
    folder = write(tmp_path / "model", do="import sentencepiece_of_nobody")
    said = refused(convert, capsys, folder, tmp_path)
    assert said == (
        f"error: {sys.executable} has no module 'sentencepiece_of_nobody', which convert_hf_to_gguf.py needs\n"
        f"    install what convert_hf_to_gguf.py needs: {sys.executable} -m pip install torch transformers safetensors sentencepiece numpy pyyaml\n"
        "    or name a Python that has it: --python <program>\n"
    )
    (tree / "requirements").mkdir()
    listed = tree / "requirements" / "requirements-convert_hf_to_gguf.txt"
    listed.write_text("torch\n")
    assert f"{sys.executable} -m pip install -r {listed}\n" in refused(convert, capsys, folder, tmp_path)


def header(text: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if size is None else size) + text


def tensor(**changes: object) -> bytes:
    return header(json.dumps({"w": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12], **changes}}).encode())


TENSOR = ": tensor 'w' has an invalid description: "
DAMAGED = [
    ("model.safetensors", tensor(dtype="F99"), TENSOR),
    ("model.safetensors", tensor(shape=[2, -3]), TENSOR),
    ("model.safetensors", tensor(shape=[2**60, 3], data_offsets=[0, 2**61 * 3]), TENSOR),
    ("model.safetensors", tensor(data_offsets=["0", "12"]), TENSOR),
    ("model.safetensors", header(b'{"w": []}'), TENSOR),
    ("model.safetensors", b"", ": a header of 0 bytes: expected 2 to "),
    (
        "model.safetensors",
        b"\xff" * 8 + b"{",
        f": a header of {2**64 - 1} bytes: expected 2 to {checkpoint.MAX_HEADER}",
    ),
    ("model.safetensors", header(b"{}", 100), ": the header is cut off after 2 of 100 bytes"),
    ("model.safetensors", header(b"[]"), ":1:1: error: expected an object, not a list"),
    ("model.safetensors", header(b"{]}"), ":1:2: error: not JSON: "),
    ("model.safetensors.index.json", b"{", ":1:2: error: not JSON: "),
    ("model.safetensors.index.json", b'{"weight_map": []}', ": 'weight_map' is not a mapping from tensors to files\n"),
]


@pytest.mark.parametrize(("name", "data", "message"), DAMAGED)
def test_a_damaged_file(name: str, data: bytes, message: str, convert: Convert, tmp_path: Path, capsys: Said) -> None:
    folder = write(tmp_path / "model")
    (folder / name).write_bytes(data)
    assert f"{folder / name}{message}" in refused(convert, capsys, folder, tmp_path)


@pytest.mark.parametrize(
    ("do", "message"),
    [
        (
            "logging.error('TinyForCausalLM is not supported'); sys.exit(1)",
            " refuses the model: TinyForCausalLM is not",
        ),
        (
            "raise ValueError('Can not map tensor\\n\\n\\'x\\'')",
            " refuses the model: ValueError: Can not map tensor 'x'",
        ),
        ("print('\\x1b[31mso', flush=True); import os; os._exit(7)", " ends with 7; it prints:\n    \\x1b[31mso"),
        ("import os; os.kill(os.getpid(), 9)", " is killed by SIGKILL; it prints:\n    nothing"),
        ("bytearray(2 << 30)", " refuses the model: MemoryError\n"),
        ("import time; time.sleep(600)", " takes more than 3 s\n"),
    ],
)
def test_a_converter_that_fails(
    do: str, message: str, convert: Convert, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MAX_MEMORY", 1 << 30)
    monkeypatch.setattr(checkpoint, "TIMEOUT", 3)
    folder = write(tmp_path / "model", do=do)
    said = refused(convert, capsys, folder, tmp_path)
    assert said.startswith(f"error: {folder}: convert_hf_to_gguf.py{message}")


def test_what_llama_cpp_refuses_is_reported_for_the_checkpoint(convert: Convert, tmp_path: Path, capsys: Said) -> None:
    header = replace(MODEL, tensors=[t for t in MODEL.tensors if t.name != "output_norm.weight"])
    folder = write(tmp_path / "model", header)
    said = refused(convert, capsys, folder, tmp_path)
    assert said.startswith(f"error: {folder}, converted: ")
    assert "'output_norm.weight' not found" in said


def test_the_tree_and_the_python_are_named(
    exporter: Exporter, convert: Convert, tree: Path, tmp_path: Path, capsys: Said
) -> None:
    folder = write(tmp_path / "model")
    said = refused(convert, capsys, folder, tmp_path, "--python", tmp_path / "none")
    assert said == f"error: --python {tmp_path / 'none'}: No such file or directory\n"
    (tree / checkpoint.PROGRAM).unlink()
    said = refused(convert, capsys, folder, tmp_path)
    assert said.startswith(
        f"error: --llama-cpp {tree / 'build'}: there is no convert_hf_to_gguf.py in it or above it\n"
    )
    assert "    name llama.cpp's source tree, with convert_hf_to_gguf.py: --llama-cpp <folder>\n" in said
    file = headers.write(MODEL, tmp_path / "model.gguf")
    said = refused(convert, capsys, file, tmp_path)
    assert said == f"error: --python is for Hugging Face models, and {file} is a model in a GGUF file\n"
