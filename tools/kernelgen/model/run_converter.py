"""Runs llama.cpp's convert_hf_to_gguf.py for the header alone, in a Python that has the converter's packages.

    python run_converter.py MEMORY TREE FOLDER OUTPUT REPORT

MEMORY is the limit of private memory in bytes, TREE llama.cpp's source tree, FOLDER the checkpoint, and OUTPUT the GGUF file to
write. REPORT is a JSON file to write: it has `notes`, and after a failure `error`, with the name of a `missing` Python module. The
converter's tensors are lazy: they have shapes and types, and the program writes no data. It imports nothing of kernelgen.
"""

from __future__ import annotations

import importlib
import json
import logging
import resource
import struct
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""safetensors' names of a configuration's types, and their bytes."""

DEFAULT_DTYPE = "float32"
"""The type that transformers uses if a configuration has none."""


class Errors(logging.Handler):
    """Keeps the last error that the converter logs, because its exit has no message."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


def main() -> int:
    memory, tree, folder, output, report = sys.argv[1:]
    limit(int(memory))
    sys.path[0] = tree  # this program's folder has other modules with names that the converter imports
    errors = Errors()
    logging.getLogger().addHandler(errors)
    notes: list[str] = []
    said: dict[str, object] = {"notes": notes}
    try:
        convert(Path(folder), output, notes)
    except ModuleNotFoundError as error:
        said |= {"error": str(error), "missing": error.name}
    except SystemExit as error:
        if error.code:
            said["error"] = errors.last or f"it ends with {error.code}"
    except BaseException as error:
        traceback.print_exc()
        said["error"] = f"{type(error).__name__}: {error}".rstrip(": ")
    Path(report).write_text(json.dumps(said), encoding="utf-8")
    return 1 if "error" in said else 0


def limit(memory: int) -> None:
    """Limits the private memory of the process; mapped files that are only read do not count."""
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def convert(folder: Path, output: str, notes: list[str]) -> None:
    # The type checker does not have these modules, because llama.cpp's tree is not there.
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    gguf: Any = importlib.import_module("gguf")
    if not any(folder.glob("*.safetensors")):
        write_shapes(folder)
        notes.append("there is no safetensors header: transformers says which tensors the model has")
    base = converter.ModelBase
    write = base.write

    def write_header(model: Any) -> None:
        vocabulary = model.set_vocab
        model.set_vocab = lambda: set_vocab(model, vocabulary, notes)
        write(model)

    base.write = write_header
    gguf.GGUFWriter.write_tensors_to_file = without_data
    sys.argv[1:] = [str(folder), "--outfile", output]
    try:
        converter.main()
    except FileNotFoundError as error:
        # The converter cuts some models' embeddings to the tokenizer's size, and reads that before the vocabulary.
        if Path(str(error.filename)) != folder / "tokenizer.json":
            raise
        size = write_tokenizer(folder)
        notes.append(
            f"a tokenizer is missing, to whose size the converter cuts the embedding: {size} tokens are assumed"
        )
        converter.main()


def write_tokenizer(folder: Path) -> int:
    """Writes a tokenizer with the configuration's number of words, and returns that number."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    words = {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    return int(size)


def without_data(writer: Any, *, progress: bool = False) -> None:
    """Replaces `GGUFWriter.write_tensors_to_file`: writes the header alone."""
    del progress
    writer.write_ti_data_to_file()
    writer.state = type(writer.state).WEIGHTS


def set_vocab(model: Any, vocabulary: Callable[[], None], notes: list[str]) -> None:
    """Replaces a model's `set_vocab`. Kernels depend only on the number of tokens, so a tokenizer may be missing."""
    writer = model.gguf_writer
    before = [dict(values) for values in writer.kv_data]
    try:
        vocabulary()
        return
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    except SystemExit:
        why = "the converter stops"
    writer.kv_data = before
    size = vocab_size(model)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(size)
    notes.append(f"no tokenizer can be read ({why}): {size} tokens without texts stand for its vocabulary")


def vocab_size(model: Any) -> int:
    for tensors in model.gguf_writer.tensors:
        if "token_embd.weight" in tensors:
            return int(tensors["token_embd.weight"].shape[0])
    return int(model.hparams["vocab_size"])


def write_shapes(folder: Path) -> None:
    """Writes a safetensors file with the tensors of the configuration's model; a hole replaces the data."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    nested = given.get("text_config") if isinstance(given.get("text_config"), dict) else {}
    dtype = next((d for c in (given, nested) for d in (c.get("dtype"), c.get("torch_dtype")) if d), DEFAULT_DTYPE)
    if dtype not in DTYPES:
        raise ValueError(f"config.json: dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    names = given.get("architectures") or [""]
    kind = getattr(transformers, str(names[0]), None)
    with torch.device("meta"):
        if hasattr(kind, "_from_config"):
            model = kind._from_config(config)  # type: ignore[union-attr]
        else:
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    header = {}
    offset = 0
    for name, tensor in stored(model).items():
        size = tensor.numel() * DTYPES[dtype][1]
        header[name] = {
            "dtype": DTYPES[dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    data = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + offset)


def stored(model: Any) -> dict[str, Any]:
    """Returns the tensors of a model's checkpoint, each once, by their names in checkpoints."""
    found = {}
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    try:
        # transformers 5 renames and fuses tensors when it loads them
        loading: Any = importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return found
    return dict(loading.revert_weight_conversion(model, found))


if __name__ == "__main__":
    sys.exit(main())
